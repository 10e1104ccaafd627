"""How a run is doing, read from its folder alone."""

from __future__ import annotations

import fcntl
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.observe.history import History, state_of
from elasticflow.observe.records import float_of, int_of, last_of, read, tail, text_of, unix_time
from elasticflow.observe.terminal.durations import parts_of
from elasticflow.observe.terminal.formats import number, rfc3339
from elasticflow.observe.terminal.pace import Pace

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class RunningWorker:
    """One worker of the generation that runs."""

    rank: int
    pid: int
    node: str


@dataclass(frozen=True)
class RunStatus:
    """A run's state now.

    Attributes:
        folder: The run folder.
        status: What it is doing; a supervisor that vanished leaves an interrupted run.
        launch: Number of the newest launch; 0 when none was written.
        generation: Number of the newest worker group; 0 when there was none.
        step: Last finished step.
        steps: Steps of the whole training, once known.
        loss: Of the last step.
        restarts: In the newest launch.
        workers: Of the group that runs; empty when none does.
        evaluation: The newest metrics over the evaluation set.
        evaluated_step: The step they belong to.
        weights: Whose they are: "ema", the average's, or "raw"; None where the run does not say.
        evaluation_raw: The raw weights' beside the average's, where both were measured.
        best: The best value of the metric that `evaluation.best` names.
        samples_per_s: Speed over the last steps.
        seconds_left: To the end of training at that speed, while the run is running.
        snapshot: Name of the newest committed snapshot.
        held: Newest step that all workers hold in their node's memory; it lives no longer than the launch.
        started: Unix time at which the run's first launch began.
        launched: Unix time at which the newest launch began.
        durations: Seconds of all launches by what went on; they add up to the run's time. None known: empty.
        launch_durations: The newest launch's.
        updated: Unix time of the last sign of life.
        pid: The supervisor's process id while it runs.
        failure: The newest `worker.failed` event of a run that failed.
        verdict: How the newest launch ended.
        lost: How its supervisor ended, if it could not say so: `kind`, what is `known` and what is `likely`.
    """

    folder: RunFolder
    status: Status
    launch: int
    generation: int
    step: int
    steps: int | None
    epoch: int | None
    loss: float | str | None
    restarts: int
    workers: tuple[RunningWorker, ...]
    evaluation: dict[str, Any]
    evaluated_step: int | None
    weights: str | None
    evaluation_raw: dict[str, Any]
    best: float | None
    samples_per_s: float | None
    seconds_left: float | None
    snapshot: str | None
    held: int | None
    started: float | None
    launched: float | None
    durations: dict[str, float]
    launch_durations: dict[str, float]
    updated: float | None
    pid: int | None
    failure: dict[str, Any] | None
    verdict: dict[str, Any] | None
    lost: dict[str, str | None] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `--format json` prints; times are RFC 3339 in UTC."""
        facts = {"job": self.folder.job, "run_id": self.folder.run_id, **asdict(self)}
        facts["folder"] = str(self.folder.path)
        for name in ("started", "launched", "updated"):
            facts[name] = None if facts[name] is None else rfc3339(facts[name])
        return facts

    @property
    def progress(self) -> str:
        """`93 of 230 (40 %)`, or the step alone while the end is unknown."""
        if self.steps is None:
            return str(self.step)
        return f"{self.step} of {self.steps} ({100 * self.step // self.steps} %)"

    @property
    def main_metrics(self) -> str:
        """`accuracy 0.9806`: the metrics that are not the loss, else the loss; empty if there are none."""
        named = {k: v for k, v in self.evaluation.items() if k != "loss"} or self.evaluation
        return ", ".join(f"{name} {number(value)}" for name, value in named.items())


def is_locked(folder: RunFolder) -> bool:
    """Return whether a supervisor runs this run now.

    The lock is tried for an instant and shared, so that two who look do not see each other.
    """
    try:
        with folder.lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:  # absent, or nothing that could be locked
        return False


def read_status(folder: RunFolder) -> RunStatus:
    """Return the state of the run in *folder*; files that are not there yet count as empty."""
    state = state_of(folder)
    metrics = tail(folder.metrics)
    steps = last_of(metrics, "loss")
    evaluation = (last_of(metrics, "eval") or [{}])[0]
    now = steps[-1] if steps else {}
    status = _status(state, folder)
    is_running = status == "running"
    total = int_of(state, "steps") or None
    step = max(int_of(state, "step"), int_of(now, "step"))
    pace = Pace()
    for record in metrics:
        pace.add(record)
    history = History.newest(folder)
    committed = [snapshot.name for snapshot in history.snapshots if snapshot.state == "committed"]
    launched = unix_time(state.get("started")) or history.began
    durations = state.get("durations")
    durations = durations if isinstance(durations, dict) else {}
    verdict = state.get("verdict")
    measured, raw = evaluation.get("eval"), evaluation.get("eval_raw")
    return RunStatus(
        folder=folder,
        status=status,
        launch=int_of(state, "launch") or (folder.launch_numbers() or [0])[-1],
        generation=int_of(state, "generation"),
        step=step,
        steps=total,
        epoch=state.get("epoch") if state.get("epoch") is not None else now.get("epoch"),
        loss=state.get("loss") if state.get("loss") is not None else now.get("loss"),
        restarts=int_of(state, "restarts"),
        workers=_workers(state) if is_running else (),
        evaluation=measured if isinstance(measured, dict) else {},
        evaluated_step=evaluation.get("step"),
        weights=evaluation.get("weights"),
        evaluation_raw=raw if isinstance(raw, dict) else {},
        best=float_of(evaluation, "best"),
        samples_per_s=pace.samples_per_s,
        seconds_left=pace.seconds_left(step, total) if is_running and total else None,
        snapshot=text_of(state, "snapshot") or (committed[-1] if committed else None),
        held=int_of(state, "held") or None if is_running else None,
        started=_began(folder) or launched,
        launched=launched,
        durations=parts_of(durations.get("run")),
        launch_durations=parts_of(durations.get("launch")),
        updated=unix_time(state.get("updated")) or history.updated,
        pid=state.get("pid") if is_running else None,
        failure=dict(history.failures[-1].event) if history.failures and status == "failed" else None,
        verdict=verdict if isinstance(verdict, dict) else None,
        lost=lost_of(folder) if status == "interrupted" else None,
    )


def lost_of(folder: RunFolder) -> dict[str, str | None] | None:
    """Return how the supervisor of a run that nobody leads ended, if it could not say so itself."""
    from elasticflow.launcher.journal.post_mortem import ending_of

    found = ending_of(folder)
    return None if found is None else asdict(found)


def _status(state: dict[str, Any], folder: RunFolder) -> Status:
    said = state.get("status")
    if said in {"finished", "interrupted", "failed"}:
        return said  # type: ignore[no-any-return]
    # "running" is what a supervisor wrote that may have been killed since; only the lock dies with it.
    return "running" if is_locked(folder) else "interrupted"


def _began(folder: RunFolder) -> float | None:
    """Return the time of the run's first event, read from the beginning of the file."""
    first = next(read(folder.events), {})
    return unix_time(first.get("timestamp"))


def _workers(state: dict[str, Any]) -> tuple[RunningWorker, ...]:
    found = state.get("workers")
    if not isinstance(found, list):
        return ()
    return tuple(
        RunningWorker(int_of(w, "rank"), int_of(w, "pid"), str(w.get("node", "")))
        for w in found
        if isinstance(w, dict)
    )
