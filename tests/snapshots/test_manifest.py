"""The commit record survives the round trip and notices every change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.snapshots import manifest
from elasticflow.snapshots.manifest import DamagedSnapshotError, FileEntry, Manifest, TensorPlace

LENT = "000000000003-0001-00000003/frozen-00000-of-00001.safetensors"
ENTRY = FileEntry(77, (5,), "cd" * 32)


def made(**changes: Any) -> Manifest:
    """A manifest like any other."""
    facts: dict[str, Any] = {
        "run_id": "r",
        "name": "000000000005-0001-00000005",
        "step": 5,
        "generation": 1,
        "world_size": 2,
        "trigger": "steps",
        "created": 1.5,
        "files": {"a": FileEntry(40, (1,)), "state.json": FileEntry(3, (9,))},
        "tensors": {"w": TensorPlace("a", "F32", (2, 3), 8, 24), "s": TensorPlace("a", "I64", (), 32, 8)},
        "aliases": {"tied": "w"},
    }
    return Manifest(**{**facts, **changes})


@given(
    st.none() | st.floats(allow_nan=False), st.text(), st.integers(0, 10**15), st.none() | st.just("ab" * 32)
)
def test_round_trip(metric: float | None, text: str, samples: int, sha256: str | None) -> None:
    """What is written is read back equal, infinities and what is borrowed included."""
    files = {"a": FileEntry(40, (1,), sha256)}
    before = made(
        metric=metric, fingerprints={"train": text}, samples=samples, files=files, borrowed={LENT: ENTRY}
    )
    assert manifest.parse(before.to_bytes()) == before


def test_size_is_that_of_its_own_files() -> None:
    """Neither the manifest itself nor what is borrowed is counted."""
    assert made(borrowed={LENT: ENTRY}).size == 43


def test_locations() -> None:
    """Own files lie in its own folder, borrowed ones where they say; all of them are needed to load it."""
    found = made(borrowed={LENT: ENTRY})
    expected = {f"{found.name}/a", f"{found.name}/state.json", LENT}
    assert expected == found.locations().keys()
    assert {f"{found.name}/a", LENT} == {found.location("a"), found.location(LENT)}
    assert {LENT.partition("/")[0]} == found.lenders
    assert ENTRY == found.locations()[LENT]
    assert frozenset() == made().lenders


def test_manifests_of_before_are_read() -> None:
    """One written when nothing could be borrowed and files had no SHA-256 is as good as any."""
    content = json.loads(made().to_bytes())
    for key in ("borrowed", "digest"):
        del content[key]
    for entry in content["files"].values():
        del entry["sha256"]
    old = json.dumps({**content, "digest": manifest._digest(content)}).encode()
    assert made() == manifest.parse(old)


def test_changed_values_are_refused() -> None:
    """A value changed by hand does not match the digest."""
    content = json.loads(made().to_bytes())
    for key in content.keys() - {"digest", "format"}:
        with pytest.raises(DamagedSnapshotError, match="does not match its digest"):
            manifest.parse(json.dumps({**content, key: "x"}).encode())


def test_other_formats_are_named() -> None:
    """A later format is refused by number, not as damage of unknown kind."""
    content = {**json.loads(made().to_bytes()), "format": 2}
    with pytest.raises(DamagedSnapshotError, match=r"MANIFEST.json has format 2, this version reads 1"):
        manifest.parse(json.dumps(content).encode())


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"{", "is no JSON at character 1"),
        (b"[]", "holds a list, not an object"),
        (b"null", "holds null, not an object"),
        (b"{}", "has format None"),
        (b"\x00\xff", "is not UTF-8 at byte 1"),
        (b'"text"', "holds a text, not an object"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_rubbish_is_refused(data: bytes, why: str) -> None:
    """What is no manifest at all is damage, and is called what it is."""
    with pytest.raises(DamagedSnapshotError, match=f"MANIFEST.json {why}"):
        manifest.parse(data)


def test_incomplete_is_refused() -> None:
    """A right digest over a record without its fields does not make a manifest."""
    content = {"format": 1, "files": {}}
    digest = manifest._digest(content)
    with pytest.raises(DamagedSnapshotError, match="is incomplete"):
        manifest.parse(json.dumps({**content, "digest": digest}).encode())
