"""The record of a run's steps, as it lies on disk."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from elasticflow.protocol import trajectory_record
from elasticflow.protocol.trajectory_record import Record

if TYPE_CHECKING:
    from pathlib import Path


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Generations in the order of their numbers, also beyond 9,999; infinities and NaN come back."""
    records = [
        Record(0, 0, None, 9999, 2, {"model/a": "00"}),
        Record(1, 8, math.inf, 9999, 2, {"model/a": "01"}),
        Record(1, 8, math.nan, 10000, 1, {"model/a": "01", "optimizer/a/step": "1"}),
    ]
    for record in records:
        with trajectory_record.records_file(tmp_path, record.generation).open("ab") as file:
            file.write(record.line())

    assert list(map(repr, records)) == list(map(repr, trajectory_record.read_records(tmp_path)))


def test_a_line_that_a_kill_has_torn_is_not_there(tmp_path: Path) -> None:
    """Whatever the length of what is left of it; the next generation's file is not touched by it."""
    whole, torn = Record(1, 8, 0.5, 1, 2, {"model/a": "00"}), Record(2, 16, 0.25, 1, 2, {"model/a": "01"})
    later = Record(2, 16, 0.25, 2, 2, {"model/a": "01"})
    trajectory_record.records_file(tmp_path, 2).write_bytes(later.line())
    for length in range(len(torn.line())):
        trajectory_record.records_file(tmp_path, 1).write_bytes(whole.line() + torn.line()[:length])
        assert [whole, later] == trajectory_record.read_records(tmp_path)


@given(st.lists(st.binary(max_size=70), min_size=1, max_size=5))
def test_pieces_make_the_digest_of_the_whole(pieces: list[bytes]) -> None:
    """Whatever their lengths, also where a shard has no rows."""
    digests = [trajectory_record.piece(zlib.crc32(each), len(each)) for each in pieces]
    assert trajectory_record.joined(digests) == f"{zlib.crc32(b''.join(pieces)):08x}"


def test_records_of_all_shards_are_one(tmp_path: Path) -> None:
    """Tensors that are not sharded, and numbers, are those of rank 0; a step that a shard has not recorded is not there."""
    parts = (b"some rows", b"", b"others")
    for shard, rows in enumerate(parts):
        digests = {
            "model/w": trajectory_record.piece(zlib.crc32(rows), len(rows)),
            "model/b": "0000000a",
            "lr": "1e-05",
        }
        if shard:
            digests = {"model/w": digests["model/w"]}
        with trajectory_record.records_file(tmp_path, 10, shard).open("wb") as file:
            for step in range(3 - (shard == 2)):
                file.write(Record(step, 8 * step, None, 10, 3, digests).line())
    later = Record(3, 24, 0.5, 11, 1, {"model/w": "0000000b"})
    trajectory_record.records_file(tmp_path, 11).write_bytes(later.line())

    found = trajectory_record.read_records(tmp_path)

    whole = f"{zlib.crc32(b''.join(parts)):08x}"
    assert [each.step for each in found] == [0, 1, 3]
    assert found[1].digests == {"model/w": whole, "model/b": "0000000a", "lr": "1e-05"}
    assert found[2] == later
