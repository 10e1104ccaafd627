"""The commit record survives the round trip and notices every change."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.snapshots import manifest
from elasticflow.snapshots.manifest import DamagedSnapshotError, FileEntry, Manifest, TensorPlace


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
        "files": {"a": FileEntry(10, (1, 2)), "state.json": FileEntry(3, (9,))},
        "tensors": {"w": TensorPlace("a", "F32", (2, 3), 8, 24), "s": TensorPlace("a", "I64", (), 32, 8)},
        "aliases": {"tied": "w"},
    }
    return Manifest(**{**facts, **changes})


@given(st.none() | st.floats(allow_nan=False), st.text(), st.integers(0, 10**15))
def test_round_trip(metric: float | None, text: str, samples: int) -> None:
    """What is written is read back equal, infinities included."""
    before = made(metric=metric, fingerprints={"train": text}, samples=samples)
    assert manifest.parse(before.to_bytes()) == before


def test_size_is_that_of_all_files() -> None:
    """The manifest itself is not counted."""
    assert made().size == 13


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


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"{}", b"\x00\xff", b'"text"'])
def test_rubbish_is_refused(data: bytes) -> None:
    """What is no manifest at all is damage."""
    with pytest.raises(DamagedSnapshotError, match="cut or not a manifest"):
        manifest.parse(data)


def test_incomplete_is_refused() -> None:
    """A right digest over a record without its fields does not make a manifest."""
    content = {"format": 1, "files": {}}
    digest = manifest._digest(content)
    with pytest.raises(DamagedSnapshotError, match="is incomplete"):
        manifest.parse(json.dumps({**content, "digest": digest}).encode())
