"""The state of a run, read from its folder alone."""

from __future__ import annotations

import fcntl
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.journal.post_mortem import ending_of
from elasticflow.observe.history import RunHistory, began, state_of
from elasticflow.observe.records import newest_evaluation, newest_with, tail
from elasticflow.observe.run_state import RunState
from elasticflow.observe.terminal.activities import awaited_of
from elasticflow.observe.terminal.formats import goodput, number, rfc3339
from elasticflow.observe.terminal.pace import Pace
from elasticflow.protocol import run_files
from elasticflow.system.records import float_of, int_of, text_of

if TYPE_CHECKING:
    from elasticflow.launcher.journal.post_mortem import Ending
    from elasticflow.observe.compilation import Compilation
    from elasticflow.observe.run_state import Status
    from elasticflow.observe.standbys import NodeStandbys
    from elasticflow.observe.terminal.activities import Doing
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunState):
    """The present state of a run: the supervisor's record as far as it still holds, and facts from the other files.

    A run that is not running has no workers, no devices, no state held in memory, and no process id of a supervisor.

    Attributes:
        status: Running, or the way it ended; a run whose supervisor vanished is interrupted.
        scalars: Values that the job's own step returned beside the loss in the last step, by name; None if not finite.
        grad_norm: Norm of the last step's gradient, or a norm for each of several optimizers by name; None: not logged.
        counted_per_s: Items per second in the last step, by kind: `{"tokens": 51200.0}`.
        mfu: Share of the devices' peak that the last step used; None: not measured.
        doing: The activity that has lasted for longer than a moment, while the run is running.
        evaluation: The newest metrics over the evaluation set.
        weights: The evaluated weights: "ema" (averaged) or "raw", or by evaluation set if the sets differ; None if
            unknown.
        evaluation_raw: The metrics of the raw weights, if they were evaluated beside the averaged.
        best: Best value of the metric in `evaluation.best`.
        best_of: Name of that metric; None: an earlier version did not record it.
        samples_per_s: Speed over the last steps.
        seconds_left: Seconds to the end of training at that speed, while the run is running.
        standbys: Standby workers of each node, while the run is running.
        compilation: Cost of torch.compile; None: the run compiles nothing.
        started: Unix time at which the run's first launch began.
        failure: Newest `worker.failed` event of a run that failed.
        lost: The end of its supervisor, which could not record it; None: it could.
    """

    status: Status
    folder: RunFolder
    scalars: dict[str, float | None]
    grad_norm: float | dict[str, float] | None
    counted_per_s: dict[str, float]
    mfu: float | None
    doing: Doing | None
    evaluation: Record
    evaluated_step: int | None
    weights: str | dict[str, str] | None
    evaluation_raw: Record
    best: float | None
    best_of: str | None
    samples_per_s: float | None
    seconds_left: float | None
    standbys: tuple[NodeStandbys, ...]
    compilation: Compilation | None
    started: float | None
    failure: Record | None
    lost: Ending | None

    def to_json(self) -> dict[str, object]:
        """Return the status as `--format json` prints it; times are RFC 3339 in UTC."""
        facts = {"job": self.folder.job, "run_id": self.folder.run_id, **asdict(self)}
        facts["folder"] = str(self.folder.path)
        facts["goodput"] = self.goodput
        del facts["epochs"], facts["activities"]  # `epoch` and `doing` have these facts
        if self.doing is not None:
            facts["doing"] = {**self.doing._asdict(), "since": rfc3339(self.doing.since)}
        for name in ("started", "launched", "updated"):
            facts[name] = None if facts[name] is None else rfc3339(facts[name])
        return facts

    @property
    def goodput(self) -> float | None:
        """The share of the run's time for steps that count; None while it is unknown, as for a script without steps."""
        return None if self.has_no_steps else goodput(self.durations or self.launch_durations)

    @property
    def has_no_steps(self) -> bool:
        """True for a script that has not reported a step."""
        return self.script is not None and self.step == 0

    @property
    def progress(self) -> str:
        """`93 of 230 (40 %)`, or the step alone while the end is unknown; `-` for a script that reports no steps."""
        if self.has_no_steps:
            return "-"
        if self.steps is None:
            return str(self.step)
        return f"{self.step} of {self.steps} ({100 * self.step // self.steps} %)"

    @property
    def main_metrics(self) -> str:
        """`accuracy 0.9806`: the metrics other than the loss, or else the loss; empty if there are no metrics."""
        named = {
            k: v for k, v in self.evaluation.items() if k.rpartition(".")[2] != "loss"
        } or self.evaluation
        return ", ".join(f"{name} {number(value)}" for name, value in named.items())


def is_locked(folder: RunFolder) -> bool:
    """Return True if a supervisor runs this run now.

    The lock is tried as a shared lock, so that two readers do not take each other for a supervisor.
    """
    try:
        with folder.lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except OSError:  # the file is absent or cannot be locked
        return False


def read_status(folder: RunFolder) -> RunStatus:
    """Return the state of the run in *folder*; files that are not there yet count as empty."""
    state, status = settled_state(folder)
    last_step = next(newest_with(folder.metrics, "loss"), {})
    evaluation = newest_evaluation(folder.metrics)
    is_running = status == "running"
    step = max(state.step, int_of(last_step, "step"))
    of_step = last_step if step > state.step else {}  # state.json is written once a second
    pace = Pace()
    for record in tail(folder.metrics):
        pace.add(record)
    history = RunHistory.newest(folder)
    committed = history.snapshot
    launched = state.launched or history.began
    raw = evaluation.get("eval_raw")
    now = replace(
        state,
        launch=state.launch or (folder.launch_numbers() or [0])[-1],
        step=step,
        epoch=of_step.get("epoch", state.epoch),
        loss=of_step.get("loss", state.loss),
        workers=state.workers if is_running else (),
        devices=state.devices if is_running else (),
        snapshot=state.snapshot or (None if committed is None else committed.name),
        held=state.held if is_running else None,
        launched=launched,
        updated=state.updated or history.updated,
        pid=state.pid if is_running else None,
    )
    return RunStatus(
        **(vars(now) | {"status": status}),
        folder=folder,
        scalars=run_files.scalars_of(last_step),
        grad_norm=last_step.get(run_files.GRAD_NORM),
        counted_per_s=run_files.rates_of(last_step),
        mfu=float_of(last_step, run_files.MFU),
        doing=awaited_of(state.activities, has_stepped=state.step > 0) if is_running else None,
        evaluation=evaluation.get("eval", {}),
        evaluated_step=evaluation.get("step"),
        weights=evaluation.get("weights"),
        evaluation_raw=raw if isinstance(raw, dict) else {},
        best=float_of(evaluation, "best"),
        best_of=text_of(evaluation, "best_of"),
        samples_per_s=pace.samples_per_s,
        seconds_left=pace.seconds_left(step, state.steps) if is_running and state.steps else None,
        standbys=tuple(history.standbys.values()) if is_running else (),
        compilation=None if history.compilation.newest is None else history.compilation,
        started=began(folder) or launched,
        failure=history.last.get(events.WORKER_FAILED) if status == "failed" else None,
        lost=ending_of(folder) if status == "interrupted" else None,
    )


def settled_state(folder: RunFolder) -> tuple[RunState, Status]:
    """Return the state of a run, and the way in which it ended or whether it still runs."""
    state, is_live = state_of(folder), True
    if state.status in {None, "running"} and not is_locked(folder):
        # The supervisor was killed, which ends only the lock; or it has ended since the first look, and has written its state.
        state, is_live = state_of(folder), False
    if state.status in {None, "running"}:
        return state, "running" if is_live else "interrupted"
    return state, state.status
