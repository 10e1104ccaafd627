"""The pods of a job: one for each node, all with the same command."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.clusters.yaml_text import Commented
from elasticflow.protocol.handshake import TOKEN
from elasticflow.system.units import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.kubernetes import KubernetesTable, ResourcesTable

# Seconds for the last snapshot and the sinks: from the deadline of the workers to the exit of their supervisor.
_ENDING_S = 30
# The job controller sets it in every pod of an Indexed Job; Kubernetes expands it in a command.
_INDEX = "$(JOB_COMPLETION_INDEX)"


@dataclass(frozen=True)
class PodSpec:
    """Facts from which the pods of a run are made.

    Attributes:
        endpoint: host:port at which the pods meet.
        job_file: Path of the job file, relative to the project's folder.
        files: Keys in the ConfigMap of the job file and the files that it extends, by path relative to the project's
            folder.
        overrides: `--set` values for the command in the pods.
        case: Case of the job file's [matrix] that the job is.
        serves_store: True: a separate pod serves the store at the endpoint; False: the pod with index 0 does.
    """

    job: Job
    table: KubernetesTable
    name: str
    run_id: str
    endpoint: str
    job_file: str
    files: dict[str, str]
    overrides: Sequence[str]
    case: str | None
    container: str
    serves_store: bool

    @property
    def config_map(self) -> str:
        """Name of the ConfigMap with the job file."""
        return f"{self.name}-job"

    @property
    def kubectl(self) -> str:
        """Command prefix of kubectl for the run's namespace."""
        return "kubectl" if self.table.namespace is None else f"kubectl -n {self.table.namespace}"

    def command(self) -> list[str]:
        """Return the command, which is the same in every pod: it leads the run or takes part in it."""
        words = ["elasticflow", "run", self.job_file, "--run-id", self.run_id, "--join", self.endpoint]
        if self.case is not None:
            words += ["--case", self.case]
        for override in self.overrides:
            words += ["--set", override]
        words = [_literal(word) for word in words]
        return words if self.serves_store else [*words, "--node-rank", _INDEX]

    def template(self, subdomain: str | None, labels: dict[str, str]) -> dict[str, Any]:
        """Return the pod template.

        Args:
            subdomain: Name of the headless Service; None: the controller sets it.
        """
        table = self.table
        spec: dict[str, Any] = {} if subdomain is None else {"subdomain": subdomain}
        spec |= {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_s(),
            "enableServiceLinks": False,
            "securityContext": self.security_context(),
        }
        if table.service_account is None:
            spec["automountServiceAccountToken"] = False
        else:
            spec["serviceAccountName"] = table.service_account
        if table.priority_class is not None:
            spec["priorityClassName"] = table.priority_class
        if table.pull_secrets:
            spec["imagePullSecrets"] = [{"name": name} for name in table.pull_secrets]
        if table.node_selector:
            spec["nodeSelector"] = dict(table.node_selector)
        if table.tolerations:
            spec["tolerations"] = [taint.model_dump(exclude_none=True) for taint in table.tolerations]
        spec["containers"] = [self._container()]
        spec["volumes"] = list(self._volumes())
        metadata = {"labels": labels, "annotations": dict(table.annotations)}
        return {"metadata": {key: value for key, value in metadata.items() if value}, "spec": spec}

    def grace_s(self) -> int:
        """Return the seconds between SIGTERM and SIGKILL."""
        if self.table.grace is not None:
            return math.ceil(parse_duration(self.table.grace))
        return math.ceil(parse_duration(self.job.snapshots.grace)) + _ENDING_S

    def security_context(self) -> Any:
        """Return the security context that the restricted Pod Security profile of a namespace requires of a pod."""
        context: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
        user = self.table.user
        if user == 0:
            return {"runAsUser": 0, **context}
        context = {"runAsNonRoot": True, **context}
        if user is None:
            return Commented("The image's user: a number other than 0, or set kubernetes.user.", context)
        # Large volumes are not traversed at each start.
        groups = {"fsGroup": user, "fsGroupChangePolicy": "OnRootMismatch"}
        return {"runAsUser": user, "runAsGroup": user, **groups, **context}

    def container_security_context(self) -> dict[str, Any]:
        """Return the security context that the restricted Pod Security profile of a namespace requires of a container."""
        context: dict[str, Any] = {"allowPrivilegeEscalation": False}
        # Without its capabilities, root could not write to other users' folders.
        return context if self.table.user == 0 else {**context, "capabilities": {"drop": ["ALL"]}}

    def _container(self) -> dict[str, Any]:
        table = self.table
        container: dict[str, Any] = {
            "name": self.container,
            "image": table.image,
            "workingDir": table.workdir,
            "command": self.command(),
            "securityContext": self.container_security_context(),
        }
        container["env"] = self.environment()
        if resources := resources_of(table.resources):
            container["resources"] = resources
        container["volumeMounts"] = list(self._mounts())
        if table.pre_stop:
            command = [_literal(word) for word in table.pre_stop]
            container["lifecycle"] = {"preStop": {"exec": {"command": command}}}
        # The pod's status gets the last lines of the log, where `kubectl describe` shows them.
        container["terminationMessagePolicy"] = "FallbackToLogsOnError"
        return container

    def environment(self) -> list[Any]:
        """Return the environment variables of each pod."""
        table = self.table
        plain = [{"name": name, "value": _literal(value)} for name, value in table.env.items()]
        return [*plain, *(_of_secret(name, place) for name, place in table.secrets.items()), *self.token()]

    def token(self) -> list[Any]:
        """Return the variable with the run's token, unless the job gives its place, or the run's only pod makes it."""
        nodes = self.job.nodes
        # The store's pod has no token file.
        is_in_file = nodes.token_file is not None and not self.table.rendezvous_pod
        is_alone = nodes.max == 1 and not self.serves_store
        if TOKEN in self.table.secrets or is_in_file or is_alone:
            return []
        name = f"{self.name}-token"
        comment = (
            "Whoever knows this token can take part in the run. The pods wait for the Secret:\n"
            f"openssl rand -hex 32 | {self.kubectl} create secret generic {name} --from-file=token=/dev/stdin"
        )
        return [Commented(comment, _of_secret(TOKEN, f"{name}/token"))]

    def _mounts(self) -> list[dict[str, Any]]:
        root = self.table.workdir.rstrip("/")
        mounts: list[dict[str, Any]] = [
            {"name": "job", "mountPath": f"{root}/{path}", "subPath": key, "readOnly": True}
            for path, key in self.files.items()
        ]
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108  # a path in the pods
        for name, volume in self.table.volumes.items():
            mount = {"name": name, "mountPath": volume.path}
            mounts.append(mount | ({"readOnly": True} if volume.read_only or volume.secret else {}))
        return mounts

    def _volumes(self) -> list[dict[str, Any]]:
        shm: dict[str, Any] = {"medium": "Memory"}
        if self.table.shared_memory is not None:
            shm["sizeLimit"] = quantity(self.table.shared_memory)
        volumes: list[dict[str, Any]] = [
            {"name": "job", "configMap": {"name": self.config_map}},
            {"name": "shm", "emptyDir": shm},
        ]
        for name, volume in self.table.volumes.items():
            if volume.claim is not None:
                claim: dict[str, Any] = {"claimName": volume.claim}
                claim |= {"readOnly": True} if volume.read_only else {}
                volumes.append({"name": name, "persistentVolumeClaim": claim})
            elif volume.secret is not None:
                volumes.append({"name": name, "secret": {"secretName": volume.secret}})
            else:
                limit = {} if volume.size is None else {"sizeLimit": quantity(volume.size)}
                volumes.append({"name": name, "emptyDir": limit})
        return volumes


def _of_secret(name: str, place: str) -> dict[str, Any]:
    secret, _, key = place.partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def resources_of(table: ResourcesTable) -> dict[str, Any]:
    """Return a container's requests; its limits are the same, so that other pods cannot take its resources."""
    asked: dict[str, Any] = {}
    if table.cpu is not None:
        asked["cpu"] = f"{math.ceil(table.cpu * 1000)}m" if table.cpu % 1 else str(int(table.cpu))
    if table.memory is not None:
        asked["memory"] = quantity(table.memory)
    if table.gpu:
        asked[table.gpu_resource] = str(table.gpu)
    return {"requests": asked, "limits": dict(asked)} if asked else {}


def quantity(size: str) -> str:
    """Return a size of the job file in Kubernetes' notation."""
    count = parse_size(size)
    for unit, amount in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count % amount == 0:
            return f"{count // amount}{unit}"
    return str(count)


def _literal(word: str) -> str:
    """Return a word that Kubernetes leaves unchanged: `$(NAME)` would be a variable."""
    return word.replace("$(", "$$(")
