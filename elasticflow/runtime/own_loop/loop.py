"""What a run does between the calls of its script: begins, reads, tells of its steps, and ends."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from elasticflow.errors import StateError
from elasticflow.protocol import worker_environment
from elasticflow.runtime import worker as life
from elasticflow.runtime.own_loop.ballot import Ballot
from elasticflow.runtime.own_loop.leaving import EndsHereIfAsked
from elasticflow.runtime.own_loop.loop_schedule import LoopSchedule, after_own_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from elasticflow.runtime.hooks.hooks import Hooks
    from elasticflow.runtime.metrics.speed import Measures
    from elasticflow.runtime.own_loop.batch import Batch
    from elasticflow.runtime.own_loop.gradients import Gradients, LoopStep
    from elasticflow.runtime.own_loop.source import Source
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.learning_rates import AnyOptimizers
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.process.step_log import LateNumber
    from elasticflow.runtime.snapshot.snapshots import Policy, Snapshots
    from elasticflow.runtime.state.state import State

MISSING = "call run.step(loss=loss) once at the end of each pass through the loop"


class Loop:
    """What `Run` is made of.

    Args:
        worker: This worker.
        policy: When snapshots are taken.
        gradients: How they are made; None: the script exchanges them.
        log_every: A line is logged after so many steps.
        compare_replicas: When the ranks' replicas are compared, besides before each snapshot.
        measures: What of the speed is written down; None: what any job has.
        is_job: The compiler wrote the entry point: it says on its own what a script forgets.
    """

    def __init__(
        self,
        worker: Worker,
        policy: Policy,
        *,
        gradients: Gradients | None,
        log_every: int,
        compare_replicas: str | None = None,
        measures: Measures | None = None,
        is_job: bool = False,
    ) -> None:
        self._policy = policy
        self._gradients, self._compare_every, self._is_job = gradients, compare_replicas, is_job
        self._log_every, self._measures = log_every, measures
        # Only rank 0 records, but every rank has to meet it after each step.
        self._is_recorded = bool(os.environ.get(worker_environment.TRAJECTORY))
        self.rank, self.local_rank, self.world_size = worker.rank, worker.local_rank, worker.world_size
        self.device: torch.device = worker.device
        # A rank that is asked to leave takes part in its steps until all have agreed.
        worker.vote.may_skip &= is_job
        self._ballot = Ballot(worker)
        self.worker, self.schedule = worker, LoopSchedule()
        self.position: Position = self.schedule.start
        self._optimizers: AnyOptimizers = ()
        self._hooks: Hooks | None = None
        self._state: State | None = None
        self._snapshots: Snapshots | None = None
        self._batch: Batch | None = None
        self._source: Source | None = None
        self._step: LoopStep | None = None
        self._is_training = self._is_over = False
        self._why_stop: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the loop has come to its end."""
        has_stopped = self.worker.should_leave and self._why_stop is not None
        return has_stopped or self.schedule.is_end(self.position)

    @property
    def should_leave(self) -> bool:
        """Whether all ranks have agreed, in the last `step`, to make no further one: a loop of `batches` ends by itself."""
        return self.worker.should_leave

    def _tell_step(self, loss: Any, batch: Batch | None, samples: int) -> None:
        """Report a step whose gradients say nothing to other ranks, and tell them if it is time to."""
        worker, snapshots, _ = self.worker, *self._kept("step")
        mean, scalars = self._ballot.add(loss, samples if batch is None else batch.samples)
        worker.progress.note_step(0, scalars)
        if batch is None:
            self._finish_step(after_own_step(self.position, self._ballot.meet()), mean)
            return
        # What is recorded, or held, after each step is of a step that is told.
        is_now = self._is_recorded or snapshots.is_due(batch.end)
        if is_now or self._ballot.is_full or self.schedule.is_end(batch.end):
            self._ballot.meet()
        self._finish_step(batch.end, mean)

    def _finish_step(self, position: Position, loss: float | LateNumber) -> None:
        self.position = position
        self.worker.log_step(position, loss, self._optimizers)

    def _tell(self, text: str) -> None:
        """Say on standard error what nobody else would: no supervisor follows the log."""
        if self.rank == 0 and not self._is_job and self.worker.identity.started_by != "launcher":
            sys.stderr.write(f"elasticflow: {text}\n")
            sys.stderr.flush()

    def _catalog_uri(self) -> str:
        return self._policy.uri or os.path.relpath(self.worker.run_folder.path)

    def _kept(self, caller: str) -> tuple[Snapshots, State]:
        if self._snapshots is None or self._state is None:
            raise StateError(
                f"run.{caller} was called before run.keep",
                "run.keep(model=model, optimizer=optimizer) says what a run goes on with",
            )
        return self._snapshots, self._state

    def _begin(self) -> None:
        worker, snapshots, state = self.worker, *self._kept("step")
        was_training = state.model.training
        worker.start_training(
            self.position, self.schedule, state.model, restored=snapshots.restored,
            log_every=self._log_every, measures=self._measures,
        )  # fmt: skip
        if not self._is_job:  # which may have frozen parts of it by their mode
            state.model.train(was_training)
        if self._hooks is not None:
            self._hooks.start(self.position)
        if state.evaluation is not None:  # one may be owed: it was cut short, when all were asked to leave
            state.evaluation.run_if_owed(self.position)
        self._is_training = True

    def _loop(self, source: Source) -> Iterator[Batch]:
        self._kept("batches")
        if not self._is_training:
            with EndsHereIfAsked(self.worker):
                self._begin()
        for part, batch in source.batches(self.position):
            self._batch = batch
            if part.model_keys and not self._is_job:
                self.worker.generators.seed_model(part.model_keys[0])
            yield batch
            if self._batch is not None:
                raise StateError(f"run.step was not called in step {part.end.step}", MISSING)
            if self.worker.should_leave:
                return

    def _end(self) -> NoReturn:
        self._is_over = True
        worker, snapshots, state = self.worker, *self._kept("finish")
        self._ballot.meet()
        if not worker.should_leave:
            self.schedule.has_ended = True
        snapshots.finish(self.position)
        done = f"after step {self.position.step}, snapshots in {self._catalog_uri()}"
        self._tell(f"finished {done}" if self.is_finished else f"leaves {done}: the same command goes on")
        if worker.should_leave and self._why_stop is not None:
            worker.vote.stop_wanted = self._why_stop
        if not self._is_job:
            worker.at_leave.append(atexit._run_exitfuncs)  # noqa: SLF001  # wandb and others end there
        life.leave(worker, self.position, self.schedule, state.evaluation)

    def end_if_forgotten(self) -> None:
        """Do what `finish` does, where the script has ended without it and its loop was over; else nothing."""
        loop_is_over = self._is_training and (self.worker.should_leave or self.schedule.is_end(self.position))
        if not self._is_over and loop_is_over and self._batch is None:
            self._end()
