"""Renders a job file as a manifest for `kubectl apply`."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.clusters.kubernetes import objects
from elasticflow.clusters.kubernetes.patch import patched
from elasticflow.clusters.kubernetes.pods import PodSpec
from elasticflow.clusters.yaml_text import Commented, yaml_documents
from elasticflow.errors import RenderError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.kubernetes import KubernetesTable

Form = Literal["job", "jobset", "trainjob"]
FORMS: tuple[Form, ...] = ("job", "jobset", "trainjob")
_CONTAINER = {"job": "trainer", "jobset": "trainer", "trainjob": "node"}  # Kubeflow Trainer's own name
_REPLICATED_JOB = "node"
_STORE = "rendezvous"
# A pod's name, including its index, is a DNS label of at most 63 letters. The longest name is NAME-node-0-65535.
_MOST_LETTERS = 63 - len(f"-{_REPLICATED_JOB}-0-65535")
_DIGITS = 6  # of the id's digest, which tells names apart that are the same in small letters
_MOST_BYTES = 1_000_000  # for the texts of a ConfigMap, which has 1 MiB in all


def render_kubernetes(
    loaded: LoadedJob, overrides: Sequence[str] = (), form: Form | None = None, run_id: str | None = None
) -> str:
    """Return the manifest that runs a job.

    Args:
        loaded: The job, without errors.
        form: Kind of object to render; None: the job's own choice.
        run_id: The run's id; None: the job's name.

    Raises:
        RenderError: the job cannot run in pods unchanged.
    """
    job, table = loaded.job, _table_of(loaded.job)
    form = form or table.form
    run_id = run_id or job.job.name
    name = _object_name(job.job.name, run_id)
    _check(job, table, form)
    texts = _texts(loaded)
    endpoint = _endpoint(job, table, name, form)
    pods = PodSpec(
        job=job,
        table=table,
        name=name,
        run_id=run_id,
        endpoint=endpoint,
        job_file=next(iter(texts)),
        files=_keys(texts),
        overrides=_overrides(job, table, overrides, endpoint),
        case=loaded.case,
        container=_CONTAINER[form],
        serves_store=table.rendezvous_pod or job.torchrun.is_store_outside,
    )
    case = () if loaded.case is None else ("--case", loaded.case)
    words = [pods.job_file, *case, *(word for override in overrides for word in ("--set", override))]
    head = f"{job.job.name}, run {run_id}: made by `elasticflow submit kubernetes {shlex.join(words)}`."
    config = objects.config_map(pods, {pods.files[path]: text for path, text in texts.items()})
    first = Commented(f"{head}\n{config.comment}", config.value)
    documents = [first, *_objects(pods, form)]
    if table.patch is not None:
        documents = patched(documents, loaded.project_root / table.patch)
    return yaml_documents(*documents)


def _objects(pods: PodSpec, form: Form) -> list[Any]:
    before = [objects.network_policy(pods)] if pods.table.network_policy else []
    before += objects.rendezvous(pods, f"{pods.name}-{_STORE}") if pods.table.rendezvous_pod else []
    match form:
        case "job":
            names = objects.service(pods, pods.name, {objects.OF_JOB: pods.name})
            return [*before, names, objects.elastic_job(pods)]
        case "jobset":
            return [*before, objects.job_set(pods, _REPLICATED_JOB)]
        case "trainjob":
            return [*before, *objects.train_job(pods, _REPLICATED_JOB)]


def _table_of(job: Job) -> KubernetesTable:
    if job.kubernetes is None:
        raise RenderError(
            "the job has no [kubernetes]: which image the pods have is not known",
            'add [kubernetes] with image = "registry/name:tag", or --set kubernetes.image=registry/name:tag',
        )
    return job.kubernetes


def _check(job: Job, table: KubernetesTable, form: Form) -> None:
    """Check the other requirements of pods."""
    if not table.is_kept(job.snapshots.uri):
        place = "in the run folder" if job.snapshots.uri is None else f"at {job.snapshots.uri}"
        raise RenderError(
            f"snapshots.uri: snapshots would be kept {place}, which goes with the pod",
            'set snapshots.uri to an object store ("s3://bucket/name"), or to a path below the path of a volume with a claim '
            "that all pods may write to",
        )
    if form == "trainjob" and table.ttl_after_finished is not None:
        raise RenderError(
            "kubernetes.ttl_after_finished: Kubeflow Trainer deletes no TrainJob that has ended",
            "leave it out, or render a Job or a JobSet: --form",
        )
    gpus = table.resources.gpu
    if job.nodes.nproc_per_node == "gpu" and not gpus:
        raise RenderError(
            'nodes.nproc_per_node is "gpu", and kubernetes.resources.gpu gives the pods none',
            "set kubernetes.resources.gpu to how many a node has",
        )
    if job.nodes.nproc_per_node == "auto" and not gpus:
        raise RenderError(
            'nodes.nproc_per_node is "auto": without GPUs a worker for each core of the machine, not of the pod',
            "set nodes.nproc_per_node to a number, or kubernetes.resources.gpu",
        )
    if isinstance(job.nodes.nproc_per_node, int) and gpus and gpus < job.nodes.nproc_per_node:
        raise RenderError(
            f"kubernetes.resources.gpu gives a pod {gpus}, and nodes.nproc_per_node has {job.nodes.nproc_per_node} workers",
            "give a pod as many GPUs as it has workers",
        )


def _object_name(job: str, run_id: str) -> str:
    """Return the name of the run's objects; runs of a job whose ids differ in case or signs alone have different names."""
    name = _plain(job if run_id == job else f"{job}-{run_id}")
    if run_id not in {job, _plain(run_id)}:
        name += f"-{hashlib.sha256(run_id.encode()).hexdigest()[:_DIGITS]}"
    if not name[:1].isalpha():  # a Service's name begins with a letter
        name = f"run-{name}"
    if len(name) > _MOST_LETTERS:
        raise RenderError(
            f"the run's objects would be called {name}, and a name has at most {_MOST_LETTERS} letters",
            "give the job or the run a shorter name: --run-id",
        )
    return name


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")


def _endpoint(job: Job, table: KubernetesTable, name: str, form: Form) -> str:
    """Return the address at which the pods meet: an outside store, the store's own pod, or the pod with index 0."""
    if table.rendezvous_pod:
        return f"{name}-{_STORE}:{table.port}"
    if job.torchrun.is_store_outside:
        assert job.nodes.endpoint is not None  # a job without an endpoint was refused
        return job.nodes.endpoint
    first = f"{name}-0" if form == "job" else f"{name}-{_REPLICATED_JOB}-0-0"
    return f"{first}.{name}:{table.port}"


def _overrides(job: Job, table: KubernetesTable, overrides: Sequence[str], endpoint: str) -> list[str]:
    """Return the `--set` values of the pods' command."""
    given = [text for text in overrides if not re.match(r"\s*(kubernetes|nodes\.endpoint)\b", text)]
    if endpoint != job.nodes.endpoint or len(given) < len(overrides):
        given.append(f"nodes.endpoint={endpoint}")
    if table.rendezvous_pod:
        given.append("torchrun.rdzv_conf.is_host=false")
    return given


def _texts(loaded: LoadedJob) -> dict[str, str]:
    """Return the texts of the job file and of the files it extends, by path relative to the project."""
    root = loaded.project_root.resolve()
    texts = {_relative(path, root): path.read_text(encoding="utf-8") for path in loaded.files}
    if (size := sum(len(text.encode()) for text in texts.values())) > _MOST_BYTES:
        raise RenderError(
            f"the job file and what it extends have {size:,} bytes, and a ConfigMap at most {_MOST_BYTES:,}",
            "put large values into files of the image",
        )
    return texts


def _relative(path: Path, root: Path) -> str:
    real = path.resolve()
    if not real.is_relative_to(root):
        raise RenderError(
            f"{path} is not in the project's folder {root}, which is what the pods have",
            "copy it into the project, and extend the copy",
        )
    return real.relative_to(root).as_posix()


def _keys(paths: Iterable[str]) -> dict[str, str]:
    """Return a unique key in the ConfigMap for each path; keys have no slash."""
    keys: dict[str, str] = {}
    for path in paths:
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", path.replace("/", "_"))
        again = (f"{plain}-{number}" for number in itertools.count(2))
        keys[path] = plain if plain not in keys.values() else next(k for k in again if k not in keys.values())
    return keys
