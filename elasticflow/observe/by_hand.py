"""A run that plain python or torchrun started: makes the files that a supervisor writes from the logs of rank 0."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from weakref import finalize

from elasticflow import events
from elasticflow.observe.records import read
from elasticflow.observe.worker_logs import generations
from elasticflow.run_folder import RunFolder
from elasticflow.system import atomic_files
from elasticflow.system.records import int_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.system.records import Record

_MEASURED = frozenset({events.STEP, events.EVALUATION})
# A supervisor leaves these fields out of metrics.jsonl.
_LEFT_OUT = frozenset({"timestamp", "level", "event", "job", "run_id", "node", "rank", "origin"})


def was_started_by_hand(path: Path) -> bool:
    """Return True if *path* is the folder of a run that has trained without a supervisor."""
    supervised = ("state.json", "events.jsonl", "launches")
    if any((path / name).exists() for name in supervised) or not (path / "generations").is_dir():
        return False
    return bool(generations(RunFolder(path)))


@dataclass(frozen=True)
class RunByHand(RunFolder):
    """The folder of such a run. `metrics`, `events` and `state` are in a temporary folder, and as new as the logs."""

    @property
    def metrics(self) -> Path:
        """Steps and evaluations that count."""
        return self._made("metrics.jsonl")

    @property
    def metrics_redone(self) -> Path:
        """Lines of steps that were redone after a later start."""
        return self._made("metrics.redone.jsonl")

    @property
    def events(self) -> Path:
        """Events that rank 0 has logged."""
        return self._made("events.jsonl")

    @property
    def state(self) -> Path:
        """Progress of the run. The run's lock, not this file, tells if it is running."""
        return self._made("state.json")

    @cached_property
    def _views(self) -> Path:
        folder = Path(mkdtemp(prefix="elasticflow-"))
        finalize(self, rmtree, folder, ignore_errors=True)
        return folder

    @cached_property
    def _sizes(self) -> dict[Path, int]:
        return {}

    def _made(self, name: str) -> Path:
        logs = [self.rank_log(generation, 0) for generation in generations(self)]
        sizes = {log: log.stat().st_size for log in logs if log.is_file()}
        if sizes != self._sizes or not self._sizes:
            told = _Told()
            for log in sizes:
                told.take(read(log))
            told.write(self._views)
            self._sizes.clear()
            self._sizes.update(sizes)
        return self._views / name


class _Told:
    """Records from the logs of rank 0, one generation after the other."""

    def __init__(self) -> None:
        self._measured: list[Record] = []
        self._redone: list[Record] = []
        self._events: list[Record] = []
        self._state: dict[str, Any] = {"restarts": -1}

    def take(self, records: Iterable[Record]) -> None:
        """Add the log of the next generation."""
        self._state["restarts"] += 1
        self._state |= {"status": None, "verdict": None}
        for record in records:
            name = record.get("event")
            if record.get("origin") != events.OURS or name not in events.EVENTS:
                continue
            if name in _MEASURED:
                self._measured.append({key: record[key] for key in record if key not in _LEFT_OUT})
            elif events.EVENTS[name].is_kept:
                self._events.append(record)
            self._follow(record)

    def _follow(self, record: Record) -> None:
        state = self._state
        state.setdefault("started", record.get("timestamp"))
        state |= {"updated": record.get("timestamp"), "generation": int_of(record, "generation")}
        match record["event"]:
            case events.STEP:
                state |= {key: record.get(key) for key in ("step", "epoch", "loss")}
            case events.TRAINING_STARTED:
                state |= {key: record.get(key) for key in ("step", "steps", "epoch")}
                self._settle(int_of(record, "step"))
            case events.TRAINING_FINISHED:
                state |= {"step": record.get("step"), "epoch": record.get("epoch"), "status": "finished"}
            case events.SNAPSHOT_COMMITTED:
                state["snapshot"] = record.get("name")
            case events.WORKER_RAISED:
                # Records that a supervisor would write: the failure, the end of its generation, the end of the run.
                ended = {**record, "reason": record.get("error"), "why": "no supervisor starts it again"}
                ends = (events.WORKER_FAILED, events.GENERATION_ENDED, events.RUN_FAILED)
                self._events += [{**ended, "event": event} for event in ends]
                state |= {"status": "failed", "verdict": {**ended, "event": events.RUN_FAILED}}
                # Not each step has a line of its own.
                state["step"] = record.get("step", state.get("step"))
            case _:
                pass

    def _settle(self, step: int) -> None:
        """Move lines after *step*, from which a generation continues, to the redone lines."""
        self._redone += [line for line in self._measured if int_of(line, "step") > step]
        self._measured = [line for line in self._measured if int_of(line, "step") <= step]

    def write(self, folder: Path) -> None:
        """Write the files that views read."""
        lines = {"metrics": self._measured, "metrics.redone": self._redone, "events": self._events}
        for name, records in lines.items():
            text = "".join(json.dumps(record) + "\n" for record in records)
            atomic_files.replace(folder / f"{name}.jsonl", [text.encode()], sync=False)
        atomic_files.replace(folder / "state.json", [json.dumps(self._state).encode()], sync=False)
