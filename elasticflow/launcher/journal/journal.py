"""The supervisor's records of a run: events.jsonl and state.json."""

from __future__ import annotations

import bisect
import json
import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.events import GENERATION_ENDED
from elasticflow.launcher.journal.durations import OUTAGE, Durations, read_parts
from elasticflow.launcher.journal.post_mortem import DISK_FULL, MACHINE, Machine, machine_of
from elasticflow.launcher.journal.warning_tally import WarningTally
from elasticflow.protocol.messages import Activity, Printed, Warned
from elasticflow.protocol.run_files import known_record, printed_record
from elasticflow.system import atomic_files
from elasticflow.system.json_lines import AppendedLines
from elasticflow.system.masking import Mask
from elasticflow.system.processes import boot_id
from elasticflow.system.records import float_of, unix_time
from elasticflow.system.records import read as read_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticflow.events import Event, EventRecord
    from elasticflow.launcher.journal.durations import Parts
    from elasticflow.protocol.messages import NodeFigures, StartedWorker
    from elasticflow.run_folder import RunFolder

_STATE_EVERY_S = 0.25
# Without changes: a script tells nothing for hours, and its run takes time meanwhile.
_UNCHANGED_STATE_EVERY_S = 1.0
_MONOTONIC = "updated_monotonic"  # in state.json: `time.monotonic()`
# As they stand in state.json, of one length.
_HAS_ROOM, _IS_FULL = f'"{DISK_FULL}": false'.encode(), f'"{DISK_FULL}": true '.encode()


def now() -> str:
    """Return the time in UTC, RFC 3339 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


# Fields of the state that belong to the run and not to a launch: what they are in a new run, and their types.
_CARRIED: dict[str, tuple[int | None, type | tuple[type, ...]]] = {
    "restarts": (0, int), "step": (0, int), "steps": (None, int), "epoch": (0, int), "loss": (None, (int, float, str)),
    "snapshot": (None, str), "script": (None, str),
}  # fmt: skip


def _carried_over(folder: RunFolder) -> dict[str, Any]:
    """Return these fields as the launch before left them; those of a new run where its state is damaged."""
    state = read_record(folder.state)
    before = state if isinstance(state, dict) else {}
    return {
        key: before[key] if isinstance(before.get(key), kind) else begin
        for key, (begin, kind) in _CARRIED.items()
    }


def _durations_before(folder: RunFolder) -> Parts | None:
    """Return the parts of the time of the run's earlier launches: empty if there were none, None if unknown.

    A state that still says "running" is that of a lost supervisor: the time since its last sign of life is an outage.
    """
    if not folder.state.exists() and not (folder.events.is_file() and folder.events.stat().st_size):
        return {}
    state = read_record(folder.state)
    durations = state.get("durations") if isinstance(state, dict) else None
    parts = read_parts(durations.get("run")) if isinstance(durations, dict) else None
    if parts is not None and isinstance(state, dict) and state.get("status") == "running":
        parts[OUTAGE] += max(0.0, _seconds_since(state))
    return parts


def _seconds_since(state: dict[str, Any]) -> float:
    """Return the seconds since *state* was written: by the monotonic clock, unless the machine was started since."""
    machine, then = machine_of(state.get(MACHINE)), float_of(state, _MONOTONIC)
    if (
        then is not None
        and machine is not None
        and machine.boot_id is not None
        and machine.boot_id == boot_id()
    ):
        return time.monotonic() - then
    last_seen = unix_time(state.get("updated"))
    return 0.0 if last_seen is None else time.time() - last_seen


class Journal:
    """Events and state of one run; the supervisor is the only writer.

    Args:
        mask: Secrets that no record may hold; workers mask their own lines.
        require_held: Called before each write; raises where another launch may have the run (`launcher/journal/run_lock.py`).

    Attributes:
        damage: Damaged lines moved out of events.jsonl when it was opened; None if it was whole.
        durations: Parts of the launch's time; sees every event and line.
        generation: The newest generation of this launch; 0 before the first.
    """

    def __init__(
        self,
        folder: RunFolder,
        launch: int,
        show: Callable[[EventRecord], None],
        mask: Mask | None = None,
        require_held: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._require_held = folder, require_held
        self._mask = mask or Mask()
        atomic_files.remove_temporaries(folder.state)
        self.durations = Durations(_durations_before(folder), time.monotonic)
        self._lines = AppendedLines(folder.events)
        self.damage = self._lines.damage
        self._show = show
        self._warnings = WarningTally()
        self._written = self._told = 0.0
        # Known but not yet written: the state on disk, and the activities of nodes.
        self._is_written_late = self._is_told_late = False
        self._activities: dict[str, dict[str, Any]] = {}
        self.generation = 0
        self.state: dict[str, Any] = {
            "status": "running",
            "job": folder.job,
            "run_id": folder.run_id,
            "launch": launch,
            "generation": 0,
            **_carried_over(folder),
            "held": None,
            "epochs": None,
            "budget_left": None,
            "resume_command": None,
            "activities": {},
            "workers": [],
            "devices": [],
            "verdict": None,
            "pid": os.getpid(),
            MACHINE: asdict(Machine.here()),
            DISK_FULL: False,
            "started": now(),
            "updated": now(),
            _MONOTONIC: time.monotonic(),
        }

    def event(self, event: Event, /, **fields: Any) -> EventRecord:
        """Append one event of the supervisor's own and show it."""
        record = {
            "timestamp": now(),
            "level": event.level,
            "event": event,
            "job": self._folder.job,
            "run_id": self._folder.run_id,
            "generation": self.generation,
            **self._mask.value(fields),
        }
        self.copy(record)
        return record

    def report(self, report: EventRecord) -> None:
        """Append an event that a node has reported, as one of the supervisor's own; a name that is no event is left out."""
        if (event := events.EVENTS.get(report["event"])) is not None:
            fields = {key: value for key, value in report.items() if key not in ("event", "generation")}
            self.event(event, **fields)

    def copy(self, record: EventRecord) -> None:
        """Append an event as it stands, a worker's for instance, and show it."""
        self.durations.saw(record)
        if record["event"] == GENERATION_ENDED:
            record["durations"] = self.durations.end_group()
        self._require_held()
        self._lines.append([record])
        self._show(record)
        self._follow(record)

    def _follow(self, record: EventRecord) -> None:
        """Update the facts known beside the events."""
        activities = self._activities
        match record["event"]:
            case events.BUDGET_CHARGED:
                self.know(budget_left=record["left"])
            case events.BUDGET_REFILLED:
                self.know(budget_left=record["budget"])
            case events.GENERATION_STARTED if self.state["devices"]:
                self.update(devices=[])
            case events.GENERATION_ENDED if activities:
                activities.clear()
                self.know(activities={})
            case events.NODE_JOINED | events.NODE_LOST | events.NODE_LEFT if record.get("node") in activities:
                del activities[record["node"]]
                self._tell_activities()
            case _:
                pass

    def know(self, **fields: Any) -> None:
        """Take facts known beside the events into the state (`SHOWN_OF_STATE`), and show them."""
        self.update(at_once=True, **fields)
        self._show(known_record(self.state))

    def hear(self, message: Activity | Printed | Warned) -> None:
        """Take in what a node tells beside its workers' events."""
        match message:
            case Activity():
                self.activity(message)
            case Printed():  # the run's logs keep the lines anyway
                self._show(printed_record(message.lines, message.left_out))
            case Warned():
                # Unless a node has told it before; it is told again once it is ten times as many.
                if (told := self._warnings.add(message)) is not None:
                    self.event(events.WORKER_WARNED, **asdict(told))

    def activity(self, activity: Activity) -> None:
        """Take in a node's activity, or its end."""
        self._activities.pop(activity.node, None)
        if activity.phase:
            self._activities[activity.node] = {
                "phase": activity.phase,
                "subject": activity.subject,
                "step": activity.step,
                "since": round(time.time() - activity.seconds, 3),
            }
        self._tell_activities()

    def _tell_activities(self) -> None:
        """Show the nodes' activities, a few times a second at most: a thousand nodes may report at a time, and each look shows all."""
        self._is_told_late = time.monotonic() - self._told < _STATE_EVERY_S
        if not self._is_told_late:
            self._told = time.monotonic()
            self.know(activities=dict(self._activities))

    def add_workers(self, workers: Iterable[StartedWorker]) -> None:
        """Put *workers*, which have started, to those of the generation in the state, in the order of their ranks."""
        listed = self.state["workers"] = self.state["workers"] or []
        for worker in workers:
            bisect.insort(listed, vars(worker), key=itemgetter("rank"))
        self.update()

    def figures(self, figures: NodeFigures) -> None:
        """Put the accelerators of a node's workers and their usage into the state, in the order of the ranks."""
        used = [
            {"node": figures.node, "rank": each.rank, "device": each.device, **each.usage._asdict()}
            for each in figures.ranks
            if each.usage is not None
        ]
        if not used or figures.generation != self.generation:
            return
        rows = self.state["devices"]
        for row in used:  # not sorted anew: each of a thousand nodes tells every few seconds
            at = bisect.bisect_left(rows, row["rank"], key=itemgetter("rank"))
            rows[at : at + (at < len(rows) and rows[at]["rank"] == row["rank"])] = [row]
        self.update()

    def turn(self) -> None:
        """Write and show delayed changes, once it is time, and the time taken; to be called many times a second."""
        if self._is_told_late:
            self._tell_activities()
        if self._is_written_late or time.monotonic() - self._written >= _UNCHANGED_STATE_EVERY_S:
            self.update()

    def tell_warnings(self) -> None:
        """Record how often warnings were given that were not recorded yet; at the end of the launch."""
        for warned in self._warnings.rest():
            self.event(events.WORKER_WARNED, **asdict(warned))

    def show(self, record: EventRecord) -> None:
        """Show a record that belongs to another file."""
        self.durations.saw(record)
        self._show(record)

    def update(self, *, at_once: bool = False, **fields: Any) -> None:
        """Change the state; written now, or by a `turn` at most a quarter of a second later."""
        self.state.update(fields)
        self._is_written_late = not at_once and time.monotonic() - self._written < _STATE_EVERY_S
        if not self._is_written_late:
            self.write_state()

    def write_state(self) -> None:
        """Replace state.json; a reader sees the old or the new one, never a part."""
        self._require_held()
        self._written = time.monotonic()
        self.state |= {"updated": now(), _MONOTONIC: self._written}
        launch = self.durations.of_launch()
        self.state["durations"] = {"launch": launch, "run": self.durations.of_run(launch)}
        # Four times a second: the disk is not waited for.
        atomic_files.replace(self._folder.state, [json.dumps(self.state).encode(), b"\n"], sync=False)

    def note_full_disk(self) -> None:
        """Note in state.json why this launch ends: its bytes are written over, since a new file would need room."""
        self._require_held()
        with self._folder.state.open("r+b") as file:
            if (place := file.read().find(_HAS_ROOM)) >= 0:
                file.seek(place)
                file.write(_IS_FULL)

    def close(self) -> None:
        """Write the last state and close."""
        try:
            self.write_state()
            self._lines.sync()
        finally:
            self._lines.close()
