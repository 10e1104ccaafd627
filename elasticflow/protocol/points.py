"""Points that hooks log: lines of `logged/g<generation>-rank<rank>.jsonl` in the run folder, and images beside them.

A worker appends to a file of its own generation, whose first line names the step from which the generation continued. So
a reader leaves out an earlier generation's points of steps that were done again, and no point appears twice.
The lines of a step are on disk before a snapshot of that step is handed over, so no point is missing either.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.system.json_lines import lines_of
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Kind = Literal["scalar", "text", "image"]
FOLDER, IMAGES = "logged", "images"
MOST_CHARACTERS = 1_000_000
"""Of one text."""
_FILE = re.compile(r"g(\d+)-rank(\d+)\.jsonl")


def file_name(generation: int, rank: int) -> str:
    """Return the name of the file that a worker appends to."""
    return f"g{generation:04d}-rank{rank}.jsonl"


def read_points(run_folder: Path) -> list[dict[str, Any]]:
    """Return the points that hooks logged, by step and in the order of logging, without those of steps done again.

    Each has `step`, `epoch`, `hook`, `rank`, `generation`, `kind`, `name`, `time` and `value`: a number (None: not finite),
    a text, or an image's path in the run folder.
    """
    began: dict[int, int] = {}
    points: list[dict[str, Any]] = []
    for generation, rank, path in sorted(files_of(run_folder)):
        for record in _records(path):
            if "from" in record:
                began[generation] = record["from"]
            elif type(record.get("step")) is int and isinstance(record.get("name"), str):
                points.append({**record, "generation": generation, "rank": rank})
    kept = [p for p in points if all(p["step"] <= step for g, step in began.items() if g > p["generation"])]
    newest: dict[tuple[Any, ...], int] = {}
    for point in kept:
        newest[_call_of(point)] = max(point["generation"], newest.get(_call_of(point), 0))
    kept = [point for point in kept if point["generation"] == newest[_call_of(point)]]
    return sorted(kept, key=lambda point: point["step"])  # stable: files are read in order


def _call_of(point: dict[str, Any]) -> tuple[Any, ...]:
    """Return the hook's call that logged *point*: a call that was cut short is made again after the same step."""
    return point["step"], point.get("hook"), point["rank"]


def files_of(run_folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield the files: generation, rank, path."""
    folder = run_folder / FOLDER
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _FILE.fullmatch(path.name):
            yield int(match[1]), int(match[2]), path


def _records(path: Path) -> Iterator[dict[str, Any]]:
    for line in lines_of(path):
        try:
            yield parse(line)
        except BadJsonError:  # torn, where a machine died
            continue
