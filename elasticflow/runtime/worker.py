"""A worker's life: join the group, train, leave (floor R; the one place of the runtime that reads os.environ)."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from elasticflow import errors, events, logs
from elasticflow.runtime import failure, group, streams
from elasticflow.runtime.identity import Identity
from elasticflow.runtime.progress import Heartbeat, Progress
from elasticflow.runtime.vote import Vote

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import TextIO

    import torch
    from torch import nn
    from torch._C._distributed_c10d import Store

    from elasticflow.runtime.order import Position, Schedule
    from elasticflow.runtime.snapshot import Policy

_OTHERS_LEAVE_S = 30.0

_current: Worker | None = None  # what `run` reports under, if `join` was reached


class Worker:
    """This process as a member of its worker group.

    Attributes:
        identity: How it was started and its place: rank, world size, node, folders.
        device: Where the model lives.
        store: Key-value store of all ranks, apart from the process group; None for a plain process.
        seed: Of the data order and every random stream.
        generation: Number of the worker group, the same on every rank.
        fingerprints: Of the datasets opened, by name.
        vote: What all ranks decide together at each step.
        progress: Reports finished steps.
        at_leave: Called by `leave`, in order, while the process group is alive.
        autocast_dtype: Of mixed precision, or None.
        skipped_step: The last step's loss was not finite and the step was left out.
        restored_from: Name of the snapshot this generation goes on from.
        started_at: Position at which this generation began to train.
        best: Best value of the metric that `evaluation.best` names, so far.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        job: str,
        job_digest: str,
        seed: int,
        device: torch.device,
        generation: int,
    ) -> None:
        self.identity, self.job, self.job_digest, self.seed, self.device = (
            identity,
            job,
            job_digest,
            seed,
            device,
        )
        self.rank, self.local_rank = identity.rank, identity.local_rank
        self.world_size, self.local_world_size = identity.world_size, identity.local_world_size
        self.run_id, self.run_folder, self.node = identity.run_id, identity.run_folder, identity.node
        self.generation = generation
        self.store: Store | None = None
        self.fingerprints: dict[str, str] = {}
        self.vote = Vote()
        self.at_leave: list[Callable[[], None]] = []
        self.autocast_dtype: torch.dtype | None = None
        self.skipped_step = False
        self.best: float | None = None
        self.restored_from: str | None = None
        self.started_at: Position | None = None
        self.heartbeat = Heartbeat(identity.heartbeat_fd, identity.local_rank)
        self.progress = self._open_log()
        self.log = logs.get_logger("elasticflow")  # bound to the log opened before

    @property
    def should_leave(self) -> bool:
        """True after the step at which all ranks agreed to leave."""
        return self.vote.leave

    def event(self, event: str, *, level: str = "info", **fields: Any) -> None:
        """Log an event of `elasticflow.events`."""
        getattr(self.log, level)(event, **fields)

    def phase(self, name: str) -> None:
        """Say what this rank is doing, for whoever watches its heartbeat."""
        self.heartbeat.phase(name)

    def reseed(self) -> None:
        """Put every random generator into the state in which all ranks build the model."""
        streams.seed_everything(self.seed)

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's *text*, by rank. Collective: every rank."""
        return group.gather_text(text, self.world_size)

    def all_true(self, mine: bool) -> bool:
        """True if *mine* is true on every rank. Collective: every rank."""
        return group.all_true(mine, self.world_size)

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank."""
        self.all_true(mine=True)

    def start_training(
        self, position: Position, schedule: Schedule, model: nn.Module, log_every: int
    ) -> None:
        """Begin training at *position*; every rank."""
        model.train()
        self.started_at = position
        self.progress.start(position.step, log_every)
        if self.rank == 0:
            self.event(
                events.TRAINING_STARTED,
                restored_from=self.restored_from,
                epoch=position.epoch,
                samples=position.samples,
                steps=position.step + schedule.remaining(position),
                device=str(self.device),
                parameters=sum(p.numel() for p in model.parameters()),
            )
        self.phase("training")

    def _open_log(self) -> Progress:
        stream = logs.open_log(self.run_folder.rank_log(self.generation, self.rank))
        outputs = [stream.fileno()] if self.rank == 0 else []
        target: TextIO = stream
        if self.rank == 0 and self.identity.way != "launched":
            target = _Both(stream, sys.stdout)  # type: ignore[assignment]  # has what logging uses: write and flush
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
        logs.configure(target, **bound, step=lambda: progress.number)
        return progress

    def _first_step(self, step: int) -> None:
        if self.rank == 0:
            failed_at = self.identity.failed_at
            seconds = None if failed_at is None else round(time.time() - failed_at, 3)
            self.event(events.TRAINING_FIRST_STEP, step=step, seconds_since_failure=seconds)


class _Both:
    """Two text streams as one: the rank's log and what a person looks at."""

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()


def join(
    job: str, job_digest: str, folder: Path, snapshots: Policy, *, seed: int, threads: int | None
) -> Worker:
    """Return this process as a member of its worker group, its random generators seeded. Collective: every rank.

    Started by our agent, the group's number and the snapshot writer are given; under plain torchrun or
    `python train.py`, rank 0 claims the number at the snapshot URI.

    Args:
        job: The job's name.
        job_digest: Identifies the resolved job.
        folder: Where the entry point lies; the run folder if the environment names none.
        snapshots: When snapshots are taken and where they go.
        seed: Of the data order and every random stream.
        threads: CPU threads; None: the node's cores shared out among its workers.
    """
    global _current  # noqa: PLW0603  # one worker per process
    identity = Identity.read(os.environ, folder)
    # Until the handler stands, a drain request must not kill: it waits here and is delivered below.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the agent asks for stacks when a rank hangs
    group.set_threads(threads, identity.local_world_size)
    device = group.choose_device(identity)
    store = group.connect(identity)
    generation = identity.generation
    if generation is None:
        generation = _claim(identity, snapshots, store, job)
    me = Worker(identity, job=job, job_digest=job_digest, seed=seed, device=device, generation=generation)
    me.store = store
    _current = me
    _listen(me)
    if store is not None:
        group.form(identity, store, device)
    me.reseed()
    me.phase("building")
    return me


def _claim(identity: Identity, policy: Policy, store: Store | None, job: str) -> int:
    if identity.rank == 0:
        catalog = policy.catalog(identity.run_folder, identity.run_id)
        number = catalog.claim_generation(
            {"job": job, "world_size": identity.world_size, "way": identity.way}
        )
        if store is not None:
            store.set("generation", str(number))
        return number
    assert store is not None
    return int(store.get("generation"))


def _listen(me: Worker) -> None:
    def drain(number: int, frame: object) -> None:
        if number == signal.SIGINT and me.vote.leave_wanted:
            os._exit(errors.KILLED_BY_USER)  # asked a second time
        me.vote.leave_wanted = True

    signal.signal(signal.SIGTERM, drain)
    # Under our agent, Ctrl-C is the supervisor's business: it asks for a drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN if me.identity.way == "launched" else drain)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def leave(me: Worker, position: Position, schedule: Schedule) -> NoReturn:
    """End this process once its last snapshot is committed; never returns. Every rank.

    It ends here, while model and process group are alive: their destructors can wait for each other for ever
    (torch 2.13, gloo: `~ProcessGroupGloo` joins a thread that waits for the interpreter's lock).

    Raises:
        SnapshotError: the last snapshot could not be written.
    """
    me.phase("leaving")
    finished = schedule.is_end(position)
    for action in me.at_leave:
        action()
    if finished and me.rank == 0:
        me.event(events.TRAINING_FINISHED, epoch=position.epoch, samples=position.samples, best=me.best)
    _wait_for_others(me)
    _exit(errors.FINISHED if finished or me.identity.way != "plain" else errors.INTERRUPTED)


def _wait_for_others(me: Worker) -> None:
    # Under torchrun, rank 0 serves the store and local rank 0 owns the writer: they go last.
    if me.identity.way != "torchrun" or me.store is None:
        return
    deadline = time.monotonic() + _OTHERS_LEAVE_S
    with suppress(dist.DistError, RuntimeError):  # the store went with rank 0: all others had left
        me.store.add("left", 1)
        while me.local_rank == 0 and time.monotonic() < deadline and me.store.add("left", 0) < me.world_size:
            time.sleep(0.01)


def run(main: Callable[[], None]) -> NoReturn:
    """Run *main* and end the process; an exception leaves one `worker.raised` line and its traceback."""
    code = errors.FINISHED
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else errors.ANSWER_IS_NO
    except BaseException as error:  # noqa: BLE001  # reported, and the process ends
        _report(error)
        code = error.exit_code if isinstance(error, errors.ElasticflowError) else errors.ANSWER_IS_NO
    _exit(code)


def _report(error: BaseException) -> None:
    text = failure.text(error)
    with suppress(OSError):
        log = _current.log if _current is not None else _log_before_join()
        if log is not None:
            kind, message = failure.classify(error), failure.describe(error)
            log.error(events.WORKER_RAISED, **{"class": kind, "error": message, "traceback": text})
    sys.stderr.write(text)


def _log_before_join() -> Any:
    folder = os.environ.get("ELASTICFLOW_RUN_FOLDER")
    generation = os.environ.get("ELASTICFLOW_GENERATION")
    if not folder or not generation:
        return None  # the traceback on standard error is all there is to say
    from pathlib import Path

    identity = Identity.read(os.environ, Path(folder))
    stream = logs.open_log(identity.run_folder.rank_log(int(generation), identity.rank))
    facts: dict[str, Any] = {
        "job": identity.run_folder.job,
        "run_id": identity.run_id,
        "generation": int(generation),
    }
    logs.configure(
        stream, **facts, node=identity.node, rank=identity.rank, world_size=identity.world_size, step=0
    )
    return logs.get_logger("elasticflow")


def _exit(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # see `leave`
