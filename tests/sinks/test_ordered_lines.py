from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.sinks.ordered_lines import Bookmark, OrderedLines

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def of_steps(path: Path, *, is_strict: bool = True) -> OrderedLines:
    """Return a reader of lines whose key is their step."""

    def key(record: dict[str, Any]) -> tuple[int] | None:
        return (record["step"],) if type(record.get("step")) is int else None

    return OrderedLines(path, key, is_strict)


def line(step: int, turn: int) -> bytes:
    """Return a line about *step*; another one for each time that it is done."""
    return json.dumps({"step": step, "turn": turn, "text": "x" * (step % 7)}).encode() + b"\n"


Act = tuple[str, int]
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 6)),
        st.tuples(st.just("tear"), st.integers(1, 20)),
        st.tuples(st.just("back"), st.integers(0, 8)),
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.just("damage"), st.integers(1, 20)),
    ),
    max_size=25,
)


@given(ACTS)
@settings(max_examples=200)
def test_each_step_is_read_once_in_order_whatever_is_cut_off_and_written_again(
    tmp_path_factory: pytest.TempPathFactory, acts: list[Act]
) -> None:
    """Steps come once and ascend; after the last act all that the file holds has been read, by marks kept as JSON.

    All but a step whose line was damaged once: when later ones were read it was none, and is not looked for again.
    """
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    file = _File(path)
    seen: list[int] = []
    mark = Bookmark()

    def read(most: int) -> bool:
        nonlocal mark
        records, behind = of_steps(path).read(mark, most)
        seen.extend(record["step"] for record in records)
        is_new = behind != mark
        mark = from_json(Bookmark, json.loads(to_json(behind)))
        return is_new

    for act, size in acts:
        if act == "read":
            read(size)
        else:
            file.does(act, size)
    while read(3):
        pass

    assert sorted(set(seen)) == seen
    assert file.whole_steps() <= set(seen)


class _File:
    """The writer's side."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: list[bytes] = []
        self._turn = 0
        self._damaged: set[int] = set()

    def does(self, act: str, size: int) -> None:
        """Write lines, or half a one; go back some steps to do them again; have the last line damaged."""
        torn = b""
        if act == "back":
            self._kept, self._turn = self._kept[: max(0, len(self._kept) - size)], self._turn + 1
        elif act == "write":
            self._kept += [line(len(self._kept) + number, self._turn) for number in range(size)]
        elif act == "tear":  # a writer that is killed, or that has not come to the line's end
            torn = line(len(self._kept), self._turn)[:-1][:size]
        elif self._kept:
            last = self._kept.pop()
            self._damaged.add(len(self._kept))
            self._kept.append(b"\0" * (size % len(last)) + last[size % len(last) :])
        self._path.write_bytes(b"".join(self._kept) + torn)

    def whole_steps(self) -> set[int]:
        """Return the steps whose lines are whole, and always were."""
        return set(range(len(self._kept))) - self._damaged


def test_a_line_longer_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    """A text of three megabytes between two short lines."""
    path = tmp_path / "events.jsonl"
    long = json.dumps({"step": 2, "text": "x" * (3 << 20)}).encode() + b"\n"
    path.write_bytes(line(1, 0) + long + line(3, 0))

    records, mark = of_steps(path).read(Bookmark(), 10)

    assert [1, 2, 3] == [record["step"] for record in records]
    assert path.stat().st_size == mark.offset


def test_lines_without_order_are_found_again_by_the_last_one_that_was_read(tmp_path: Path) -> None:
    """The clock went back, then a damaged line before was moved aside: what follows the last line read comes, once."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(line(5, 0) + b"damaged\n" + line(9, 0) + line(3, 0))
    reader = of_steps(path, is_strict=False)
    records, mark = reader.read(Bookmark(), 10)
    assert [5, 9, 3] == [record["step"] for record in records]

    path.write_bytes(line(5, 0) + line(9, 0) + line(3, 0) + line(4, 0))

    assert [4] == [record["step"] for record in reader.read(mark, 10)[0]]


def test_nothing_is_there_yet(tmp_path: Path) -> None:
    """An absent file has no lines, and its mark stays where it was."""
    assert of_steps(tmp_path / "none.jsonl").read(Bookmark(), 10) == ([], Bookmark())
