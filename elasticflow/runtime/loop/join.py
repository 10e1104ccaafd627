"""`elasticflow.join`: this process as a member of a run whose loop is the script's own."""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from elasticflow.errors import INTERRUPTED, StateError
from elasticflow.protocol.loop_settings import LoopSettings
from elasticflow.runtime import worker as life
from elasticflow.runtime.loop import settings
from elasticflow.runtime.loop.gradients import Gradients
from elasticflow.runtime.loop.run import Run
from elasticflow.runtime.loop.script_checks import ScriptChecks
from elasticflow.runtime.process import stopping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.runtime.measuring.speed import Measures
    from elasticflow.runtime.process.context import Worker

_P = ParamSpec("_P")
_OF_JOB = {"digest", "compare_replicas", "measures"}
_has_joined = False


# A train.py that was written before `join_job`, and edited since, is carried from launch to launch and calls `join`.
def _or_job(join: Callable[_P, Run]) -> Callable[_P, Run]:
    """Have *join* take arguments of `join_job`, too, without showing them in its signature."""

    @wraps(join)
    def joined(*args: _P.args, **kwargs: _P.kwargs) -> Run:
        if kwargs.keys() & _OF_JOB:
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
    ignore: Sequence[str] = (),
    virtual_shards: int | None = None,
    log_every: int = 1,
    threads: int | None = None,
    log_level: str = "info",
    gradients: Gradients | None = None,
) -> Run:
    """Return this process as a member of a run, its process group formed and its random generators seeded. Collective.

    Under `elasticflow run` the job file says all that these arguments say, *virtual_shards* excepted: its [script] table
    names this script. Under plain torchrun and plain python the arguments do, and a second start with the same name and
    folder continues where the first one ended.

    Args:
        seed: Seed of the order of the samples and of everything that is drawn at random.
        name: Name of the job; default: the script's file name.
        folder: Where a run that elasticflow did not start writes; default: runs/NAME/by-hand.
        snapshots: Any fsspec URL or path; default: that folder.
        every: When a snapshot is taken, any of these: "500 steps", "10 min", "1 epoch"; always at the end, and before
            this process leaves.
        keep: Number of the newest that stay.
        ignore: State that no step depends on, by the path that a refusal gives it: "self.history".
        virtual_shards: For `Run.gradients`: the same bits at any number of workers up to this one. None: `batches` gives
            each rank its part as a whole, and the script exchanges gradients.
        log_every: A line is logged after so many steps.
        threads: CPU threads; None: the machine's cores shared out among its workers, one with virtual shards.
        log_level: Lines below it are left out of the log.
        gradients: The way in which `Run.gradients` makes them, with virtual shards or without; None: as *virtual_shards* says.

    Raises:
        StateError: it was called before in this process.
        StorageError: where snapshots go cannot be written.
    """
    if gradients is None and virtual_shards is not None:
        gradients = Gradients(virtual_shards=virtual_shards)
    job = name or Path(sys.argv[0]).stem.lstrip("-") or "script"
    own = settings.of_arguments(job, seed, snapshots, every, keep, ignore, log_every, threads)
    own = replace(own, log_level=log_level)
    run = _joined(own, folder, gradients)
    _report_what_ends_the_script()
    process = os.getpid()
    atexit.register(lambda: run.end_if_forgotten() if os.getpid() == process else None)
    return run


def join_job(
    *,
    name: str,
    digest: str,
    folder: str | os.PathLike[str],
    seed: int,
    snapshots: SnapshotSettings,
    gradients: Gradients | None = None,
    compare_replicas: str | None = None,
    measures: Measures | None = None,
    **options: Any,
) -> Run:
    """Return this process as a member of a run; the train.py that the compiler writes calls this. Collective.

    Arguments and errors are those of `join`, but an error does not end the process, which `worker.program` runs. *digest*
    identifies the resolved job file, *snapshots* says *every*, *keep* and *ignore*, too. *compare_replicas* ("1000 steps") says when
    the ranks' replicas are compared bit for bit, besides before each snapshot; *measures*, which speeds the log has, None: steps
    and samples. *options* are log_every, threads and log_level.
    """
    return _joined(
        LoopSettings(name, digest, seed, snapshots, **options), folder, gradients, is_job=True,
        compare_replicas=compare_replicas, measures=measures,
    )  # fmt: skip


def _joined(
    own: LoopSettings,
    folder: str | os.PathLike[str] | None,
    gradients: Gradients | None,
    *,
    is_job: bool = False,
    **options: Any,
) -> Run:
    """Join the process group; the job file of a script goes before its *own* settings."""
    _require_first_call()
    given = settings.told(os.environ)
    chosen = given or own
    if gradients is not None and gradients.virtual_shards is not None and chosen.threads is None:
        chosen = replace(chosen, threads=1)  # sums inside of an operation depend on their number
    policy = chosen.snapshots
    place = Path(folder) if folder is not None else Path("runs") / chosen.job / "by-hand"
    worker = _member(chosen, place, policy, is_job=is_job)
    worker.is_exact = gradients is not None and gradients.virtual_shards is not None
    script = None if is_job else ScriptChecks(worker, gradients, policy.ignore)
    return Run(worker, policy, gradients=gradients, log_every=chosen.log_every, script=script, **options)


def _require_first_call() -> None:
    global _has_joined  # noqa: PLW0603  # one run per process
    if _has_joined:
        raise StateError(
            "elasticflow.join was called a second time in this process, which is a member of a run already",
            "call it once, and hand the run that it returned to what needs it",
        )
    _has_joined = True


def _member(chosen: LoopSettings, place: Path, policy: SnapshotSettings, *, is_job: bool) -> Worker:
    """Return this process as a member of its group; an error ends a script's process."""
    try:
        return life.join(
            chosen.job,
            chosen.digest,
            place,
            policy,
            seed=chosen.seed,
            threads=chosen.threads,
            log_level=chosen.log_level,
            shows_log=is_job,
        )
    except stopping.Leaving:  # asked to before all ranks had met
        if is_job:
            raise
        os._exit(INTERRUPTED)
    except Exception as error:
        if is_job:
            raise
        life.end_by(error)


def _report_what_ends_the_script() -> None:
    """Have an exception that ends the script be told as a worker's, and end the process at once.

    Called behind `init_process_group`, whose hook (torch 2.13, `distributed_c10d._distributed_excepthook`) calls the one
    before with a buffer in place of standard error, and writes it out only if that one returns.
    """
    process, told = os.getpid(), sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if os.getpid() != process or issubclass(kind, KeyboardInterrupt):
            told(kind, error, trace)
        else:
            life.end_by(error)

    sys.excepthook = tell
