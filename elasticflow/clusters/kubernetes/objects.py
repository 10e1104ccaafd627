"""The Kubernetes objects of a run, in each form."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from elasticflow.clusters.kubernetes.pods import quantity
from elasticflow.clusters.yaml_text import Commented, without_comment
from elasticflow.errors import BUDGET_SPENT, INTERRUPTED, NOT_STARTED
from elasticflow.protocol.handshake import TOKEN
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.clusters.kubernetes.pods import PodSpec

OF_JOB = "batch.kubernetes.io/job-name"
OF_RUN = "elasticflow/run"
_QUEUE = "kueue.x-k8s.io/queue-name"
_STORE_MEMORY = "256 MiB"
_STORE_STATE = "/var/lib/elasticflow"  # a volume of the pod: it survives a restart of the container


def config_map(pods: PodSpec, texts: Mapping[str, str]) -> Any:
    """Return the ConfigMap with the job file and the files that it extends; *texts* has them by key."""
    head = _head("v1", "ConfigMap", pods, pods.config_map)
    return Commented(
        "The job file and what it extends. The code is in the image.", {**head, "data": dict(texts)}
    )


def service(pods: PodSpec, name: str, selector: Mapping[str, str]) -> Any:
    """Return the headless Service that gives each pod a name."""
    head = _head("v1", "Service", pods, name)
    not_ready = Commented("Names of pods that are still starting: they look for one another.", value=True)
    spec = {"clusterIP": "None", "publishNotReadyAddresses": not_ready, "selector": dict(selector)}
    return {**head, "spec": spec}


def network_policy(pods: PodSpec) -> Any:
    """Return the NetworkPolicy that keeps everything but the run's own pods from connecting to them."""
    selector = {"matchLabels": {OF_RUN: pods.name}}
    comment = (
        "Workers connect to one another without a password: only pods of this run reach them. Others, such as a scraper of\n"
        "metrics, are let in by kubernetes.patch. It needs a network plugin that enforces policies."
    )
    spec = {
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": dict(selector)}]}],
    }
    return Commented(
        comment, {**_head("networking.k8s.io/v1", "NetworkPolicy", pods, pods.name), "spec": spec}
    )


def rendezvous(pods: PodSpec, name: str) -> list[Any]:
    """Return the objects that serve the store in which the pods meet, if no pod of the run serves it."""
    labels = {**labels_of(pods), "elasticflow/part": "rendezvous"}
    selector = {OF_RUN: pods.name, "elasticflow/part": "rendezvous"}
    port = pods.table.port
    asked = {"cpu": "100m", "memory": quantity(_STORE_MEMORY)}
    container = {
        "name": "rendezvous",
        "image": pods.table.image,
        "command": ["elasticflow", "rendezvous", "serve", "--port", str(port), "--state", _STORE_STATE],
        "env": [each for each in pods.environment() if without_comment(each)["name"] == TOKEN],
        "securityContext": pods.container_security_context(),
        "ports": [{"containerPort": port}],
        "resources": {"requests": asked, "limits": dict(asked)},
        "readinessProbe": {"tcpSocket": {"port": port}},
        "volumeMounts": [{"name": "state", "mountPath": _STORE_STATE}],
    }
    spec: dict[str, Any] = {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "securityContext": pods.security_context(),
    }
    kept = Commented("The store continues where its container is started again, and runs with it.", {})
    spec["volumes"] = [{"name": "state", "emptyDir": kept}]
    if pods.table.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in pods.table.pull_secrets]
    template = {"metadata": {"labels": labels}, "spec": {**spec, "containers": [container]}}
    deployment = {
        **_head("apps/v1", "Deployment", pods, name),
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": selector},
            "template": template,
        },
    }
    address = {"selector": selector, "ports": [{"port": port}]}
    comment = "The store in which the pods meet. It outlives each of them; delete it with the rest."
    return [
        Commented(comment, deployment),
        {**_head("v1", "Service", pods, name), "spec": address},
    ]


def elastic_job(pods: PodSpec) -> Any:
    """Return the Indexed Job, whose number of pods can be changed while it runs."""
    head = _head("batch/v1", "Job", pods, pods.name)
    head["metadata"]["labels"] |= _queue(pods)
    annotations: dict[str, str] = {}
    nodes = pods.job.nodes
    if pods.table.queue is not None:
        annotations["kueue.x-k8s.io/job-completions-equal-parallelism"] = "true"
        if nodes.min < nodes.max:  # Kueue refuses the annotation otherwise
            annotations["kueue.x-k8s.io/job-min-parallelism"] = str(nodes.min)
    if annotations:
        head["metadata"]["annotations"] = {**head["metadata"].get("annotations", {}), **annotations}
    template = pods.template(pods.name, labels_of(pods))
    comment = (
        f"A pod for each node: {nodes.min} to {nodes.max} take part. Another number, while it runs:\n"
        f'{pods.kubectl} patch job {pods.name} -p \'{{"spec":{{"parallelism":N,"completions":N}}}}\''
    )
    return Commented(comment, {**head, "spec": {**_ttl(pods), **_job_spec(pods, template)}})


def job_set(pods: PodSpec, replicated_job: str) -> Any:
    """Return the JobSet, which has a fixed number of pods."""
    head = _head("jobset.x-k8s.io/v1alpha2", "JobSet", pods, pods.name)
    head["metadata"]["labels"] |= _queue(pods)
    return {**head, "spec": {**_ttl(pods), **_job_set_spec(pods, replicated_job)}}


def train_job(pods: PodSpec, replicated_job: str) -> list[Any]:
    """Return the TrainJob, and the TrainingRuntime that defines its pods."""
    runtime = _head("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", pods, pods.name)
    job = _head("trainer.kubeflow.org/v1alpha1", "TrainJob", pods, pods.name)
    job["metadata"]["labels"] |= _queue(pods)
    count = pods.job.nodes.max
    template = {"spec": _job_set_spec(pods, replicated_job, step="trainer")}
    comment = "No policy for torch: elasticflow starts and connects the workers itself."
    policy = Commented(comment, {"numNodes": count})
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": pods.name}
    return [
        {**runtime, "spec": {"mlPolicy": policy, "template": template}},
        {**job, "spec": {"runtimeRef": reference, "trainer": {"numNodes": count}}},
    ]


def labels_of(pods: PodSpec) -> dict[str, str]:
    """Return the labels that every object and pod of the run has."""
    return {OF_RUN: pods.name, **pods.table.labels}


def _head(version: str, kind: str, pods: PodSpec, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name}
    if pods.table.namespace is not None:
        metadata["namespace"] = pods.table.namespace
    metadata["labels"] = labels_of(pods)
    if pods.table.annotations:
        metadata["annotations"] = dict(pods.table.annotations)
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _queue(pods: PodSpec) -> dict[str, str]:
    return {} if pods.table.queue is None else {_QUEUE: pods.table.queue}


def _ttl(pods: PodSpec) -> dict[str, Any]:
    time = pods.table.ttl_after_finished
    return {} if time is None else {"ttlSecondsAfterFinished": math.ceil(parse_duration(time))}


def _job_spec(pods: PodSpec, template: dict[str, Any]) -> dict[str, Any]:
    count = pods.job.nodes.max
    first = (
        "any pod's end is the run's" if pods.serves_store else "the end of the pod that leads is the run's"
    )
    success = {"succeededCount": 1} if pods.serves_store else {"succeededIndexes": "0"}
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": pods.table.backoff_limit,
        "podFailurePolicy": Commented(
            "By elasticflow's exit codes; all others count, up to backoffLimit.",
            {"rules": _failure_rules(pods.container)},
        ),
        "successPolicy": Commented(f"The job is complete with the run: {first}.", {"rules": [success]}),
        "template": template,
    }


def _failure_rules(container: str) -> list[Any]:
    def on_exit(code: list[int]) -> dict[str, Any]:
        return {"containerName": container, "operator": "In", "values": code}

    condition = {"type": "DisruptionTarget", "status": "True"}
    return [
        Commented(
            "Preempted, evicted, drained: another pod takes its place.",
            {"action": "Ignore", "onPodConditions": [condition]},
        ),
        Commented(
            f"{INTERRUPTED}: interrupted; the same command resumes the run, again and again.",
            {"action": "Ignore", "onExitCodes": on_exit([INTERRUPTED])},
        ),
        Commented(
            f"{NOT_STARTED}: the job was refused; {BUDGET_SPENT}: the restart budget is spent. Another try ends alike.",
            {"action": "FailJob", "onExitCodes": on_exit([NOT_STARTED, BUDGET_SPENT])},
        ),
    ]


def _job_set_spec(pods: PodSpec, replicated_job: str, step: str | None = None) -> dict[str, Any]:
    """Return the spec of a JobSet with one job; *step* is Kubeflow Trainer's name for the job."""
    inner = {"spec": _job_spec(pods, pods.template(None, labels_of(pods)))}
    metadata = (
        {}
        if step is None
        else {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": step}}}
    )
    names = Commented(
        "Names of pods that are still starting, too.",
        {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
    )
    rule = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "network": names,
        "failurePolicy": Commented(
            "What elasticflow refuses is not tried again; else the job is made anew, and the run continues.",
            {"maxRestarts": pods.table.backoff_limit, "rules": [rule]},
        ),
        "replicatedJobs": [{"name": replicated_job, "replicas": 1, "template": {**metadata, **inner}}],
    }
