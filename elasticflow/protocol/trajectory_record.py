"""A run's trajectory, step by step: the records by which two runs are compared, and their files.

If `ELASTICFLOW_WITNESS` names a folder, rank 0 writes one file there for each generation: one JSON line for the state
with which it began and one after every finished step. A worker that is killed leaves at most a last line without its
newline, which no reader takes in.

Where the model is sharded, each rank of the first shard group writes such a file: one rank has no whole tensor, and joint acts
after a step would change the run's timing. The record of shard 0 is the record above, but that each sharded tensor has the CRC-32 and the number of
bytes of that rank's rows; the other ranks add theirs. `read_records` joins them to the CRC-32 of the whole tensor.

A trial may also have the run *held* after a step, so that it acts on the run at a known step, however short
the steps are: rank 0 renames `hold-STEP` to `held-STEP` after that step and waits until that file is removed, or its
worker is asked to leave, or killed. A later worker that does the step again is not held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.system.json_lines import lines_of
from elasticflow.system.records import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

HOLD = "hold-"
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # bits of a CRC-32 are coefficients, the highest bit that of x^0


@dataclass(frozen=True)
class Record:
    """The state after one finished step, or where a generation begins.

    Attributes:
        step: Finished optimizer steps.
        loss: Mean over the global batch of that step; None where a generation begins.
        digests: CRC-32 of the bytes of each tensor, by name, and each plain number as text; within a file of a sharded run also
            `piece` of some rows of a tensor.
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


def records_file(folder: Path, generation: int, shard: int = 0) -> Path:
    """Return the file in which a shard of a generation writes its records."""
    return folder / f"g{generation:04d}{f'-{shard}' if shard else ''}.jsonl"


def piece(crc: int, nbytes: int) -> str:
    """Return the digest of a shard's rows of a tensor, which may be none."""
    return f"{crc:08x}:{nbytes}"


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
    """Return all records in the order in which they were written; steps that were done again come again.

    A step of a sharded run is there once all shards have recorded it.
    """
    records = []
    of_rank_0 = [path for path in folder.glob("g*.jsonl") if "-" not in path.stem]
    for path in sorted(of_rank_0, key=lambda path: int(path.stem[1:])):
        shards = folder.glob(f"{path.stem}-*.jsonl")
        others = [_lines(each) for each in sorted(shards, key=lambda each: int(each.stem.partition("-")[2]))]
        for number, record in enumerate(_lines(path)):
            parts = [record, *(lines[number] for lines in others if number < len(lines))]
            if len(parts) == len(others) + 1:
                records.append(_joined(parts))
    return records


def _lines(path: Path) -> list[Record]:
    return [from_json(Record, parse(line)) for line in lines_of(path) if line.endswith(b"\n")]


def _joined(parts: Sequence[Record]) -> Record:
    """Return the record of the whole tensors; *parts*: the record of each shard."""
    first = parts[0]
    whole = {
        name: joined(part.digests[name] for part in parts) if ":" in digest else digest
        for name, digest in first.digests.items()
    }
    return replace(first, digests=whole)


def joined(pieces: Iterable[str]) -> str:
    """Return the CRC-32 of rows that lie one after the other, from the `piece` of each shard in order."""
    whole = 0
    for each in pieces:
        crc, _, nbytes = each.partition(":")
        whole = _product(_shift(int(nbytes)), whole) ^ int(crc, 16)
    return f"{whole:08x}"


@lru_cache(maxsize=4096)
def _shift(nbytes: int) -> int:
    """Return x^(8 * nbytes): its product with a CRC-32 is the CRC-32 before so many bytes, as zlib's crc32_combine has it."""
    power, square, exponent = _ONE, _ONE >> 1, 8 * nbytes
    while exponent:
        power = _product(square, power) if exponent & 1 else power
        square, exponent = _product(square, square), exponent >> 1
    return power


def _product(a: int, b: int) -> int:
    """Return the product of two polynomials over GF(2), modulo that of CRC-32."""
    product = 0
    while a:
        product ^= b if a & _ONE else 0
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
