"""The life of a worker process: it joins its group, trains and exits."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from elasticflow import errors, events
from elasticflow.protocol import worker_environment
from elasticflow.protocol.run_files import write_preparation
from elasticflow.run_folder import make_runs_folder
from elasticflow.runtime.measuring import device_memory
from elasticflow.runtime.process import (
    devices,
    environment,
    failure,
    process_group,
    seeded_imports,
    standby_device,
    stopping,
)
from elasticflow.runtime.process.context import Worker
from elasticflow.runtime.process.identity import Identity
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.system import fault_injection, forked_children, logs
from elasticflow.system.exceptions import describe
from elasticflow.system.file_lock import LOOK_S, FileLock, LockHeldError
from elasticflow.system.process_record import ProcessRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.run_folder import RunFolder
    from elasticflow.runtime.process.position import Position, Schedule
    from elasticflow.runtime.process.torch_private import Store
    from elasticflow.runtime.training.evaluation import Evaluations

_OTHERS_LEAVE_S = 30.0
# A killed process gives the lock back within this time, however much memory it had.
_DYING_S = 10.0
# Errors of file systems without locks: of two starts, the fence stops the older one (`snapshots/writer/committer.py`).
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_current: Worker | None = None  # identity under which `program` reports; None before `join`
_is_child = False  # this process is a child of a process that joined


def join(
    job: str,
    job_digest: str,
    folder: Path,
    snapshots: SnapshotSettings,
    *,
    seed: int,
    threads: int | None,
    device: str = devices.AUTO,
    log_level: str = "info",
    shows_log: bool = True,
) -> Worker:
    """Return this process as a member of its worker group, its random generators seeded. Collective: every rank.

    Under plain torchrun and `python train.py`, where no agent gives the group a number, rank 0 claims one.

    Args:
        folder: Folder of the entry point; also the run folder, unless the environment names another.
        log_level: The rank logs leave out lines below it, except the lines that the supervisor follows.
        shows_log: Without a supervisor, rank 0 writes its log to standard output, too.

    Raises:
        DeviceError: no device of the type, fewer devices than workers, or devices of several types.
    """
    global _current  # noqa: PLW0603  # one worker per process
    identity = Identity.read(os.environ, folder)
    _prepare_process(identity)
    process_group.set_threads(threads, identity.local_world_size)
    chosen = devices.choose_device(identity, device)
    with forked_children.own_sockets():
        store = process_group.connect(identity, chosen)
    # Not before: a process whose torchrun was killed while it imported waits minutes for the store, and would keep the next start out.
    _hold_run_folder(identity)
    generation = _generation(identity, snapshots, store, job)
    worker = _current = Worker(
        identity,
        job=job,
        job_digest=job_digest,
        seed=seed,
        device=chosen,
        wanted_device=identity.device or device,
        store=store,
        generation=generation,
        log_level=log_level,
        shows_log=shows_log,
    )
    _equip(worker, snapshots)
    if store is not None:
        process_group.announce(store, os.environ)
    with forked_children.own_sockets():
        process_group.form(identity, store, chosen)
    worker.listen()
    worker.reseed()
    seeded_imports.install(seed)
    worker.phase("build")
    worker.compilation.watch()
    return worker


def _prepare_process(identity: Identity) -> None:
    fault_injection.arm(os.environ)
    forked_children.set_apart()
    forked_children.call_in_children(_leave_to_parent)
    devices.fix_workspace()
    if identity.started_by == "torchrun":
        # It ends the ranks that wait for a rank which has failed; a handler would not run before the wait is over.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    else:
        # A request to drain that comes before its handler is installed must not kill: `_listen` unblocks the signal.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # the agent asks for stacks when a rank hangs


def _leave_to_parent() -> None:
    """Have this process, a child of the worker, report nothing in the worker's name."""
    global _current, _is_child  # as above
    if _current is not None:
        _current.heartbeat.stop()
    _current, _is_child = None, True


def _equip(worker: Worker, snapshots: SnapshotSettings) -> None:
    # Where the state is held by itself, `Snapshots.restore` decides.
    worker.vote.may_leave_untrained = not snapshots.is_held_at_interval
    if worker.identity.started_by == "launcher":
        worker.moments.first_step.append(lambda: environment.log_loaded_modules(worker))
        if worker.identity.local_rank == 0:
            worker.moments.first_step.append(
                lambda: write_preparation(
                    worker.run_folder.imports,
                    standby_device.library_variables(os.environ),
                    worker.device.type,
                )
            )
    worker.listen = lambda: _listen(worker)
    if worker.identity.started_by != "torchrun":
        worker.listen()


def _generation(identity: Identity, snapshots: SnapshotSettings, store: Store | None, job: str) -> int:
    """Return the group's number: the agent's, or one that rank 0 claims.

    Raises:
        StateError: another job has its snapshots there.
    """
    if identity.generation is not None:
        return identity.generation
    if identity.rank == 0:
        catalog = Catalog.of_run(snapshots, identity.run_folder, identity.run_id)
        catalog.check_writable()
        # All runs started by hand have one run id: of two scripts with the same place, the second would resume the first one's run.
        if (other := catalog.newest_claim().get("job", job)) != job:
            raise errors.StateError(
                f"the snapshots in {catalog.storage.uri} are those of {other}, and this is {job}",
                "give each a place of its own: join(snapshots=...), or snapshots.uri in the job file; "
                f'to continue that run: join(name="{other}"), or job.name',
            )
        way = "plain" if identity.started_by == "python" else identity.started_by
        claim = {"job": job, "world_size": identity.world_size, "way": way, **ProcessRecord.of().to_json()}
        number = catalog.claim_generation(claim)
        if store is not None:
            store.set("generation", str(number))
        return number
    assert store is not None, "python train.py has rank 0 alone"
    return int(store.get("generation"))


def _hold_run_folder(identity: Identity) -> None:
    """Lock the run folder until this process ends, if it is rank 0 under plain `python` or torchrun; elsewhere the supervisor does.

    Raises:
        RunLockedError: another start of the run is alive; the message names its process and machine.
        StorageError: the run folder cannot be written.
    """
    if identity.rank != 0 or identity.started_by == "launcher":
        return
    folder = identity.run_folder
    make_runs_folder(folder)
    try:
        lock = _lock_of(folder)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return
        raise errors.StorageError(
            f"cannot write the run folder {folder.path}: {error.strerror}",
            "check that it is writable, or name another one: elasticflow.join(folder=...)",
        ) from error
    forked_children.own(lock.descriptor)


def _lock_of(folder: RunFolder) -> FileLock:
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            return FileLock.take(folder.lock)
        except LockHeldError as held:
            holder = held.holder
            is_dying = holder is None or (holder.is_on_this_machine and not holder.is_alive)
            if not is_dying or time.monotonic() > deadline:
                raise held.refusal(f"the run in {folder.path}") from None
        time.sleep(LOOK_S)


def _listen(worker: Worker) -> None:
    def drain(number: int, frame: object) -> None:
        if number == signal.SIGINT and worker.vote.leave_wanted:
            os._exit(errors.KILLED_BY_USER)  # asked a second time
        worker.vote.leave_wanted = True

    signal.signal(signal.SIGTERM, drain)
    # Under our agent, the supervisor handles Ctrl-C: it asks for a drain.
    signal.signal(signal.SIGINT, signal.SIG_IGN if worker.identity.started_by == "launcher" else drain)
    for number in (signal.SIGTERM, signal.SIGINT):
        forked_children.own_handler(number, drain)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def leave(
    worker: Worker, position: Position, schedule: Schedule, evaluation: Evaluations | None = None
) -> NoReturn:
    """End this process once its last snapshot is committed; never returns. Every rank.

    The process exits here, while model and process group are alive: their destructors can wait for each other for ever
    (torch 2.13, gloo: `~ProcessGroupGloo` joins a thread that waits for the interpreter's lock).

    Raises:
        SnapshotError: the last snapshot could not be written.
    """
    worker.phase("leave")
    finished = schedule.is_end(position) and not (evaluation is not None and evaluation.is_owed)
    if finished:
        worker.stopped = None
    elif worker.stopped is None:  # the schedule may have raised StopTraining after the last step's vote
        worker.agree_to_stop()
    if worker.stopped is not None and worker.stopped.is_end:
        finished = True
        if worker.rank == 0:
            worker.event(events.TRAINING_STOPPED, **worker.stopped._asdict())
    for action in worker.moments.leave:
        action()
    for call in worker.moments.finish if finished else ():
        call(position)
    if finished and worker.rank == 0:
        best = None if evaluation is None else evaluation.ranking.best
        worker.event(events.TRAINING_FINISHED, epoch=position.epoch, samples=position.samples, best=best)
    _wait_for_others(worker)
    if finished:
        _exit(errors.FINISHED)
    leave_unfinished(worker)


def _wait_for_others(worker: Worker) -> None:
    # Rank 0 serves the store and exits last, as does local rank 0 under torchrun, which owns the writer.
    if worker.store is None:
        return
    goes_last = worker.rank == 0 or (worker.local_rank == 0 and worker.identity.started_by == "torchrun")
    deadline = time.monotonic() + _OTHERS_LEAVE_S
    with suppress(dist.DistError, RuntimeError):  # the store ended with rank 0: all other ranks had exited
        worker.store.add("left", 1)
        while goes_last and time.monotonic() < deadline and worker.store.add("left", 0) < worker.world_size:
            time.sleep(0.01)


def program(main: Callable[[], None]) -> NoReturn:
    """Run *main*, then end this process; an exception is logged as one `worker.raised` line and printed with its traceback."""
    try:
        main()
    except stopping.Leaving:
        assert _current is not None
        leave_unfinished(_current)
    except BaseException as error:  # noqa: BLE001  # reported, and the process ends
        end_by(error)
    _exit(errors.FINISHED)


def leave_unfinished(worker: Worker) -> NoReturn:
    """End this process before the end of the training."""
    if worker.rank == 0:
        worker.event(events.TRAINING_LEFT)
    _exit(errors.INTERRUPTED if worker.identity.started_by == "python" else errors.FINISHED)


def end_by(error: BaseException) -> NoReturn:
    """End this process because of *error*, which is logged as one `worker.raised` line and printed with its traceback."""
    _report(error)
    _exit(error.exit_code if isinstance(error, errors.ElasticflowError) else errors.ANSWER_IS_NO)


def _report(error: BaseException) -> None:
    text = failure.shown(error)
    with suppress(OSError):
        log = _current.log if _current is not None else _log_before_join()
        if log is not None:
            kind, message = failure.classify(error), failure.describe(error)
            if kind == "oom" and _current is not None:
                device = _current.device
                message = "\n  ".join([message, *filter(None, [device_memory.memory_line(device)])])
                text += f"{device_memory.memory_summary(device) or ''}\n"
            final = isinstance(error, errors.WorkerError) and error.is_final
            facts = {
                "class": kind,
                "error": message,
                "traceback": failure.shortened(failure.text(error)),
                "final": final,
                "exception": describe(error),
            }
            log.error(events.WORKER_RAISED, **facts)
    with suppress(OSError, ValueError):  # the job's own code may have closed it
        sys.stderr.write(text)


def _log_before_join() -> Any:
    folder = os.environ.get(worker_environment.RUN_FOLDER)
    generation = os.environ.get(worker_environment.GENERATION)
    if not folder or not generation or _is_child:
        return None  # the traceback on standard error is enough
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
    return logs.get_logger(events.OURS)


def _exit(code: int) -> NoReturn:
    forked_children.end_children()
    if _current is not None:
        with suppress(OSError):
            _current.progress.flush()
            logs.tell_left_out()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # see `leave`
