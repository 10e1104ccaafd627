"""What a run folder keeps of each sink: how far it has got, and what it remembers of the remote run."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.sinks.reader import Position
from elasticflow.system import atomic_files, records

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.run_folder import RunFolder
    from elasticflow.sinks.sink import Options, Remembered

FOLDER = "sinks"
_FORMAT = 1


@dataclass(frozen=True)
class SinkRecord:
    """How far a sink has got.

    Attributes:
        position: All before it has been delivered.
        remembered: What the sink's last `open` returned.
    """

    position: Position = field(default_factory=Position)
    remembered: Remembered = field(default_factory=dict)


def record_path(folder: RunFolder, name: str) -> Path:
    """Return where the record of the sink *name* is."""
    return folder.path / FOLDER / f"{name}.json"


def read_record(folder: RunFolder, name: str, options: Options) -> SinkRecord:
    """Return the record of a sink; the beginning if there is none, if it is damaged, or if its options were others.

    A sink with other options is another place, to which nothing was sent yet.
    """
    values = records.read(record_path(folder, name))
    if not isinstance(values, dict) or values.get("format") != _FORMAT or values.get("options") != options:
        return SinkRecord()
    remembered = values.get("remembered")
    return SinkRecord(
        Position.from_json(values.get("position")), remembered if isinstance(remembered, dict) else {}
    )


def write_record(folder: RunFolder, name: str, options: Options, record: SinkRecord) -> None:
    """Replace the record of a sink; it is on the disk afterwards.

    Raises:
        OSError: it cannot be written; the old one stands.
    """
    values: dict[str, Any] = {
        "format": _FORMAT,
        "sink": name,
        "options": options,
        "remembered": record.remembered,
        "position": record.position.to_json(),
    }
    atomic_files.write(record_path(folder, name), [json.dumps(values).encode(), b"\n"])
