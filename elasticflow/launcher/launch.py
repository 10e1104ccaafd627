"""From a job or a run to a supervised launch: checks what it needs, locks the run, writes the launch folder."""

from __future__ import annotations

import contextlib
import os
import resource
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.origins import Made, origins_now
from elasticflow.errors import GpuMissingError, StorageError, TorchMissingError
from elasticflow.launcher import resume_check
from elasticflow.launcher.agent.waiting_agent import next_launch_id
from elasticflow.launcher.journal.run_lock import locked
from elasticflow.launcher.rendezvous import connections, network
from elasticflow.launcher.rendezvous.leadership import open_store
from elasticflow.launcher.rendezvous.token import given_token, open_port_warning
from elasticflow.launcher.restarts.restart_ledger import RestartLedger
from elasticflow.launcher.supervisor.launch_record import Launch, Request
from elasticflow.launcher.supervisor.supervisor import Supervisor
from elasticflow.protocol import worker_environment
from elasticflow.run_folder import make_runs_folder, snapshot_place
from elasticflow.snapshots.client.writer_process import WriterStart
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import records
from elasticflow.system.installation import untried_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.launcher.journal.run_lock import RunLock
    from elasticflow.launcher.rendezvous.leadership import LaunchStore
    from elasticflow.run_folder import RunFolder


# Logs, and the memory of heartbeats, are larger at once.
_SMALLEST_FILES = 1 << 20


def launch(
    request: Request,
    show: Callable[[dict[str, Any]], None],
    warn: Callable[[str], None],
    tick: Callable[[], None] | None = None,
) -> int:
    """Make the run's next launch, supervise it to its end and return its exit code.

    Args:
        show: Called with each event and metrics line as it is written, and with records that are only shown
            (`protocol/run_files.py`).
        warn: Called with each sentence that a person should read before the launch.
        tick: Called four times a second, by the thread that calls *show*.

    Raises:
        ElasticflowError: the launch cannot begin (`prepare`), or its files cannot be written any more (`Supervisor.run`).
    """
    with prepare(request, warn) as prepared:
        return Supervisor(prepared, show, tick).run()


@contextlib.contextmanager
def prepare(request: Request, warn: Callable[[str], None]) -> Iterator[Launch]:
    """Make the run's next launch; until the context ends, the run is locked and its store can be reached.

    Raises:
        TorchMissingError: torch is not installed.
        GpuMissingError: the job has a worker for each GPU, and torch can use no GPU here.
        StorageError: the snapshot URI cannot be written, or files may not have a megabyte.
        InterfaceError: this machine lacks the interface that the job names.
        TokenError: the run's token cannot be read.
        TokenRefusedError: the store that the job names has another token.
        PortTakenError: the endpoint's port is in use.
        RendezvousError: no one serves the store that the job names.
        LedElsewhereError: another process leads a run of the job there.
        RunLockedError: another launch of the run is alive.
        DriftRefusedError: the job changed in a way that needs consent or would corrupt the run.
        RecordError: a file of the run cannot be used, and no other record replaces it.
        OtherVersionError: only another version of elasticflow can restore the newest snapshot.
    """
    check_torch(warn)
    check_gpus(request.job)
    check_file_sizes(warn)
    plan = plan_job(
        request.job, project_root=request.project_root, job_files=request.files, case=request.case
    )
    make_runs_folder(request.folder)
    catalog, writer = snapshots_of(plan, request.folder, request.project_root)
    network.check(plan.interface)
    token = given_token(plan.token_file, request.project_root)
    for sentence in (open_port_warning(plan, token), connections.warning(plan)):
        if sentence is not None:
            warn(sentence)
    with locked(request.folder) as lock, contextlib.closing(open_store(plan, token)) as store:
        yield _next_launch(request, plan, catalog, writer, store, lock, warn)


def snapshots_of(plan: LaunchPlan, folder: RunFolder, project_root: Path) -> tuple[Catalog, WriterStart]:
    """Return the run's snapshots, and the configuration with which each node's writer finds their place.

    Raises:
        StorageError: the snapshot URI cannot be written.
    """
    uri, prefix = snapshot_place(plan.snapshots.uri, folder, project_root)
    storage = Storage(uri, plan.snapshots.options)
    catalog = Catalog(storage, prefix)
    catalog.check_writable()
    return catalog, WriterStart(uri, folder.run_id, plan.snapshots, prefix)


def _next_launch(
    request: Request,
    plan: LaunchPlan,
    catalog: Catalog,
    writer: WriterStart,
    store: LaunchStore,
    lock: RunLock,
    warn: Callable[[str], None],
) -> Launch:
    """Write the folder of the run's next launch, and its job and sources beside the snapshots; return the launch."""
    folder = request.folder
    with _naming_files(folder):
        folder.cancel.unlink(missing_ok=True)  # a request to the launch before
        _check_files(folder, catalog)
        made, drift = _made(request, plan, catalog, warn)
        edited = None
        if plan.script is None:
            edited = resume_check.edited_entry_point(folder, drift, warn)
        catalog.newest()  # raises OtherVersionError: else each generation would fail by it
    number = (folder.launch_numbers() or [0])[-1] + 1
    launch_folder = folder.launch(number)
    files = launch_files(
        plan,
        request.job,
        launch_folder,
        project_root=request.project_root,
        overrides=request.overrides,
        entry_point=edited,
        origins=made.origins,
        drift=[difference.to_json() for difference in drift],
    )
    materialize(launch_folder, files)
    with _naming_files(folder):
        resume_check.record_job(folder, catalog, plan, made, request.overrides)
        if store.endpoint is not None:
            catalog.mark_launch(made.origins.launch_id)
        ledger = RestartLedger(folder.ledger, lock.require_held)
        take_in_failures(folder, catalog, ledger)
    return Launch(
        request=request,
        plan=plan,
        number=number,
        origins=made.origins,
        catalog=catalog,
        writer=writer,
        store=store,
        lock=lock,
        is_resumed=number > 1 or catalog.newest_generation() > 0,
        is_edited=edited is not None,
        drift=tuple(drift),
        ledger=ledger,
    )


def _made(
    request: Request, plan: LaunchPlan, catalog: Catalog, warn: Callable[[str], None]
) -> tuple[Made, list[Difference]]:
    """Return the record of the launch's job and sources, and their differences from the run's launch before.

    Raises:
        DriftRefusedError: the run must not continue with these differences.
    """
    before = resume_check.made_before(request.folder, catalog, warn, accept_drift=request.accept_drift)
    earlier = None if before is None else before.origins
    origins = origins_now(request.job, request.project_root, plan.job_files, next_launch_id(), earlier)
    made = Made(request.job, origins)
    if before is None:
        return made, []
    return made, resume_check.check_drift(
        request.folder, catalog, before, made, warn, accept_drift=request.accept_drift
    )


def _check_files(folder: RunFolder, catalog: Catalog) -> None:
    """Check that a launch can append to the run's files, before anything is claimed.

    Raises:
        RecordError: a file of the run cannot be written; the message names it and the remedy.
    """
    beside = [catalog.storage.local_path(f"{catalog.prefix}JOB.json")] if catalog.storage.is_local else []
    appended = (folder.events, folder.metrics, folder.metrics_redone, folder.ledger, folder.agent_log())
    records.require_usable(appended, (folder.state, *beside))


@contextlib.contextmanager
def _naming_files(folder: RunFolder) -> Iterator[None]:
    """Raise StorageError, which names the file and a remedy, in place of an OSError."""
    try:
        yield
    except OSError as error:
        path = error.filename or folder.path
        raise StorageError(
            f"{path} cannot be used: {error.strerror or error}",
            "see to it that it can be read and written; then the same command resumes the run",
        ) from error


def check_torch(warn: Callable[[str], None]) -> None:
    """Warn if torch is of a version that was never tried.

    Raises:
        TorchMissingError: torch is not installed.
    """
    if util.find_spec("torch") is None:
        raise TorchMissingError("torch is not installed", "pip install 'elasticflow[torch]'")
    if (sentence := untried_torch(metadata.version("torch"))) is not None:
        warn(sentence)


def check_gpus(job: Job) -> None:
    """Check that there is a GPU for a job that has a worker for each GPU.

    Raises:
        GpuMissingError: torch can use no GPU here.
    """
    if job.nodes.nproc_per_node != "gpu":
        return
    version = metadata.version("torch")
    if "+cpu" in version:
        why = f"torch {version} is built without CUDA"
    elif "+xpu" in version:
        return
    elif worker_environment.hides_gpus(os.environ):
        why = f'CUDA_VISIBLE_DEVICES is "{os.environ["CUDA_VISIBLE_DEVICES"]}"'
    elif "+rocm" not in version and not Path("/dev/nvidiactl").exists():
        why = "no NVIDIA driver is loaded: there is no /dev/nvidiactl"
    else:
        return
    message = f'nodes.nproc_per_node is "gpu", and there is no GPU here: {why}'
    remedy = "--set nodes.nproc_per_node=auto takes GPUs where there are some, else cores; a number says how many workers"
    raise GpuMissingError(message, remedy)


def check_file_sizes(warn: Callable[[str], None]) -> None:
    """Warn if the system limits the files of this process and its children, those in memory included.

    Raises:
        StorageError: they may not have a megabyte.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == resource.RLIM_INFINITY:
        return
    fact, remedy = f"a file may have {soft:,} bytes here, in memory, too", "ulimit -f unlimited"
    if soft < _SMALLEST_FILES:
        raise StorageError(f"{fact}: a run needs a megabyte at least", remedy)
    warn(f'{fact}: a larger state or log would end the run by "File too large"; {remedy}')


def take_in_failures(folder: RunFolder, catalog: Catalog, ledger: RestartLedger) -> None:
    """Add to the run folder's *ledger* the failures that other machines charged to the budget since it was last written."""
    generation = resume_check.last_state(folder).get("generation")
    known = generation if isinstance(generation, int) else 0
    ledger.take_in(catalog.generations(after=known).values())
