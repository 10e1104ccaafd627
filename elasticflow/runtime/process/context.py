"""This process as a member of its worker group: what train.py calls `worker`."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.nn import utils

from elasticflow import events
from elasticflow.errors import StopTraining
from elasticflow.runtime.measuring.device_memory import UsageReader
from elasticflow.runtime.measuring.own_time import own_time
from elasticflow.runtime.measuring.speed import Measures, device_name
from elasticflow.runtime.process import float32, process_group, random_streams, stopping
from elasticflow.runtime.process.compiler import Compilation
from elasticflow.runtime.process.host_copies import copy_to_host
from elasticflow.runtime.process.shard_layout import Sharding, ShardLayout
from elasticflow.runtime.process.step_log import Heartbeat, LateNumber, Progress
from elasticflow.runtime.process.step_profiler import StepProfiler
from elasticflow.runtime.process.votes import Vote
from elasticflow.system import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

    import torch
    from torch import Tensor, nn

    from elasticflow.events import Event
    from elasticflow.runtime.measuring.own_time import StepTimes
    from elasticflow.runtime.process.identity import Identity
    from elasticflow.runtime.process.position import Position, Schedule
    from elasticflow.runtime.process.step_log import AnyOptimizers
    from elasticflow.runtime.process.torch_private import Store


class Restored(NamedTuple):
    """The state that this generation resumes from.

    Attributes:
        is_from_memory: The snapshot was held in memory, and need not be on the store.
    """

    name: str
    is_from_memory: bool
    seconds: float = 0.0


class Worker:
    """This process as a member of its worker group.

    Attributes:
        identity: The way the process was started and its place: rank, world size, node, folders.
        store: Key-value store of all ranks, independent of the process group; None for a plain process.
        generation: Number of the worker group, the same on every rank.
        layout: This rank's place among the ranks that share a model; by default each rank has a whole one.
        is_exact: The job promises the same bits at every number of workers, so a sample must be the same whenever it is read.
        listen: Installs the signal handlers that ask this process to exit; may be called again.
        tell: Writes to the console if no supervisor follows the log; set by a script's own loop.
        dataset: The training data as the job's factory returned it; None before it is open, and for data shards.
        scalar_names: Names of the scalars that the job's steps return, in an order that is the same on every rank.
        stoppable: Context manager that turns a StopTraining raised by the job's own code into this rank's request to stop.
        stopped: The reason for which all ranks agreed to take no further step: training has ended, or they exit; None before.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        job: str,
        job_digest: str,
        seed: int,
        device: torch.device,
        wanted_device: str,
        store: Store | None,
        generation: int,
        log_level: str,
        shows_log: bool = True,
    ) -> None:
        self.identity, self.job, self.job_digest, self.seed = identity, job, job_digest, seed
        self.device, self.store, self.generation = device, store, generation
        self.wanted_device = wanted_device
        self.rank, self.local_rank = identity.rank, identity.local_rank
        self.world_size, self.local_world_size = identity.world_size, identity.local_world_size
        self.layout = ShardLayout(self.world_size, self.rank)
        self.sharding: Sharding | None = None
        self.run_id, self.run_folder, self.node = identity.run_id, identity.run_folder, identity.node
        self.generators = random_streams.Generators(seed, device)
        self.is_exact = False
        self.vote = Vote()
        self.vote.when("random", self.generators.look)
        self.stoppable = stopping.Stoppable(self.vote)
        self.stopped: stopping.Stopped | None = None
        self.dataset: Any = None
        self.moments = Moments()
        self.listen: Callable[[], None] = lambda: None
        self.tell: Callable[[str], None] = lambda _: None
        self.started_at: Position | None = None
        self.scalar_names: list[str] = []
        self.heartbeat = Heartbeat(identity.heartbeat_fd, identity.local_rank)
        self.progress = self._open_log(log_level, shows_log=shows_log)
        self.log = logs.get_logger(events.OURS)  # bound to the log opened before
        self.compilation = Compilation(self.heartbeat)
        self._usage = UsageReader(device)
        self.progress.own_time = own_time(device, self._report_figures)
        self.vote.end_own_part = self._end_own_part
        self._profiler = StepProfiler(
            self.heartbeat, self.run_folder, self.rank, device.type, self.event, self.progress.go_on
        )
        self.moments.leave.append(self._profiler.finish)
        self._logged_once: set[tuple[Event, Any]] = set()

    @property
    def should_leave(self) -> bool:
        """True once all ranks have agreed to exit or to take no further step."""
        return self.vote.leave or self.stopped is not None

    def stop(self, reason: str) -> None:
        """Have all ranks end training before the next step, as finished; for entry points that a user has edited."""
        stopping.request_stop(self.vote, StopTraining(reason))

    def own_reason_to_stop(self) -> str | None:
        """Return the reason for which the job's own code ends training before the next step; None if this rank knows no reason.

        A rule of the job file is left out: the file may change, and an evaluation decides again.
        """
        if self.stopped is not None:
            return None if self.stopped.by_rank is None else self.stopped.reason
        return None if self.vote.stop_is_by_rule else self.vote.stop_wanted or self.vote.stop_known

    def agree_to_stop(self) -> None:
        """Set `stopped` if any rank requested to take no further step. Collective: every rank."""
        self.stopped = stopping.decide(self.gather_text(stopping.ballot(self.vote)))

    def share_request(self) -> None:
        """Have all ranks know if one wants no further step: a snapshot before the next vote records that. Collective: every rank."""
        if not self.all_true(self.vote.stop_wanted is None):
            requested = stopping.decide(self.gather_text(stopping.ballot(self.vote)))
            self.vote.stop_known = None if requested is None else requested.reason

    @property
    def leaves_untrained(self) -> bool:
        """True if this rank was asked to exit and has trained nothing that must be saved."""
        return self.vote.leave_wanted and self.vote.may_leave_untrained

    def leave_if_asked(self) -> None:
        """Check that no rank was asked to exit and has trained nothing that must be saved. Collective: every rank.

        Raises:
            Leaving: on every rank, if one was asked; `worker.program` then ends the process.
        """
        if not self.all_true(not self.leaves_untrained):
            raise stopping.Leaving

    def event(self, event: Event, **fields: Any) -> None:
        """Log *event* at its own level."""
        getattr(self.log, event.level)(event, **fields)

    def event_once(self, event: Event, **fields: Any) -> None:
        """Log *event* unless this process has logged it before with the same value of the field `name`."""
        about = event, fields.get("name")
        if about not in self._logged_once:
            self._logged_once.add(about)
            self.event(event, **fields)

    def phase(self, name: str) -> None:
        """Report this rank's phase in its heartbeat; see `Heartbeat`."""
        self.heartbeat.phase(name)

    def step_scheduler(self, scheduler: Any, optimizers: AnyOptimizers) -> None:
        """Advance the learning-rate schedule; the step's log line shows the rates that *optimizers* used before.

        StopTraining raised by the job's own schedule ends training on all ranks.
        """
        self.progress.note_rates(optimizers)
        with self.stoppable:
            scheduler.step()

    def log_step(self, position: Position, loss: float | LateNumber, optimizers: AnyOptimizers) -> None:
        """Report a finished step and the global batch's mean loss. Every rank, after each step."""
        self.progress.step(position, loss, optimizers)
        self._profiler.after_step(position.step)

    def log_grad_norm(self, norm: Tensor) -> None:
        """Put *norm*, as `clip_grad_norm_` returned it, into the step's line; does not wait for the device."""
        if self.progress.is_next_logged:
            self.progress.note_grad_norm(copy_to_host(norm))

    def log_grad_norm_of(self, model: nn.Module) -> None:
        """Put the norm of the gradients in *model* into the step's line; it is computed only if the step has a line."""
        if self.progress.is_next_logged:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            self.progress.note_grad_norm(copy_to_host(utils.get_total_norm(gradients)))

    def reseed(self) -> None:
        """Put every random generator into one state on all ranks; each factory begins in a state of its own."""
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
            model: The model is put into training mode, unless *keeps_modes*.
            restored: The snapshot that *position* was read from; None: training begins.
            measures: Settings of the throughput and MFU figures in the log; None: the defaults.
            keeps_modes: The modules keep the modes that the script gave them.
        """
        self.listen()  # again: the model's or the dataset's code may have replaced the signal handlers
        self.leave_if_asked()
        left = schedule.remaining(position)  # None: the data's length is unknown
        if position.step != 0:
            self.moments.beginning.clear()  # also drops the objects opened for these callbacks
        if not keeps_modes:
            model.train()
        self.started_at = position
        self.generators.rest()
        measures = measures or Measures()
        of_peak = measures.of_peak(self.device, self.world_size, model, float32.matmul_precision(self.device))
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
        self.phase("compile")  # until the first step is done, which includes many one-time costs

    def _end_own_part(self) -> None:
        if self.progress.own_time is not None:
            part = self.vote.part
            self.progress.own_time.end_own_part(1.0 if part is None else part * self.world_size)

    def _report_figures(self, times: StepTimes) -> None:
        usage = self._usage.read()
        self.progress.usage = usage
        self.heartbeat.figures(times, str(self.device), usage)

    def _open_log(self, level: str, *, shows_log: bool) -> Progress:
        stream = logs.open_log(self.run_folder.rank_log(self.generation, self.rank))
        streams, outputs = [stream], []
        if self.rank == 0:
            outputs.append(stream.fileno())
            if shows_log and self.identity.started_by != "launcher":
                streams.append(sys.stdout)
                with suppress(OSError, ValueError):  # a stdout without a file descriptor gets no step lines
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
        # Logging uses only `write` and `flush`.
        target = cast("TextIO", _InOrder(progress, streams))
        logs.configure(target, level, events.EVENTS, **bound, step=lambda: progress.number)
        return progress

    def _first_step(self, step: int) -> None:
        self.phase("step")
        if self.rank == 0:
            failed_at = self.identity.failed_at
            seconds = None if failed_at is None else round(time.monotonic() - failed_at, 3)
            self.event(events.TRAINING_FIRST_STEP, step=step, seconds_since_failure=seconds)
            if self.compilation.has_happened:
                self.event(events.TRAINING_COMPILED, **self.compilation.facts())
        for action in self.moments.first_step:
            action()
        self.moments.begin()


class _InOrder:
    """The rank's log and, where it is shown, standard output as one text stream; writes the waiting step lines first."""

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


@dataclass
class Moments:
    """Callbacks by moment; each list is called in its order.

    Attributes:
        beginning: A run begins without a snapshot to restore (`begin`).
        evaluation: An evaluation is finished, with its position and metrics; every rank.
        snapshot: A snapshot is about to be taken, with its position and name; every rank.
        leave: The worker is about to exit, and its process group is still alive.
        finish: Training has ended at a position; after `leave`.
    """

    beginning: list[Callable[[], None]] = field(default_factory=list)
    first_step: list[Callable[[], None]] = field(default_factory=list)
    evaluation: list[Callable[[Position, Mapping[str, Any]], None]] = field(default_factory=list)
    snapshot: list[Callable[[Position, str], None]] = field(default_factory=list)
    leave: list[Callable[[], None]] = field(default_factory=list)
    finish: list[Callable[[Position], None]] = field(default_factory=list)

    def begin(self) -> None:
        """Run the actions of `beginning`, once: before loader processes read the data, else after the first step.

        A forked loader process shares the positions of open files with its parent, so the two must not read at once.
        """
        actions, self.beginning = self.beginning, []
        for action in actions:
            action()
