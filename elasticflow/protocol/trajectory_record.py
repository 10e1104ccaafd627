"""A run's trajectory, step by step: the record by which two runs are compared, and its files.

If `ELASTICFLOW_WITNESS` names a folder, rank 0 writes one file there for each generation: one JSON line for the state
with which it began and one after every finished step. A worker that is killed leaves at most a last line without its
newline, which no reader takes in.

A trial may also have the run *held* after a step, so that what it does to the run it does at a known step, however short
the steps are: rank 0 renames `hold-STEP` to `held-STEP` after that step and waits until that file is removed, or its
worker is asked to leave, or killed. A later worker that does the step again is not held.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.system.json_lines import lines_of
from elasticflow.system.records import parse

if TYPE_CHECKING:
    from pathlib import Path

HOLD = "hold-"


@dataclass(frozen=True)
class Record:
    """The state after one finished step, or where a generation begins.

    Attributes:
        step: Finished optimizer steps.
        samples: Samples trained on.
        loss: Mean over the global batch of that step; None where a generation begins.
        generation: Number of the generation that recorded it.
        world_size: Workers of that generation.
        digests: CRC-32 of the bytes of each tensor, by name, and each plain number as text.
    """

    step: int
    samples: int
    loss: float | None
    generation: int
    world_size: int
    digests: dict[str, str]

    def line(self) -> bytes:
        """Return the record as one line of its file."""
        return to_json(self).encode() + b"\n"


def records_file(folder: Path, generation: int) -> Path:
    """Return where a generation writes its records."""
    return folder / f"g{generation:04d}.jsonl"


def hold_file(folder: Path, step: int) -> Path:
    """Return the file whose existence has the run held after *step*."""
    return folder / f"{HOLD}{step}"


def held_file(folder: Path, step: int) -> Path:
    """Return the file whose existence says that the run is held after *step*."""
    return folder / f"held-{step}"


def exact_file(folder: Path) -> Path:
    """Return the file whose existence says that the run's steps have the same bits at every world size."""
    return folder / "exact"


def read_records(folder: Path) -> list[Record]:
    """Return all records in the order in which they were written; steps that were done again come again."""
    records = []
    for path in sorted(folder.glob("g*.jsonl"), key=lambda path: int(path.stem[1:])):
        records += [from_json(Record, parse(line)) for line in lines_of(path) if line.endswith(b"\n")]
    return records
