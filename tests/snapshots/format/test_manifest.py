"""The commit record survives the round trip and notices every change."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.snapshots.format import manifest
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, FileEntry, Manifest, OtherVersionError
from elasticflow.snapshots.format.pieces import TensorPlace
from elasticflow.system.records import printable

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
    assert {LENT.partition("/")[0]} == found.borrowed_from
    assert ENTRY == found.locations()[LENT]
    assert frozenset() == made().borrowed_from


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
    """A later format, or a field more, is no damage: the digest shows that it is what was written."""
    before = json.loads(made().to_bytes())
    del before["digest"]
    for change, told in (({"format": 3}, "format 3"), ({"compressed_by": "zstd"}, "compressed_by")):
        content = {**before, **change}
        data = json.dumps({**content, "digest": manifest._digest(content)}).encode()
        with pytest.raises(OtherVersionError, match=f"MANIFEST.json has {told}, which only another version"):
            manifest.parse(data)
        with pytest.raises(DamagedSnapshotError, match="does not match its digest"):
            manifest.parse(data.replace(b'"step": ', b'"step": 1'))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "is empty"),
        (b"{", "is no JSON at character 1"),
        (b"[]", "holds a list, not an object"),
        (b"null", "holds null, not an object"),
        (b"{}", "does not match its digest"),
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
HOSTILE = JSON | st.sampled_from(
    [
        2**62,
        2**80,
        -1,
        -8,
        "../../x",
        "/etc/passwd",
        "\x1b[2J",
        "a\x00b",
        [2**40, 2**40],
        [-1],
        1e400,
        "inf",
        True,
    ]
)


def signed(content: dict[str, Any]) -> bytes:
    """Return a manifest that says *content*, with a right digest: only what it says is wrong."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**content, "digest": digest}).encode()


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the way to every value inside *value*."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, item in inner for way in ((*at, key), *paths_in(item, (*at, key)))]


@given(JSON)
def test_nothing_but_damage_comes_of_any_json(content: Any) -> None:
    """Whatever lies there, with a right digest or without: a damaged snapshot, or another version's."""
    text = json.dumps(content).encode()
    for data in (text, signed({**content, "format": 1}) if isinstance(content, dict) else text):
        with pytest.raises((DamagedSnapshotError, OtherVersionError)):
            manifest.parse(data)


@given(st.binary(max_size=200))
def test_nothing_but_damage_comes_of_any_bytes(data: bytes) -> None:
    """Nor of what is no JSON at all."""
    with pytest.raises(DamagedSnapshotError):
        manifest.parse(data)


@given(st.data())
def test_nothing_but_damage_comes_of_a_manifest_that_was_changed(data: st.DataObject) -> None:
    """One value replaced by a hostile one: a manifest all of whose statements still fit together, or damage."""
    content = json.loads(made(borrowed={LENT: ENTRY}, fingerprints={"train": "ab"}).to_bytes())
    del content["digest"]
    way = data.draw(st.sampled_from(paths_in(content)))
    inner = content
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = data.draw(HOSTILE)
    try:
        found = manifest.parse(signed(content))
    except (DamagedSnapshotError, OtherVersionError) as error:
        assert error.message == printable(error.message)  # noqa: PT017
        return
    assert all(place.offset + place.nbytes <= found.files["a"].size for place in found.tensors.values())
    assert all(".." not in file for file in found.locations())
    assert (found.name, found.trigger) == (printable(found.name), printable(found.trigger))
    assert manifest.parse(found.to_bytes()) == found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"files": {"a": FileEntry(2**62, (1,)), "state.json": FileEntry(3, (9,))}}, "not as many checksums"),
        ({"files": {"../../x": FileEntry(3, (9,))}, "tensors": {}}, "no name of a file"),
        ({"borrowed": {"../x/a": ENTRY}}, "no name of a file"),
        ({"trigger": "\x1b[2Jwiped"}, r"trigger is \\x1b\[2Jwiped"),
        ({"created": 1e300}, "created is 1e"),
        ({"ranked_by": 3}, "ranked_by is 3"),
        ({"name": "../../etc"}, "is not that of its step"),
        ({"tensors": {"w": TensorPlace("a", "F32", (2**40, 2**40), 8, 32)}}, "tensor w: the size or offset is not a possible count of bytes"),
        ({"tensors": {"w": TensorPlace("a", "F32", (8,), -8, 32)}}, "tensor w: the size or offset is not a possible count of bytes"),
        ({"tensors": {"w": TensorPlace("a", "F32", (4,), 8, 32)}}, "its shape and type another number"),
        ({"tensors": {"w": TensorPlace("a", "F31", (8,), 8, 32)}}, "is of F31"),
        ({"tensors": {"w": TensorPlace("b", "F32", (8,), 8, 32)}}, "lies in b, which it does not hold"),
        (
            {"tensors": {"w": TensorPlace("a", "F32", (6,), 8, 24), "s": TensorPlace("a", "I64", (), 24, 8)}},
            "overlap, or leave a gap, at byte 24",
        ),
        ({"tensors": {"w": TensorPlace("a", "F32", (6,), 8, 24)}}, "end at byte 32, and the file at byte 40"),
        ({"aliases": {"tied": "gone"}}, "which it does not hold"),
    ],
)  # fmt: skip
def test_what_no_manifest_can_mean_is_refused(changes: dict[str, Any], why: str) -> None:
    """Sizes, shapes, names and places that lead out of the files, out of memory or to the terminal."""
    with pytest.raises(DamagedSnapshotError, match=why):
        manifest.parse(made(**changes).to_bytes())


def test_a_manifest_of_many_tensors_is_parsed_in_a_pass() -> None:
    """Ten thousand tensors in one file fit together, and are found to."""
    places = {f"model/{n}": TensorPlace("a", "F32", (2,), 8 + 8 * n, 8) for n in range(10_000)}
    files = {"a": FileEntry(8 + 80_000, (1,)), "state.json": FileEntry(3, (9,))}
    assert places == manifest.parse(made(files=files, tensors=places, aliases={}).to_bytes()).tensors
