"""The table that says how Kubernetes runs a job: what `elasticflow submit kubernetes` writes."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.types import Description, DurationText, SizeText, Table, bad_key, optional
from elasticflow.run_folder import path_from_root
from elasticflow.system.redaction import is_secret

_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
# Volumes of each pod beside those: the job file, and /dev/shm.
_OWN_VOLUMES = {"job", "shm"}

Image = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9./:@_-]*$", max_length=500, examples=["registry.example.org/train:1"]
    ),
    Description('a container image, like "registry.example.org/train:1"'),
]
DnsLabel = Annotated[
    str,
    Field(pattern=rf"^{_LABEL}$", max_length=63, examples=["training"]),
    Description('a name of small letters, digits and "-", at most 63'),
]
ObjectName = Annotated[
    str,
    Field(pattern=rf"^{_SUBDOMAIN}$", max_length=253, examples=["datasets"]),
    Description('a name of small letters, digits, "-" and "."'),
]
KeyName = Annotated[
    str,
    Field(pattern=rf"^({_SUBDOMAIN}/)?{_PART}$", max_length=317),
    Description('a key of Kubernetes, like "example.org/pool"'),
]
LabelValue = Annotated[
    str,
    Field(pattern=rf"^({_PART})?$", max_length=63),
    Description('at most 63 letters, digits, "-", "_" and "."'),
]
AbsolutePath = Annotated[
    str,
    Field(pattern=r"^/[^\x00-\x1f:]*$", max_length=1000, examples=["/data"]),
    Description('a path that begins with "/"'),
]
VariableName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,200}$"),
    Description("a name of letters, digits and _"),
]
SecretKey = Annotated[
    str,
    Field(pattern=rf"^{_SUBDOMAIN}/[A-Za-z0-9._-]+$", max_length=507, examples=["aws/secret-key"]),
    Description('a secret and a key of it, like "aws/secret-key"'),
]
Word = Annotated[
    str, Field(pattern=r"^[^\x00]+$", max_length=10_000), Description("a text that is not empty")
]


class ResourcesTable(Table):
    """Requests and limits of each pod."""

    cpu: float | None = optional(gt=0, le=100_000, description="Cores.", examples=[8, 0.5])
    memory: SizeText | None = optional(description="Memory.", examples=["64 GiB"])
    gpu: int | None = optional(ge=0, le=64, description="GPUs.", examples=[8])
    gpu_resource: KeyName = Field(
        default="nvidia.com/gpu",
        description="The cluster's name of a GPU.",
        examples=["nvidia.com/gpu", "amd.com/gpu"],
    )


class VolumeTable(Table):
    """Files of each pod: from a claim, from a secret, or, with neither, a folder of its own that is empty at first."""

    path: AbsolutePath = Field(description="Path in the pods.")
    claim: ObjectName | None = optional(
        description="A PersistentVolumeClaim, which outlives pods.", examples=["datasets"]
    )
    secret: ObjectName | None = optional(
        description="A Secret: a file for each of its keys.", examples=["gcs-key"]
    )
    size: SizeText | None = optional(description="Maximum size of an empty folder.", examples=["100 GiB"])
    read_only: bool = Field(default=False, description="The pods only read it.")

    @model_validator(mode="after")
    def _is_one_thing(self) -> VolumeTable:
        if self.claim is not None and self.secret is not None:
            message = "a volume is a claim's or a secret's, not both"
            raise bad_key("secret", codes.EXCLUSIVE, message, "make two volumes of it, each with a path")
        if self.size is not None and (self.claim is not None or self.secret is not None):
            message = "size is of an empty folder: a claim has its own, and a secret has none"
            raise bad_key("size", codes.EXCLUSIVE, message, "leave size out")
        return self


class TolerationTable(Table):
    """A taint of nodes that the pods tolerate."""

    key: KeyName | None = optional(description="The taint's key; none: any.", examples=["nvidia.com/gpu"])
    operator: Literal["Exists", "Equal"] = Field(
        default="Exists", description="Equal: its value is the one given here."
    )
    value: LabelValue | None = optional(description="Its value.", examples=["spot"])
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = optional(
        description="The taint's effect; none: any."
    )

    @model_validator(mode="after")
    def _value_fits(self) -> TolerationTable:
        if (self.operator == "Equal") != (self.value is not None):
            message = 'operator = "Equal" goes with a value, and "Exists" with none'
            raise bad_key("value", codes.EXCLUSIVE, message, "give both, or leave both out")
        if self.key is None and self.operator == "Equal":
            raise bad_key("key", codes.MISSING, 'operator = "Equal" needs a key', "name the taint's key")
        return self


class KubernetesTable(Table):
    """Options for `elasticflow submit kubernetes`: one pod per node."""

    image: Image = Field(
        description="The container image: your code, elasticflow and torch (examples/clusters/Dockerfile)."
    )
    form: Literal["job", "jobset", "trainjob"] = Field(
        default="job",
        description="An elastic Indexed Job, or a JobSet or Kubeflow TrainJob of nodes.max pods.",
    )
    namespace: DnsLabel | None = optional(description="Namespace of all; default: kubectl's.")
    workdir: AbsolutePath = Field(
        default="/workspace", description="The project's folder in the image.", examples=["/workspace"]
    )
    port: int = Field(
        default=29400, ge=1024, le=65535, description="Port of the rendezvous of pods.", examples=[29400]
    )
    rendezvous_pod: bool = Field(
        default=False,
        description="Give the rendezvous store a pod of its own, so that any other pod may lead; else index 0 leads.",
    )
    resources: ResourcesTable = Field(
        default=ResourcesTable(),
        description="Requests and limits of each pod.",
        examples=[{"cpu": 8, "memory": "64 GiB", "gpu": 8}],
    )
    shared_memory: SizeText | None = optional(
        description="Maximum size of /dev/shm, where NCCL hands data from GPU to GPU; default: all of the pod's memory.",
        examples=["16 GiB"],
    )
    volumes: dict[DnsLabel, VolumeTable] = Field(
        default={},
        description="Volumes of each pod, by name.",
        examples=[{"data": {"claim": "datasets", "path": "/data", "read_only": True}}],
    )
    env: dict[VariableName, Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=100_000)]] = Field(
        default={},
        description="Environment variables of each pod; the job's ${env:NAME} are looked up there.",
        examples=[{"AWS_REGION": "eu-west-1"}],
    )
    secrets: dict[VariableName, SecretKey] = Field(
        default={},
        description='Environment variables whose values are in Secrets of the cluster: "secret/key".',
        examples=[{"AWS_SECRET_ACCESS_KEY": "aws/secret-key"}],
    )
    node_selector: dict[KeyName, LabelValue] = Field(
        default={}, description="Labels that nodes must have.", examples=[{"example.org/pool": "gpu"}]
    )
    tolerations: list[TolerationTable] = Field(
        default=[],
        description="Taints that the pods tolerate.",
        examples=[[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]],
    )
    network_policy: bool = Field(
        default=True, description="A NetworkPolicy by which only pods of the run may connect to its pods."
    )
    service_account: ObjectName | None = optional(
        description="ServiceAccount of the pods; default: none of its token.",
        examples=["trainer"],
    )
    user: int | None = optional(
        ge=0,
        le=2**31 - 1,
        description="Number of the user and group that the pods run as, and that may write to volumes; 0: root; default: the "
        "image's user, which may not be root.",
        examples=[1000],
    )
    pull_secrets: list[ObjectName] = Field(
        default=[], description="Secrets with which the image is pulled.", examples=[["registry"]]
    )
    priority_class: ObjectName | None = optional(description="PriorityClass of the pods.", examples=["batch"])
    queue: ObjectName | None = optional(
        description="Kueue's LocalQueue; the form job is admitted with nodes.min pods or more.",
        examples=["team-a"],
    )
    labels: dict[KeyName, LabelValue] = Field(
        default={}, description="Labels of every object and pod.", examples=[{"example.org/team": "vision"}]
    )
    annotations: dict[KeyName, str] = Field(
        default={}, description="Annotations of every object and pod.", examples=[{"example.org/owner": "me"}]
    )
    grace: DurationText | None = optional(
        description="Time between SIGTERM and SIGKILL, pre_stop counted; default: snapshots.grace and 30 s more.",
    )
    pre_stop: list[Word] = Field(
        default=[],
        description="Command run in a pod before SIGTERM; none is needed for a snapshot, which SIGTERM asks for.",
        examples=[["sleep", "5"]],
    )
    backoff_limit: int = Field(
        default=6,
        ge=0,
        le=10**6,
        description="Number of pods that may fail other than by a disruption or exit code 75.",
        examples=[6],
    )
    ttl_after_finished: DurationText | None = optional(
        description="Time after which a finished Job or JobSet is deleted with its pods; default: it stays.",
        examples=["7 d"],
    )
    patch: Word | None = optional(
        description="A YAML file of the project whose objects are merged into the manifest's, for fields without a "
        "key here.",
        examples=["jobs/site.yaml"],
    )

    @model_validator(mode="after")
    def _check_variables(self) -> KubernetesTable:
        for name in self.env:
            if name in self.secrets:
                message = f"kubernetes.env and kubernetes.secrets both set {name}"
                raise bad_key("secrets", codes.EXCLUSIVE, message, "keep one of them")
            if is_secret(name):
                message = f"kubernetes.env.{name} would stand in the manifest for everybody to read"
                remedy = f'put it into a Secret of the cluster: secrets = {{ {name} = "secret/key" }}'
                raise bad_key("env", codes.NOT_PASSABLE, message, remedy)
        paths = [volume.path.rstrip("/") for volume in self.volumes.values()]
        if twice := next((path for path in paths if paths.count(path) > 1), None):
            message = f"two volumes have the path {twice}"
            raise bad_key("volumes", codes.EXCLUSIVE, message, "give each a path of its own")
        if "/dev/shm" in paths:  # noqa: S108  # a path in the pods
            message = "the pods have a volume at /dev/shm already"
            remedy = 'set its size by kubernetes.shared_memory = "16 GiB"'
            raise bad_key("volumes", codes.EXCLUSIVE, message, remedy)
        if taken := _OWN_VOLUMES & self.volumes.keys():
            message = f"the pods have a volume called {min(taken)} already"
            raise bad_key("volumes", codes.EXCLUSIVE, message, "give the volume another name")
        return self

    def is_kept(self, uri: str | None) -> bool:
        """Return whether files at *uri*, written as in `snapshots.uri`, outlive the pods."""
        if uri is not None and "${" in uri:
            return True  # known only in the pod
        local = "runs" if uri is None else re.sub(r"^(file|local)://", "", uri, flags=re.IGNORECASE)
        if "://" in local or "::" in local:
            return True
        root = PurePosixPath(self.workdir)
        path = PurePosixPath(local) if path_from_root(local) is None else root / local
        claims = (volume.path for volume in self.volumes.values() if volume.claim and not volume.read_only)
        return any(path.is_relative_to(claim) for claim in claims)
