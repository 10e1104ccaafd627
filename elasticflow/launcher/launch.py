"""From a job or a run to a supervised launch: folder, lock, drift, snapshot place (floor 3)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import dataclass
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.drift import Difference, compare
from elasticflow.compiler.materialize import (
    TRAIN_PY,
    entry_point_is_edited,
    materialize,
    read_job,
)
from elasticflow.compiler.plan import LaunchPlan, plan_job
from elasticflow.errors import (
    DriftRefusedError,
    RunLockedError,
    StorageError,
    TorchMissingError,
)
from elasticflow.launcher.agent_process import listen
from elasticflow.launcher.supervisor import Launch, Supervisor
from elasticflow.run_folder import path_from_root
from elasticflow.snapshots.catalog import Catalog
from elasticflow.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from elasticflow.run_folder import RunFolder
    from elasticflow.spec.job import Job

TESTED_TORCH = "2.13"


@dataclass(frozen=True)
class Request:
    """What is to be launched.

    Attributes:
        job: The resolved job.
        files: The job file and what it extends.
        overrides: `--set` values in force.
        project_root: Folder the job's paths are relative to.
        folder: The run folder; it need not exist.
        accept_drift: Differences that change the trajectory are wanted.
    """

    job: Job
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    project_root: Path
    folder: RunFolder
    accept_drift: bool = False


def launch(request: Request, show: Callable[[dict[str, Any]], None], warn: Callable[[str], None]) -> int:
    """Make the run's next launch, supervise it to its end and return its exit code.

    Args:
        request: What is to be launched.
        show: Called with each event and metrics line as it is written.
        warn: Called with each sentence a person should read before the launch.

    Raises:
        TorchMissingError: there is no torch.
        StorageError: the snapshot URI cannot be written.
        PortTakenError: the endpoint's port is in use.
        RunLockedError: the run is running.
        DriftRefusedError: the job changed in a way that needs consent or would corrupt the run.
    """
    check_torch(warn)
    folder = request.folder
    plan = plan_job(request.job, project_root=request.project_root, job_files=request.files)
    uri, prefix = snapshot_place(plan, folder, request.project_root)
    storage = Storage(uri, plan.snapshots.options)
    storage.check_writable()
    with locked(folder), contextlib.closing(listen(*_endpoint(plan))) as listener:
        number = (folder.launch_numbers() or [0])[-1] + 1
        catalog = Catalog(storage, prefix)
        edited = _check_drift(request, number - 1, plan, warn) if number > 1 else None
        materialize(
            plan,
            request.job,
            folder.launch(number),
            project_root=request.project_root,
            overrides=request.overrides,
            entry_point=edited,
        )
        made = Launch(
            plan=plan,
            folder=folder,
            number=number,
            project_root=request.project_root,
            catalog=catalog,
            writer=writer_config(plan, uri, prefix, folder.run_id),
            listener=listener,
            is_resumed=number > 1 or catalog.newest_generation() > 0,
            is_edited=edited is not None,
        )
        return Supervisor(made, show).run()


def check_torch(warn: Callable[[str], None]) -> None:
    """Say so if torch is of a version never tried.

    Raises:
        TorchMissingError: it is not installed.
    """
    if util.find_spec("torch") is None:
        raise TorchMissingError("torch is not installed", "pip install 'elasticflow[torch]'")
    found = metadata.version("torch")
    if not found.startswith(f"{TESTED_TORCH}."):
        warn(f"torch {found} has not been tried with this version of elasticflow; {TESTED_TORCH} has")


def snapshot_place(plan: LaunchPlan, folder: RunFolder, project_root: Path) -> tuple[str, str]:
    """Return the URI of the run's snapshots and the run's prefix under it.

    Without `snapshots.uri` the run folder itself is the place; a relative path starts at the project root.
    """
    uri = plan.snapshots.uri
    if uri is None:
        return str(folder.path), ""
    relative = path_from_root(uri)
    return str(project_root / relative) if relative is not None else uri, f"{folder.run_id}/"


def writer_config(plan: LaunchPlan, uri: str, prefix: str, run_id: str) -> dict[str, Any]:
    """Return the configuration of the snapshot writer (`snapshots/writer.py`)."""
    snapshots = plan.snapshots
    return {
        "uri": uri,
        "options": snapshots.options,
        "prefix": prefix,
        "run_id": run_id,
        "keep_last": snapshots.keep_last,
        "keep_best": snapshots.keep_best,
        "keep_every": snapshots.keep_every,
        "best_mode": snapshots.best_mode,
    }


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock; the kernel gives it back when this process ends, however it ends.

    Raises:
        RunLockedError: another process holds it.
        StorageError: the run folder cannot be made.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(
            f"cannot make the run folder {folder.path}: {error.strerror}",
            "check that the project is writable",
        ) from error
    try:
        if not _take(descriptor):
            holder = os.pread(descriptor, 32, 0).decode() or "unknown"
            raise RunLockedError(
                f"run {folder.run_id} is running (process {holder})",
                f"wait for it, or stop it: kill -TERM {holder}",
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Return whether the lock was had; `status` holds it for an instant to see whether anybody does."""
    for _ in range(5):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False


def _endpoint(plan: LaunchPlan) -> tuple[str, int]:
    if plan.endpoint is None:
        return "127.0.0.1", 0
    return "", int(plan.endpoint.rpartition(":")[2])


def _check_drift(
    request: Request, previous: int, plan: LaunchPlan, warn: Callable[[str], None]
) -> str | None:
    """Compare with the run's previous launch; return its train.py if that was edited and still fits.

    Raises:
        DriftRefusedError: some difference corrupts, or changes the trajectory without consent.
    """
    before = request.folder.launch(previous)
    differences = compare(read_job(before), request.job)
    for weight, remedy in (
        ("corrupting", "start a new run of the changed job: elasticflow run"),
        ("trajectory", "undo the change, or say that you want it: --accept-drift"),
    ):
        found = [d for d in differences if d.weight == weight]
        if found and not (weight == "trajectory" and request.accept_drift):
            raise DriftRefusedError(_told(request.folder, found, weight), remedy)
    for difference in differences:
        warn(f"{difference.key} was {difference.old!r}, is now {difference.new!r} ({difference.weight})")
    if not entry_point_is_edited(before):
        return None
    if differences:
        warn(f"the job changed, so train.py is made anew; the edited one stays in {before}")
        return None
    return (before / TRAIN_PY).read_text(encoding="utf-8")


def _told(folder: RunFolder, differences: Sequence[Difference], weight: str) -> str:
    what = "would corrupt it" if weight == "corrupting" else "changes its trajectory"
    lines = [f"  {d.key}: was {d.old!r}, is now {d.new!r}" for d in differences]
    return "\n".join([f"run {folder.run_id} cannot go on: the job changed in a way that {what}", *lines])
