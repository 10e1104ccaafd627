"""The record of a run's steps, as it lies on disk."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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
