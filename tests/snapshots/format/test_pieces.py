"""Tensors in pieces: they are whole or refused, and any range of bytes is found in them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.snapshots.format import manifest
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, FileEntry
from elasticflow.snapshots.format.pieces import Piece, PiecesError, TensorPlace, whole_tensors
from tests.snapshots.format.test_manifest import made

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
HEADER = 8


def cut(shape: tuple[int, ...], degree: int) -> list[tuple[int, int]]:
    """Return the rows of each of *degree* shards, as torch cuts a tensor; some may have none."""
    size = -(-shape[0] // degree)
    return [(min(shape[0], n * size), min(shape[0], (n + 1) * size)) for n in range(degree)]


def place_of(file: str, shape: tuple[int, ...], rows: tuple[int, int], key: str = "w") -> TensorPlace:
    """Return the place of these rows in a file of their own."""
    local = (rows[1] - rows[0], *shape[1:])
    return TensorPlace(file, "U8", local, HEADER, math.prod(local), Piece.of_rows(key, shape, rows[0]))


def placed(shape: tuple[int, ...], cuts: Sequence[tuple[int, int]]) -> dict[str, TensorPlace]:
    """Return the places of tensor `w` cut so, a file for each piece."""
    places = [place_of(f"f{low}", shape, (low, high)) for low, high in cuts if low < high]
    return {place.piece.key: place for place in places if place.piece}


@given(SHAPES, st.integers(1, 5), st.integers(1, 5), st.randoms())
def test_any_rows_are_found_at_any_degree(shape: tuple[int, ...], saved: int, wanted: int, draw: Any) -> None:
    """Cut for one degree and read for another, every range has the bytes of the tensor."""
    size, row = math.prod(shape), math.prod(shape[1:])
    content = bytes(draw.randrange(256) for _ in range(size))
    places = placed(shape, cut(shape, saved))
    files = {
        place.file: bytes(HEADER) + content[place.piece.begin * row :][: place.nbytes]
        for place in places.values()
        if place.piece
    }
    whole = whole_tensors(places)["w"]
    assert (size, shape) == (whole.nbytes, whole.shape)
    for low, high in cut(shape, wanted):
        spans = list(whole.spans(low * row, high * row))
        found = b"".join(files[file][offset : offset + nbytes] for file, offset, nbytes in spans)
        assert content[low * row : high * row] == found


@given(SHAPES, st.integers(1, 5))
def test_pieces_survive_the_manifest(shape: tuple[int, ...], degree: int) -> None:
    """A manifest with pieces is of format 2, and is read back equal."""
    places = placed(shape, cut(shape, degree))
    files = {place.file: FileEntry(HEADER + place.nbytes, (1,)) for place in places.values()}
    before = made(
        files={**files, "state.json": FileEntry(3, (9,))}, tensors=places, aliases={"tied": "w"}, format=2
    )
    found = manifest.parse(before.to_bytes())
    assert before == found
    assert ["w"] == list(found.whole)


def test_a_manifest_without_pieces_says_nothing_of_them() -> None:
    """Older versions read it: format 1, and no field is new."""
    data = made().to_bytes()
    assert b"piece" not in data
    assert b'"format":1' in data


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (placed((9, 2), [(0, 3), (5, 9)]), "rows 3 to 5 of w are missing"),
        (placed((9, 2), [(0, 3), (3, 7)]), "rows 7 to 9 of w are missing"),
        (placed((9, 2), [(0, 5), (3, 9)]), "rows 3 to 5 of w are there twice"),
        (placed((9, 2), [(2, 9)]), "rows 0 to 2 of w are missing"),
        ({"w@1": place_of("a", (4,), (0, 4))}, "w@1 is called a piece of w from row 0 on"),
        ({"w": TensorPlace("a", "U8", (4,), 8, 4), **placed((4,), [(0, 4)])}, "as a whole and in pieces"),
        (
            {"w@0": place_of("a", (4, 2), (0, 2)), "w@2": place_of("b", (4, 3), (2, 4))},
            "of several shapes or dtypes",
        ),
        (
            {"w@0": TensorPlace("a", "U8", (4, 1), 8, 4, Piece("w", (4, 2), (0, 0)))},
            "cut along another dimension",
        ),
        (
            {"w@0": TensorPlace("a", "U8", (4, 1), 8, 4, Piece("w", (4, 2), (0, 1)))},
            "cut along another dimension",
        ),
    ],
)
def test_what_does_not_make_a_tensor_whole_is_refused(places: dict[str, TensorPlace], why: str) -> None:
    """Before a commit, and where a manifest is read."""
    with pytest.raises(PiecesError, match=why):
        whole_tensors(places)
    files = {place.file: FileEntry(HEADER + place.nbytes, (1,)) for place in places.values()}
    if len(files) == len(places):
        damaged = made(
            files={**files, "state.json": FileEntry(3, (9,))}, tensors=places, aliases={}, format=2
        )
        with pytest.raises(DamagedSnapshotError, match=why):
            manifest.parse(damaged.to_bytes())


def test_a_format_that_is_not_that_of_the_tensors_is_damage() -> None:
    """Pieces in format 1 would be loaded by an older version as tensors of other names."""
    places = placed((4,), [(0, 4)])
    files = {"f0": FileEntry(HEADER + 4, (1,)), "state.json": FileEntry(3, (9,))}
    with pytest.raises(DamagedSnapshotError, match="its format is 1, and that of its tensors 2"):
        manifest.parse(made(files=files, tensors=places, aliases={}, format=1).to_bytes())
