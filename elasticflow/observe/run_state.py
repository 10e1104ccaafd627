"""The record in state.json, in which a supervisor keeps the state of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from elasticflow.observe.terminal.formats import parts_of
from elasticflow.system.process_record import ProcessRecord
from elasticflow.system.records import float_of, int_of, text_of, unix_time

if TYPE_CHECKING:
    from elasticflow.system.records import Record

Status = Literal["running", "finished", "interrupted", "failed"]
_STATUSES: dict[object, Status] = {status: status for status in get_args(Status)}


@dataclass(frozen=True)
class RunningWorker:
    """A worker of the running generation.

    Attributes:
        pid: Process id, for people.
        process: The process, to send signals to; None: an earlier version wrote the state.
    """

    rank: int
    pid: int
    node: str
    process: ProcessRecord | None = None


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run as its supervisor last wrote it; missing or malformed fields have their defaults.

    Attributes:
        status: Running, or the way it ended; None if unknown. A supervisor that was killed leaves `running`.
        launch: Number of the newest launch; 0 if there was none.
        generation: Number of the newest worker group; 0 if there was none.
        step: Last finished step.
        steps: Steps of the whole training, once known.
        workers: Workers of the newest group, whether it runs or not.
        device: Type of the devices that the newest group trains on, such as "cuda"; None if unknown.
        devices: The accelerators of the newest group's workers: rank, node, device, and the fields of `DeviceUsage`.
        snapshot: Name of the newest committed snapshot.
        script: The user's script, for `[script]` jobs; else None.
        resume_command: The command that resumes the run, if that is not `elasticflow resume`.
        held: Newest step that all workers hold in their nodes' memory, which ends with the launch.
        launched: Unix time at which the newest launch began.
        updated: Unix time of the last sign of life.
        verdict: Record of the newest launch's end.
        epochs: Passes over the data in all, if the job gives them.
        budget_left: Restarts left in the budget; None if unknown.
        activities: By node, the activity that has lasted for longer than a moment (`protocol/run_files.py`).
        durations: Seconds of all launches by activity, which add up to the run's time; empty if unknown.
        launch_durations: Seconds of the newest launch by activity.
    """

    status: Status | None = None
    launch: int = 0
    generation: int = 0
    step: int = 0
    steps: int | None = None
    epoch: int | None = None
    loss: float | str | None = None
    restarts: int = 0
    workers: tuple[RunningWorker, ...] = ()
    device: str | None = None
    devices: tuple[Record, ...] = ()
    snapshot: str | None = None
    script: str | None = None
    resume_command: str | None = None
    held: int | None = None
    launched: float | None = None
    updated: float | None = None
    pid: int | None = None
    verdict: Record | None = None
    epochs: int | None = None
    budget_left: int | None = None
    activities: dict[str, Record] = field(default_factory=dict)
    durations: dict[str, float] = field(default_factory=dict)
    launch_durations: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_json(cls, state: Record) -> RunState:
        """Return the state in the fields of state.json."""
        workers, verdict, durations = (state.get(name) for name in ("workers", "verdict", "durations"))
        activities, devices = state.get("activities"), state.get("devices")
        durations = durations if isinstance(durations, dict) else {}
        loss = state.get("loss")
        return cls(
            status=_STATUSES.get(text_of(state, "status")),
            launch=int_of(state, "launch"),
            generation=int_of(state, "generation"),
            step=int_of(state, "step"),
            steps=int_of(state, "steps") or None,
            epoch=None if float_of(state, "epoch") is None else int_of(state, "epoch"),
            loss=loss if isinstance(loss, int | float | str) else None,
            restarts=int_of(state, "restarts"),
            workers=tuple(
                RunningWorker(
                    int_of(worker, "rank"),
                    int_of(worker, "pid"),
                    str(worker.get("node", "")),
                    ProcessRecord.from_json(worker),
                )
                for worker in (workers if isinstance(workers, list) else ())
                if isinstance(worker, dict)
            ),
            device=text_of(state, "device"),
            devices=tuple(
                device
                for device in (devices if isinstance(devices, list) else ())
                if isinstance(device, dict)
            ),
            snapshot=text_of(state, "snapshot"),
            script=text_of(state, "script"),
            resume_command=text_of(state, "resume_command"),
            held=int_of(state, "held") or None,
            launched=unix_time(state.get("started")),
            updated=unix_time(state.get("updated")),
            pid=int_of(state, "pid") or None,
            verdict=verdict if isinstance(verdict, dict) else None,
            epochs=int_of(state, "epochs") or None,
            budget_left=None if float_of(state, "budget_left") is None else int_of(state, "budget_left"),
            activities={
                str(node): activity
                for node, activity in (activities if isinstance(activities, dict) else {}).items()
                if isinstance(activity, dict)
            },
            durations=parts_of(durations.get("run")),
            launch_durations=parts_of(durations.get("launch")),
        )
