"""`elasticflow.join`: makes this process a member of a run; the script, or the train.py of a job, has the loop."""

from __future__ import annotations

import atexit
import builtins
import logging
import os
import sys
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, cast

from elasticflow import events
from elasticflow.errors import INTERRUPTED, StateError
from elasticflow.protocol.loop_settings import LoopSettings
from elasticflow.runtime.loop.gradients import Gradients
from elasticflow.runtime.loop.run import Run
from elasticflow.runtime.loop.script_checks import ScriptChecks
from elasticflow.runtime.loop.training_loop import TrainingLoop
from elasticflow.runtime.process import stopping
from elasticflow.runtime.process.shard_layout import Sharding, layout_of
from elasticflow.runtime.process.sharded_tensors import refuse_draws
from elasticflow.runtime.worker import end_by
from elasticflow.runtime.worker import join as join_group
from elasticflow.system.units import parse_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.runtime.measuring.speed import Measures
    from elasticflow.runtime.process.context import Worker

_P = ParamSpec("_P")
_ONLY_FOR_JOBS = {"digest", "compare_replicas", "measures"}
_has_joined = False


# A train.py that was written before `join_job` existed, and edited since, is reused at each launch and calls `join`.
def _or_job(join: Callable[_P, Run]) -> Callable[_P, Run]:
    """Have *join* take arguments of `join_job`, too, without showing them in its signature."""

    @wraps(join)
    def joined(*args: _P.args, **kwargs: _P.kwargs) -> Run:
        if kwargs.keys() & _ONLY_FOR_JOBS:
            return join_job(**cast("Any", kwargs))
        return join(*args, **kwargs)

    return joined


@_or_job
def join(
    *,
    seed: int = 0,
    name: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    snapshots: str | None = None,
    every: str | Sequence[str] = ("10 min", "1 epoch"),
    keep: int = 3,
    ignore: str | Sequence[str] = (),
    virtual_shards: int | None = None,
    shard: int | str | Sharding | None = None,
    log_every: int = 1,
    threads: int | None = None,
    log_level: str = "info",
    gradients: Gradients | None = None,
) -> Run:
    """Join a run: form the process group, seed the random generators, and return the run. Collective.

    Under `elasticflow run`, the job file whose [script] table names this script replaces all of these arguments except
    *gradients*, *virtual_shards* and *shard*. Under plain torchrun and plain python the arguments count, and a second start with the
    same name and folder continues where the first one ended.

    An error while the ranks meet ends this process with exit code 1 or 2 and a message, since other ranks would wait: another start
    uses the run folder, a device is missing, the folder of the snapshots cannot be written, or *shard* does not divide the number of
    workers.

    Args:
        seed: Seed of the sample order and of all random draws.
        name: Name of the job; by default the script's file name without .py.
        folder: Run folder, unless `elasticflow run` started the script; by default runs/NAME/by-hand.
        snapshots: Folder of the snapshots of this job alone, as a path or any fsspec URL; by default inside the run folder.
        every: Interval between snapshots: "500 steps", "10 min", "1 epoch", or a list of these. A snapshot is also taken at
            the end and before this process exits.
        keep: Number of newest snapshots to keep; older ones are deleted.
        ignore: Path of state that no step depends on, as an error message names it, such as "self.history"; or a list of paths.
        virtual_shards: Number of parts into which `Run.gradients` cuts each batch, so that a run has the same bits at any number
            of workers up to this number. None: `batches` gives each rank its part of a batch as a whole, and the script
            exchanges the gradients.
        shard: Number of workers that share one copy of the model, for a model that no device holds whole; "node" for the workers of
            each node, "all" for all workers; or a `Sharding`. It needs *virtual_shards* or *gradients*, and `Run.wrap` shards the
            model. A run may resume with another *shard*; with *virtual_shards* the bits do not depend on it.
        log_every: Number of steps from one log line to the next.
        threads: CPU threads of this process. None: an equal share of the machine's cores, or one thread with virtual shards.
        log_level: Lowest level that is logged.
        gradients: Options of `Run.gradients`; *virtual_shards* is one of them. None: *virtual_shards* alone decides.

    Raises:
        StateError: `join` was called before in this process; or the value of an argument cannot be used; or *shard* is given without
            *virtual_shards* and *gradients*.
    """
    if virtual_shards is not None:
        gradients = gradients or Gradients()
        if gradients.virtual_shards not in (None, virtual_shards):
            raise StateError(
                f"elasticflow.join was given virtual_shards={virtual_shards}, and gradients with {gradients.virtual_shards}",
                "give one of the two",
            )
        gradients = replace(gradients, virtual_shards=virtual_shards)
    if LoopSettings.told(os.environ) is None:
        _require_numbers(seed=seed, keep=keep, log_every=log_every, threads=threads)
        _require_words(every, log_level)
    job = name or Path(sys.argv[0]).stem.lstrip("-") or "script"
    own = LoopSettings.of_arguments(job, seed, snapshots, every, keep, ignore, log_every, threads, log_level)
    loop = _joined(own, folder, gradients, shard=shard)
    _report_uncaught_exceptions()
    _note_exits(loop)
    process = os.getpid()
    atexit.register(lambda: loop.end_if_forgotten() if os.getpid() == process else None)
    return Run(loop)


def _require_numbers(**given: int | None) -> None:
    for name, value in given.items():
        least = 0 if name == "seed" else 1
        is_left_out = value is None and name == "threads"
        if not is_left_out and not (type(value) is int and least <= value < 2**63):
            raise StateError(
                f"elasticflow.join({name}={value!r}): must be a whole number from {least}",
                f"give it another {name}",
            )


def _require_words(every: str | Sequence[str], log_level: str) -> None:
    for text in (every,) if isinstance(every, str) else every:
        try:
            parse_interval(text)
        except ValueError as error:
            raise StateError(f"elasticflow.join(every={text!r}): {error}", 'such as "500 steps"') from error
    if log_level.upper() not in logging.getLevelNamesMapping():
        raise StateError(
            f"elasticflow.join(log_level={log_level!r}): there is no such level",
            'there are "debug", "info", "warning" and "error"',
        )


def join_job(
    *,
    name: str,
    digest: str,
    folder: str | os.PathLike[str],
    seed: int,
    snapshots: SnapshotSettings,
    gradients: Gradients | None = None,
    shard: Sharding | None = None,
    compare_replicas: str | None = None,
    measures: Measures | None = None,
    **options: Any,
) -> Run:
    """Join a run, as `join` does, from a train.py that the compiler wrote. Collective.

    Errors are those of `join`, but they do not end the process: `worker.program` handles them. Other arguments are as for `join`.

    Args:
        snapshots: Settings of the snapshots; they include *every*, *keep* and *ignore* of `join`.
        shard: How workers share the model. None: each has a whole one.
        compare_replicas: Interval at which the ranks' replicas are compared bit for bit, such as "1000 steps". They are also
            compared before each snapshot.
        measures: Speeds that the log shows. None: steps and samples.
        options: log_every, threads, log_level and device.
    """
    settings = LoopSettings(name, digest, seed, snapshots, **options)
    of_loop = {"compare_replicas": compare_replicas, "measures": measures}
    return Run(_joined(settings, folder, gradients, shard=shard, is_job=True, **of_loop))


def _joined(
    own: LoopSettings,
    folder: str | os.PathLike[str] | None,
    gradients: Gradients | None,
    *,
    shard: int | str | Sharding | None = None,
    is_job: bool = False,
    **options: Any,
) -> TrainingLoop:
    """Join the process group; settings of the script's job file replace *own*, those of its arguments."""
    if shard is not None and gradients is None:
        raise StateError(
            "join was given shard, and without run.gradients nothing exchanges gradients of a model that workers share",
            "join(gradients=elasticflow.Gradients(), shard=...), or join(virtual_shards=16, shard=...) for the same bits at any number "
            "of workers; a loop that calls backward itself calls fully_shard itself, too: elasticflow guide parallel",
        )
    if shard is not None and gradients is not None and gradients.moves_optimizers:
        raise StateError(
            "join was given shard and moves_optimizers: gradients of a model that workers share are added up before one optimizer moves",
            "leave shard out; or let the function return a loss, and move the optimizer after run.gradients",
        )
    _require_first_call()
    chosen = LoopSettings.told(os.environ) or own
    if gradients is not None and gradients.virtual_shards is not None and chosen.threads is None:
        chosen = replace(chosen, threads=1)  # sums inside an operation depend on the number of threads
    place = Path(folder) if folder is not None else Path("runs") / chosen.job / "by-hand"
    worker = _member(chosen, place, shard, is_job=is_job)
    worker.is_exact = gradients is not None and gradients.virtual_shards is not None
    refuse_draws(worker.device)
    script = None if is_job else ScriptChecks(worker, gradients, chosen.snapshots.ignore)
    return TrainingLoop(
        worker, chosen.snapshots, gradients=gradients, log_every=chosen.log_every, script=script, **options
    )


def _require_first_call() -> None:
    global _has_joined  # noqa: PLW0603  # one run per process
    if _has_joined:
        raise StateError(
            "elasticflow.join was called a second time in this process, which is a member of a run already",
            "call it once, and hand the run that it returned to what needs it",
        )
    _has_joined = True


def _member(chosen: LoopSettings, place: Path, shard: int | str | Sharding | None, *, is_job: bool) -> Worker:
    """Join the process group; return this worker, with its place among those that share the model. In a script, an error ends the process."""
    try:
        worker = join_group(
            chosen.job,
            chosen.digest,
            place,
            chosen.snapshots,
            seed=chosen.seed,
            threads=chosen.threads,
            device=chosen.device,
            log_level=chosen.log_level,
            shows_log=is_job,
        )
        if shard is not None:
            sharding = shard if isinstance(shard, Sharding) else Sharding(shard)  # type: ignore[arg-type]  # looked at next
            worker.sharding = sharding
            worker.layout = layout_of(
                sharding, worker.world_size, worker.rank, worker.local_world_size, worker.device.type
            )
            if sharding.offload is not None and not worker.layout.is_offloaded and worker.rank == 0:
                worker.event(events.OFFLOAD_LEFT_OUT)
    except stopping.Leaving:  # asked to exit before all ranks had met
        if is_job:
            raise
        os._exit(INTERRUPTED)
    except Exception as error:
        if is_job:
            raise
        end_by(error)
    return worker


def _note_exits(loop: TrainingLoop) -> None:
    """Tell *loop* of `sys.exit(1)` and `exit(1)`: functions of `atexit` cannot ask for the code, and a script that failed is not finished."""
    exits = sys.exit

    def note_status(status: object) -> None:
        if loop.is_finished:  # an exit in the middle of the loop may be caught, as argparse's is
            loop.exit_status = status

    def noted(status: Any = None, /) -> NoReturn:
        note_status(status)
        exits(status)

    vars(noted)["note_status"] = note_status  # for the launcher, which also sees `raise SystemExit`
    sys.exit = builtins.exit = builtins.quit = noted  # type: ignore[assignment]  # those of `site` are objects


def _report_uncaught_exceptions() -> None:
    """Have an uncaught exception reported as a worker's error, and the process ended at once.

    Call this after `init_process_group`: its hook (torch 2.13, `distributed_c10d._distributed_excepthook`) calls the previous
    hook with a buffer in place of standard error, and writes the buffer out only if the previous hook returns.
    """
    process, told = os.getpid(), sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if os.getpid() != process or issubclass(kind, KeyboardInterrupt):
            told(kind, error, trace)
        else:
            end_by(error)

    sys.excepthook = tell
