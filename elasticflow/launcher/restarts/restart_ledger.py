"""The ledger of a run: one line for each failure, beside events.jsonl and in what is claimed for generations.

Each generation's claim under the snapshot URI holds the lines of the failures before it: a launch that continues the run
on another machine finds them there.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from elasticflow.protocol.json_codec import from_json
from elasticflow.system.json_lines import append_lines
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

CLAIMED_FAILURES = "failures"
"""Key of a generation's claim under which the lines lie."""


@dataclass(frozen=True)
class LedgerEntry:
    """One line of the ledger.

    Attributes:
        time: Unix time.
        failure_class: Class of the failure; `class` in the file.
        step: Last step finished in that generation; None when none was, so it failed while building.
        high: Highest step the run had ever finished by then.
        high_epoch: Epoch of *high_step*.
        fingerprint: Equal for the same error.
    """

    time: float
    failure_class: str
    step: int | None
    epoch: int | None
    high: int
    high_epoch: int
    generation: int
    fingerprint: str
    charged: bool

    def to_json(self) -> dict[str, Any]:
        """Return the line's content."""
        record = asdict(self)
        record["class"] = record.pop("failure_class")
        return record


class RestartLedger:
    """The failures of a run, oldest first, in a file that only grows.

    Args:
        require_held: Called before each write; raises where another launch may have the run (`launcher/journal/run_lock.py`).
    """

    def __init__(self, path: Path, require_held: Callable[[], None] = lambda: None) -> None:
        self._path, self._require_held = path, require_held
        self.entries = read_ledger(path)

    def append(self, entry: LedgerEntry) -> None:
        """Add an entry; it is on disk before this returns."""
        self._require_held()
        append_lines(self._path, [entry.to_json()])
        self.entries.append(entry)

    def since(self, generation: int) -> list[dict[str, Any]]:
        """Return the lines about *generation*, the newest, and about what failed after it: no claim holds them yet."""
        # 0: a generation that could not be formed.
        newest = takewhile(lambda e: e.generation in {0, generation}, reversed(self.entries))
        return [entry.to_json() for entry in newest][::-1]

    def take_in(self, claims: Iterable[Mapping[str, Any]]) -> None:
        """Add the lines that *claims*, oldest first, hold and the file does not: another machine continued the run."""
        for claim in claims:
            failures = claim.get(CLAIMED_FAILURES)
            for entry in map(_entry, failures if isinstance(failures, list) else ()):
                if entry is not None and entry not in self.entries:
                    self.append(entry)


def read_ledger(path: Path) -> list[LedgerEntry]:
    """Return the ledger's entries, oldest first; none if the file is absent. Damaged lines are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        with suppress(BadJsonError):
            entries.append(_entry(parse(line)))
    return [entry for entry in entries if entry is not None]


def _entry(record: object) -> LedgerEntry | None:
    """Return the entry that *record* is the JSON of; None if it is anything else."""
    if not isinstance(record, dict):
        return None
    fields = {"failure_class" if key == "class" else key: value for key, value in record.items()}
    with suppress(ValueError):
        return from_json(LedgerEntry, fields)
    return None
