"""This process as a member of its worker group: what train.py calls `worker`."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from elasticflow import events
from elasticflow.errors import StopTraining
from elasticflow.runtime.measuring.gradient_norm import norm_of, read_late
from elasticflow.runtime.measuring.speed import Measures, device_name
from elasticflow.runtime.measuring.step_profiler import StepProfiler
from elasticflow.runtime.process import process_group, random_streams, stopping
from elasticflow.runtime.process.compiler import Compilation
from elasticflow.runtime.process.moments import Moments
from elasticflow.runtime.process.step_log import Heartbeat, LateNumber, Progress
from elasticflow.runtime.process.votes import Vote
from elasticflow.system import logs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    import torch
    from torch import Tensor, nn

    from elasticflow.events import Event
    from elasticflow.runtime.process.identity import Identity
    from elasticflow.runtime.process.learning_rates import AnyOptimizers
    from elasticflow.runtime.process.position import Position, Schedule
    from elasticflow.runtime.process.torch_private import Store


class Restored(NamedTuple):
    """The state that this generation resumes from.

    Attributes:
        name: Name of the snapshot.
        is_from_memory: It was held in memory, and need not be on the store.
        seconds: Time to find, read, verify and apply the snapshot.
    """

    name: str
    is_from_memory: bool
    seconds: float = 0.0


class AnyScheduler(Protocol):
    """A learning-rate schedule of torch or of the job's own."""

    def step(self) -> None:
        """Set the rates of the next step."""


class StepRecorder(Protocol):
    """Records what every step makes of the state (`runtime/snapshot/trajectory.py`)."""

    def begin(self, state: Any, position: Position, *, is_exact: bool) -> None:
        """Record *state* at *position* and after each step from here on; rank 0. *is_exact*: as every world size makes it."""


class Worker:
    """This process as a member of its worker group.

    Attributes:
        identity: How it was started and its place: rank, world size, node, folders.
        device: Where the model lives.
        store: Key-value store of all ranks, apart from the process group; None for a plain process.
        seed: Seed of the data order and of every random stream.
        generation: Number of the worker group, the same on every rank.
        random_version: Version of the rules by which random states follow from the seed, as at the run's beginning.
        generators: Random generators, seeded by key.
        is_exact: The same bits are promised at every number of workers, so that data must be the same whenever it is read.
        vote: Decisions that all ranks take together at each step.
        progress: Reports finished steps.
        compilation: Time that torch.compile has taken.
        listen: Has signals ask this process to leave.
        moments: Callbacks of others, by the moment at which they are called.
        dataset: The training data, as the job's factory returned it, once it is open; None of data shards.
        started_at: Position at which this generation began to train.
        scalar_names: Names of the scalars that the job's steps return, in the order of their places; the same on every rank.
        trajectory_recorder: Records what every step made of the state, if requested.
        stoppable: `with` it, StopTraining raised by the job's own code becomes this rank's wish.
        stopped: Why all ranks take no further step, once they agreed to: training has ended, or they leave.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        job: str,
        job_digest: str,
        seed: int,
        device: torch.device,
        store: Store | None,
        generation: int,
        log_level: str,
        shows_log: bool = True,
    ) -> None:
        self.identity, self.job, self.job_digest, self.seed = identity, job, job_digest, seed
        self.device, self.store, self.generation = device, store, generation
        self.rank, self.local_rank = identity.rank, identity.local_rank
        self.world_size, self.local_world_size = identity.world_size, identity.local_world_size
        self.run_id, self.run_folder, self.node = identity.run_id, identity.run_folder, identity.node
        self.random_version = random_streams.VERSION
        self.generators = random_streams.Generators(seed, device)
        self.is_exact = False
        self.vote = Vote()
        self.vote.when("random", self.generators.look)
        self.stoppable = stopping.Stoppable(self.vote)
        self.stopped: stopping.Stopped | None = None
        self.dataset: Any = None
        self.moments = Moments()
        self.listen: Callable[[], None] = lambda: None
        self.started_at: Position | None = None
        self.scalar_names: list[str] = []
        self.trajectory_recorder: StepRecorder | None = None
        self.heartbeat = Heartbeat(identity.heartbeat_fd, identity.local_rank)
        self.progress = self._open_log(log_level, shows_log=shows_log)
        self.log = logs.get_logger(events.OURS)  # bound to the log opened before
        self.compilation = Compilation(self.heartbeat)
        self._profiler = StepProfiler(
            self.heartbeat, self.run_folder, self.rank, device.type, self.event, self.progress.go_on
        )
        self.moments.leave.append(self._profiler.finish)
        self._logged_once: set[tuple[Event, Any]] = set()

    @property
    def should_leave(self) -> bool:
        """True after the step at which all ranks agreed to leave, or to take no further one."""
        return self.vote.leave or self.stopped is not None

    def stop(self, reason: str) -> None:
        """Have all ranks end training before the next step, and count as finished; for edited entry points."""
        stopping.request_stop(self.vote, StopTraining(reason))

    def agree_to_stop(self) -> None:
        """Set `stopped` if any rank wants no further step. Collective: every rank."""
        self.stopped = stopping.decide(self.gather_text(stopping.ballot(self.vote)))

    @property
    def leaves_untrained(self) -> bool:
        """True if this rank was asked to exit while nothing trained had to be saved."""
        return self.vote.leave_wanted and self.vote.may_leave_untrained

    def leave_untrained(self) -> None:
        """Leave, on every rank, if any rank was asked to. Collective: every rank.

        Raises:
            Leaving: a rank was asked to leave. `worker.program` ends the process: nothing was trained that had to be saved.
        """
        if not self.all_true(not self.leaves_untrained):
            raise stopping.Leaving

    def event(self, event: Event, **fields: Any) -> None:
        """Log *event* at its own level."""
        getattr(self.log, event.level)(event, **fields)

    def event_once(self, event: Event, **fields: Any) -> None:
        """Log *event* if this process has not logged it in this way before, about what the field `name` names."""
        about = event, fields.get("name")
        if about not in self._logged_once:
            self._logged_once.add(about)
            self.event(event, **fields)

    def phase(self, name: str) -> None:
        """Say what this rank is doing, for whoever watches its heartbeat; see `Heartbeat`."""
        self.heartbeat.phase(name)

    # As the train.py of older launches calls it, which may have been edited.
    def seed_for(self, factory: str) -> None:
        """Put every random generator into the state in which *factory* begins: it follows from the seed and that name."""
        random_streams.begin(self.seed, factory)

    def step_scheduler(self, scheduler: AnyScheduler, optimizers: AnyOptimizers) -> None:
        """Advance the learning-rate schedule; the step's log line has the rates that *optimizers* used.

        StopTraining, raised by the job's own schedule, ends training on all ranks.
        """
        self.progress.note_rates(optimizers)
        with self.stoppable:
            scheduler.step()

    def log_step(self, position: Position, loss: float | LateNumber, optimizers: AnyOptimizers) -> None:
        """Report a finished step with the global batch's mean loss; every rank, after each step."""
        self.progress.step(position, loss, optimizers)
        self._profiler.after_step(position.step)

    def log_grad_norm(self, norm: Tensor) -> None:
        """Have the step's line say *norm*, which `clip_grad_norm_` returned; nothing waits for the device."""
        if self.progress.is_next_logged:
            self.progress.note_grad_norm(read_late(norm))

    def log_grad_norm_of(self, model: nn.Module) -> None:
        """Have the step's line say the norm of the gradients in *model*, computed where a line is written."""
        if self.progress.is_next_logged:
            self.progress.note_grad_norm(read_late(norm_of(model.parameters())))

    def reseed(self) -> None:
        """Put every random generator into one state on all ranks; each factory begins in one of its own."""
        random_streams.seed_everything(self.seed)

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's *text*, by rank. Collective: every rank."""
        return process_group.gather_text(text, self.world_size)

    def all_true(self, mine: bool) -> bool:
        """True if *mine* is true on every rank. Collective: every rank."""
        return process_group.all_true(mine, self.world_size)

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank."""
        self.all_true(mine=True)

    def start_training(
        self,
        position: Position,
        schedule: Schedule,
        model: nn.Module,
        *,
        log_every: int,
        restored: Restored | None = None,
        measures: Measures | None = None,
        keeps_modes: bool = False,
    ) -> None:
        """Begin training at *position*. Collective: every rank.

        Args:
            position: Where training continues.
            schedule: The schedule that gives positions their meaning.
            model: It is in training mode afterwards, unless *keeps_modes*.
            log_every: A line is logged after so many steps.
            restored: The snapshot that *position* was read from; None: the beginning.
            measures: Figures of speed in the log; None: the default ones.
            keeps_modes: The model's modules stay in the modes that its script gave them.
        """
        self.listen()  # again: the model's or the dataset's code may have taken the signals for itself
        self.leave_untrained()
        left = schedule.remaining(position)  # None: nobody knows the data's length
        if position.step != 0:
            self.moments.beginning.clear()  # of what was opened for them nothing is kept
        if not keeps_modes:
            model.train()
        self.started_at = position
        self.generators.rest()
        measures = measures or Measures()
        of_peak = measures.of_peak(self.device, self.world_size, model)
        if of_peak is None and measures.flops_per_sample is not None and self.rank == 0:
            self.event(events.MFU_UNKNOWN, device=device_name(self.device))
        self.progress.start(
            position.step,
            log_every,
            samples=position.samples,
            count_name=measures.count_name,
            of_peak=of_peak,
        )
        steps = None if left is None else position.step + left
        if self.rank == 0:
            samples, batch = schedule.samples, schedule.global_batch_size
            if samples is not None and batch > samples:
                facts = {"samples": samples, "batch": batch, "steps": steps}
                self.event(events.DATASET_SMALLER_THAN_BATCH, **facts)
            self.event(
                events.TRAINING_STARTED,
                restored_from=None if restored is None else restored.name,
                from_memory=restored is not None and restored.is_from_memory,
                restore_s=None if restored is None else round(restored.seconds, 3),
                epoch=position.epoch,
                samples=position.samples,
                steps=steps,
                device=str(self.device),
                parameters=sum(p.numel() for p in model.parameters()),
            )
        self.phase("compile")  # until the first step is done: much happens in it for the first time

    def _open_log(self, level: str, *, shows_log: bool) -> Progress:
        stream = logs.open_log(self.run_folder.rank_log(self.generation, self.rank))
        streams, outputs = [stream], []
        if self.rank == 0:
            outputs.append(stream.fileno())
            if shows_log and self.identity.started_by != "launcher":
                streams.append(sys.stdout)
                with suppress(OSError, ValueError):  # a stdout without a descriptor gets no step lines
                    outputs.append(sys.stdout.fileno())
        bound: dict[str, Any] = {
            "job": self.job,
            "run_id": self.run_id,
            "generation": self.generation,
            "node": self.node,
            "rank": self.rank,
            "world_size": self.world_size,
        }
        progress = Progress(self.heartbeat, outputs, bound, self._first_step)
        self.moments.leave.append(progress.flush)
        # Has what logging uses: write and flush.
        target = cast("TextIO", _InOrder(progress, streams))
        logs.configure(target, level, events.EVENTS, **bound, step=lambda: progress.number)
        return progress

    def _first_step(self, step: int) -> None:
        self.phase("step")
        if self.rank == 0:
            failed_at = self.identity.failed_at
            seconds = None if failed_at is None else round(time.time() - failed_at, 3)
            self.event(events.TRAINING_FIRST_STEP, step=step, seconds_since_failure=seconds)
            if self.compilation.has_happened:
                self.event(events.TRAINING_COMPILED, **self.compilation.facts())
        for action in self.moments.first_step:
            action()
        self.moments.begin()


class _InOrder:
    """The rank's log, and what a person looks at, as one text stream; step lines that wait go first."""

    def __init__(self, progress: Progress, streams: list[TextIO]) -> None:
        self._progress, self._streams = progress, streams
        self._pid = os.getpid()

    def write(self, text: str) -> int:
        # A loader that was forked while lines waited has a copy of them.
        if os.getpid() == self._pid:
            self._progress.flush()
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()
