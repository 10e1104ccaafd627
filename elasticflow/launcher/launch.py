"""From a job or a run to a supervised launch: folder, lock, drift, snapshot place."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import time
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.launch_folder import (
    TRAIN_PY,
    LaunchRecord,
    digest_as_written,
    job_record,
    launch_files,
    materialize,
    newest_record,
    record_from,
)
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.drift import compare_made, lines_of, weighed_anew
from elasticflow.compiler.provenance.origins import JOB_JSON, Made, origins_now
from elasticflow.errors import (
    DriftRefusedError,
    GpuMissingError,
    RecordError,
    StorageError,
    TorchMissingError,
)
from elasticflow.launcher.agent.waiting_agent import next_launch_id
from elasticflow.launcher.journal.run_lock import locked
from elasticflow.launcher.rendezvous import connections, network
from elasticflow.launcher.rendezvous.leadership import open_store
from elasticflow.launcher.rendezvous.token import given_token, open_port_warning
from elasticflow.launcher.restarts.failure_classes import FAILURES
from elasticflow.launcher.restarts.restart_ledger import RestartLedger
from elasticflow.launcher.supervisor.launch_record import Launch, Request
from elasticflow.launcher.supervisor.supervisor import Supervisor
from elasticflow.protocol import worker_environment
from elasticflow.run_folder import snapshot_place
from elasticflow.snapshots.format.writer_config import WriterStart
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import records, torch_versions
from elasticflow.system.records import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.launcher.journal.run_lock import RunLock
    from elasticflow.launcher.rendezvous.leadership import LaunchStore
    from elasticflow.run_folder import RunFolder


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
        warn: Called with each sentence a person should read before the launch.
        tick: Called four times a second, by the thread that calls *show*.

    Raises:
        ElasticflowError: the launch cannot begin (`prepare`), or its files cannot be written any more (`Supervisor.run`).
    """
    with prepare(request, warn) as prepared:
        return Supervisor(prepared, show, tick).run()


@contextlib.contextmanager
def prepare(request: Request, warn: Callable[[str], None]) -> Iterator[Launch]:
    """Make the run's next launch; until the context ends its run is locked, and its store can be reached.

    Raises:
        TorchMissingError: there is no torch.
        GpuMissingError: the job has a worker for each GPU, and there is none here.
        StorageError: the snapshot URI cannot be written.
        InterfaceError: this machine has no such interface as the job names.
        TokenError: the run's token cannot be had.
        TokenRefusedError: the store that the job names has another token.
        PortTakenError: the endpoint's port is in use.
        RendezvousError: no one serves the store that the job names.
        LedElsewhereError: another process leads a run of the job there.
        RunLockedError: the run is running.
        DriftRefusedError: the job changed in a way that needs consent or would corrupt the run.
        RecordError: a file of the run cannot be used, and no other record replaces it.
    """
    check_torch(warn)
    check_gpus(request.job)
    plan = plan_job(
        request.job, project_root=request.project_root, job_files=request.files, case=request.case
    )
    catalog, writer = snapshots_of(plan, request.folder, request.project_root)
    network.check(plan.interface)
    token = given_token(plan.token_file, request.project_root)
    for sentence in (open_port_warning(plan, token), connections.warning(plan)):
        if sentence is not None:
            warn(sentence)
    with locked(request.folder) as lock, contextlib.closing(open_store(plan, token)) as store:
        yield _next_launch(request, plan, catalog, writer, store, lock, warn)


def snapshots_of(plan: LaunchPlan, folder: RunFolder, project_root: Path) -> tuple[Catalog, WriterStart]:
    """Return the run's snapshots, and what a node's writer needs to know of their place.

    Raises:
        StorageError: the snapshot URI cannot be written.
    """
    uri, prefix = snapshot_place(plan.snapshots.uri, folder, project_root)
    storage = Storage(uri, plan.snapshots.options)
    storage.check_writable()
    return Catalog(storage, prefix), WriterStart(uri, folder.run_id, plan.snapshots, prefix)


def _next_launch(
    request: Request,
    plan: LaunchPlan,
    catalog: Catalog,
    writer: WriterStart,
    store: LaunchStore,
    lock: RunLock,
    warn: Callable[[str], None],
) -> Launch:
    """Return the run's next launch, whose folder is written; what it is made from lies beside the snapshots, too."""
    folder = request.folder
    with _naming_files(folder):
        folder.cancel.unlink(missing_ok=True)  # of the launch before
        _check_files(folder, catalog)
        made, drift = _made(request, plan, catalog, warn)
        edited = None
        if plan.script is None:
            edited = edited_entry_point(folder, drift, warn)
        catalog.newest()  # one that can be read, or none: else no generation would come to a step
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
        record_job(folder, catalog, plan, made, request.overrides)
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
    """Return the record of the launch's sources, and its differences from the run's launch before.

    Raises:
        DriftRefusedError: the run must not continue with these differences.
    """
    before = made_before(request.folder, catalog, warn, accept_drift=request.accept_drift)
    earlier = None if before is None else before.origins
    origins = origins_now(request.job, request.project_root, plan.job_files, next_launch_id(), earlier)
    made = Made(request.job, origins)
    if before is None:
        return made, []
    return made, check_drift(request.folder, catalog, before, made, warn, accept_drift=request.accept_drift)


def _check_files(folder: RunFolder, catalog: Catalog) -> None:
    """Check that a launch can write on in the run's files; before anything is claimed.

    Raises:
        RecordError: a file of the run cannot be written; names it and the remedy.
    """
    beside = [catalog.storage.local_path(f"{catalog.prefix}JOB.json")] if catalog.storage.is_local else []
    appended = (folder.events, folder.metrics, folder.metrics_redone, folder.ledger, folder.agent_log())
    records.require_usable(appended, (folder.state, *beside))


@contextlib.contextmanager
def _naming_files(folder: RunFolder) -> Iterator[None]:
    """Name the file that fails before anything has begun, and say what to do."""
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
    if (sentence := torch_versions.untried(metadata.version("torch"))) is not None:
        warn(sentence)


def check_gpus(job: Job) -> None:
    """Check that a job which has a worker for each GPU finds one.

    Raises:
        GpuMissingError: torch can use none here.
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


_REMEDIES = {
    "corrupting": "start a new run of the changed job: elasticflow run",
    "trajectory": "undo the change, or say that you want it: --accept-drift",
}
# The function that the last line of a generated train.py calls, now and in launches of earlier versions.
_MAIN_CALLS = {"program", "run"}


def made_before(
    folder: RunFolder, catalog: Catalog, warn: Callable[[str], None], *, accept_drift: bool = False
) -> Made | None:
    """Return the sources of the run's newest launch, made on any machine; None for a new run.

    JOB.json beside the snapshots tells of the newest launch on any machine; if that launch was made on this machine, its
    own folder tells more. Where the newest record is damaged, the next best record is taken, and *warn* is told.

    Raises:
        RecordError: no record of the run can be read, and drift is not accepted.
        OSError: the snapshot URI does not answer.
    """
    content = catalog.inspect_job_record()
    path = f"{catalog.storage.uri.rstrip('/')}/{catalog.prefix}JOB.json"
    beside = record_from(content, path) if isinstance(content, dict) else content
    newest, damages = newest_record(folder)
    if isinstance(beside, Damage):
        damages.insert(0, beside)
    elif beside is not None and not (newest and _is_of_one_launch(folder, newest, beside.made)):
        newest = beside if newest is None or beside.made.origins.launch_id else newest
    if newest is None and damages and not accept_drift:
        raise RecordError(
            f"nothing tells what run {folder.run_id} was made from: {'; '.join(map(str, damages))}",
            "put one of these files back; or, if the job is as it was, continue without comparing: --accept-drift",
        )
    instead = f"{newest.place} is used instead" if newest else "nothing is compared, as accepted"
    for damage in damages:
        warn(f"{damage}; {instead}")
    return None if newest is None else newest.made


def _is_of_one_launch(folder: RunFolder, record: LaunchRecord, beside: Made) -> bool:
    """Return whether *record*, the newest whole one of the run folder, tells of the launch that JOB.json tells of."""
    newest = folder.launch(folder.launch_numbers()[-1]) / JOB_JSON
    is_newest = record.place == str(newest)
    return is_newest and record.made.origins.launch_id == beside.origins.launch_id


def record_job(
    folder: RunFolder, catalog: Catalog, plan: LaunchPlan, made: Made, overrides: Sequence[str] = ()
) -> None:
    """Record the launch's sources beside the snapshots, for launches on machines that have no run folder."""
    before = catalog.read_job_record() or {}
    now = time.time()
    dates = {"created": before.get("created", now), "updated": now}
    catalog.write_job_record({"run_id": folder.run_id, **job_record(plan, made, overrides), **dates})


def take_in_failures(folder: RunFolder, catalog: Catalog, ledger: RestartLedger) -> None:
    """Have the run folder's *ledger* hold what other machines charged to the budget since it was last written."""
    generation = _last_state(folder).get("generation")
    known = generation if isinstance(generation, int) else 0
    ledger.take_in(catalog.generations(after=known).values())


def _last_state(folder: RunFolder) -> dict[str, Any]:
    """Return state.json as the last launch here left it; empty if there was none, or if it cannot be read."""
    state = records.read(folder.state)
    return state if isinstance(state, dict) else {}


def check_drift(
    folder: RunFolder,
    catalog: Catalog,
    before: Made,
    now: Made,
    warn: Callable[[str], None],
    *,
    accept_drift: bool,
) -> list[Difference]:
    """Return the differences between the run's sources and those it is to continue with; *warn* gets a table of them.

    Raises:
        DriftRefusedError: some difference corrupts, or changes the trajectory without consent.
        OSError: the snapshot URI does not answer.
    """
    differences = compare_made(before, now, after_user_error=_expects_changed_code(folder))
    if any(each.weight != "harmless" for each in differences):
        # A script may have checkpoints of its own; a snapshot that is damaged or set aside may be mended.
        is_kept = now.job.script is not None or any(catalog.scan()) or bool(catalog.quarantined())
        differences = weighed_anew(differences, has_snapshots=is_kept)
    weights = {difference.weight for difference in differences}
    lines = list(lines_of(differences))
    for weight, remedy in _REMEDIES.items():
        if weight in weights and not (weight == "trajectory" and accept_drift):
            title = f"run {folder.run_id} cannot continue with what changed since its last launch:"
            raise DriftRefusedError("\n".join([title, *lines]), remedy)
    if differences:
        consent = ", as accepted" if "trajectory" in weights else ""
        warn(
            "\n".join(
                [f"run {folder.run_id} continues with what changed since its last launch{consent}:", *lines]
            )
        )
    return differences


def _expects_changed_code(folder: RunFolder) -> bool:
    """Return whether the run's last launch ended with a failure after which the job's own code is mended."""
    verdict = _last_state(folder).get("verdict")  # none: a first launch, or one that was killed
    if not isinstance(verdict, dict):
        return False
    return any(name == verdict.get("class") and row.excuses_drift for name, row in FAILURES.items())


def edited_entry_point(
    folder: RunFolder, differences: Sequence[Difference], warn: Callable[[str], None]
) -> str | None:
    """Return the newest launch's train.py if it was edited by hand and still fits the job.

    Where it is not known what was written, the file counts as edited: training continues with what it has trained with.

    Raises:
        RecordError: the file is no program that trains, perhaps by mistake.
    """
    numbers = folder.launch_numbers()
    if not numbers:
        return None
    before = folder.launch(numbers[-1])
    path = before / TRAIN_PY
    text = records.read_text(path)
    if text is None:
        warn(f"{path} is absent; it is made anew from the job")
        return None
    if not isinstance(text, Damage):
        written = digest_as_written(before)
        if hashlib.sha256(text.encode()).hexdigest() == written:
            return None
        if isinstance(written, Damage):
            warn(f"{written}; whether train.py was edited is not known, so it is used as it is")
    problem = text.why if isinstance(text, Damage) else _problem_of(text)
    if problem is not None:
        raise RecordError(
            f"{path} {problem}",
            "mend it; or remove it, and the same command makes it anew from the job",
        )
    assert isinstance(text, str)
    if any(difference.is_of_the_job for difference in differences):
        warn(f"the job changed, so train.py is made anew; the edited one stays in {before}")
        return None
    return text


def _problem_of(text: str) -> str | None:
    """Return why *text* is no program that trains, as the rest of a sentence; None if it may be one."""
    try:
        program = ast.parse(text)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        return f"is no Python: {getattr(error, 'msg', error)} in line {getattr(error, 'lineno', None) or 1}"
    except RecursionError:
        return "is no Python: nested too deeply"
    calls = (node.func for node in ast.walk(program) if isinstance(node, ast.Call))
    if any(getattr(call, "attr", getattr(call, "id", "")) in _MAIN_CALLS for call in calls):
        return None
    return "does not call worker.program, so it trains nothing"
