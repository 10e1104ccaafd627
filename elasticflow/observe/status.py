"""The state of a run, read from its folder alone."""

from __future__ import annotations

import fcntl
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from elasticflow.observe.history import RunHistory, began, state_of
from elasticflow.observe.records import last_of, tail
from elasticflow.observe.run_state import RunState
from elasticflow.observe.terminal.activities import awaited_of
from elasticflow.observe.terminal.durations import goodput
from elasticflow.observe.terminal.formats import number, rfc3339
from elasticflow.observe.terminal.pace import Pace
from elasticflow.protocol import run_files
from elasticflow.system.records import float_of, int_of

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
    """A run's state now: the supervisor's record as far as it still holds, and facts of the other files.

    While it is not running it has no workers, nothing is held in memory, and no supervisor has a process id.

    Attributes:
        status: Running, or the way it ended; a run whose supervisor vanished is interrupted.
        folder: The run folder.
        scalars: Values that the job's own step returned beside the loss in the last step, by name; None: not finite.
        grad_norm: Norm of the last step's gradient, or by the name of each of several optimizers; None: not logged.
        counted_per_s: Items per second in the last step, by what they are: `{"tokens": 51200.0}`.
        mfu: Share of the devices' peak that the last step made use of; None: not measured.
        doing: The activity that has lasted for longer than a moment, while it runs.
        evaluation: The newest metrics over the evaluation set.
        evaluated_step: The step of these metrics.
        weights: The weights that they are of: "ema", the averaged, or "raw", or by evaluation set where that differs; None
            where the run does not say.
        evaluation_raw: The metrics of the raw weights, where those were measured beside the averaged.
        best: The best value of the metric that `evaluation.best` names.
        samples_per_s: Speed over the last steps.
        seconds_left: To the end of training at that speed, while the run is running.
        standbys: Standby workers of each node, while the run is running.
        compilation: Costs of torch.compile; None: the run compiles nothing.
        started: Unix time at which the run's first launch began.
        failure: The newest `worker.failed` event of a run that failed.
        lost: The end of its supervisor, if that could not say so.
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
    samples_per_s: float | None
    seconds_left: float | None
    standbys: tuple[NodeStandbys, ...]
    compilation: Compilation | None
    started: float | None
    failure: Record | None
    lost: Ending | None

    def to_json(self) -> dict[str, object]:
        """Return what `--format json` prints; times are RFC 3339 in UTC."""
        facts = {"job": self.folder.job, "run_id": self.folder.run_id, **asdict(self)}
        facts["folder"] = str(self.folder.path)
        facts["goodput"] = goodput(self.durations)
        del facts["epochs"], facts["activities"]  # said by `epoch` and `doing`
        if self.doing is not None:
            facts["doing"] = {**self.doing._asdict(), "since": rfc3339(self.doing.since)}
        for name in ("started", "launched", "updated"):
            facts[name] = None if facts[name] is None else rfc3339(facts[name])
        return facts

    @property
    def progress(self) -> str:
        """`93 of 230 (40 %)`, or the step alone while the end is unknown; of a script that tells none, `-`."""
        if self.script is not None and self.step == 0:
            return "-"
        if self.steps is None:
            return str(self.step)
        return f"{self.step} of {self.steps} ({100 * self.step // self.steps} %)"

    @property
    def main_metrics(self) -> str:
        """`accuracy 0.9806`: the metrics that are not the loss, else the loss; empty if there are none."""
        named = {
            k: v for k, v in self.evaluation.items() if k.rpartition(".")[2] != "loss"
        } or self.evaluation
        return ", ".join(f"{name} {number(value)}" for name, value in named.items())


def is_locked(folder: RunFolder) -> bool:
    """Return whether a supervisor runs this run now.

    The lock is tried for an instant and shared, so that two readers do not take each other for a supervisor.
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
    last_step = (last_of(metrics, "loss") or [{}])[0]
    evaluation = (last_of(metrics, "eval") or [{}])[0]
    status = _status(state, folder)
    is_running = status == "running"
    step = max(state.step, int_of(last_step, "step"))
    pace = Pace()
    for record in metrics:
        pace.add(record)
    history = RunHistory.newest(folder)
    committed = history.snapshot
    launched = state.launched or history.began
    measured, raw = evaluation.get("eval"), evaluation.get("eval_raw")
    now = replace(
        state,
        launch=state.launch or (folder.launch_numbers() or [0])[-1],
        step=step,
        epoch=state.epoch if state.epoch is not None else last_step.get("epoch"),
        loss=state.loss if state.loss is not None else last_step.get("loss"),
        workers=state.workers if is_running else (),
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
        evaluation=measured if isinstance(measured, dict) else {},
        evaluated_step=evaluation.get("step"),
        weights=evaluation.get("weights"),
        evaluation_raw=raw if isinstance(raw, dict) else {},
        best=float_of(evaluation, "best"),
        samples_per_s=pace.samples_per_s,
        seconds_left=pace.seconds_left(step, state.steps) if is_running and state.steps else None,
        standbys=tuple(history.standbys.values()) if is_running else (),
        compilation=None if history.compilation.newest is None else history.compilation,
        started=began(folder) or launched,
        failure=history.failures[-1] if history.failures and status == "failed" else None,
        lost=lost_of(folder) if status == "interrupted" else None,
    )


def lost_of(folder: RunFolder) -> Ending | None:
    """Return how the supervisor of a run that nobody leads ended, if it could not say so itself."""
    from elasticflow.launcher.journal.post_mortem import ending_of

    return ending_of(folder)


def _status(state: RunState, folder: RunFolder) -> Status:
    if state.status not in {None, "running"}:
        return state.status
    # "running" is what a supervisor wrote that may have been killed since; only the lock dies with it.
    return "running" if is_locked(folder) else "interrupted"
