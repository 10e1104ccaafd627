"""The tables that say how a job is launched and kept: a script of its own, nodes, restarts, snapshots, torchrun."""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.jobfile.tables.types import (
    MOST_NODES,
    Args,
    Description,
    DurationText,
    Endpoint,
    Entry,
    IntervalText,
    MayRefer,
    ProgressText,
    SizeText,
    Table,
    bad_key,
    editor_hints,
    one_of,
    optional,
    or_reference,
)
from elasticflow.protocol.child_processes import Warm  # noqa: TC001  # pydantic reads the fields' types
from elasticflow.protocol.snapshot_settings import BestMode, Integrity, Keep, SnapshotSettings
from elasticflow.system.redaction import is_secret
from elasticflow.system.units import intervals

_THREADS = "write train.threads: workers set their threads themselves"
_TORCHRUN = "it is set for each worker when it is started; your code may read it"
_PLACES = "write nodes.endpoint"

_REFUSED = {
    "OMP_NUM_THREADS": _THREADS,
    "MKL_NUM_THREADS": _THREADS,
    "OPENBLAS_NUM_THREADS": _THREADS,
    "MASTER_ADDR": _PLACES,
    "MASTER_PORT": _PLACES,
    "PET_NNODES": "write nodes.min and nodes.max",
    "PET_NPROC_PER_NODE": "write nodes.nproc_per_node",
    "PYTHONPATH": "write job.path: folders of your own code, relative to the project",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "without it a look for GPUs opens the driver, and workers cannot be forked",
    "PYTHONUNBUFFERED": "workers are unbuffered",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "workers that are started again would look for dead ones",
}
_OF_WORKERS = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
})  # fmt: skip
_OURS = ("ELASTICFLOW_", "_ELASTICFLOW_", "TORCHELASTIC_", "PET_")


def why_refused(name: str) -> str | None:
    """Return the remedy for a variable that a job cannot set; None if a job may set it."""
    if name in _REFUSED:
        return _REFUSED[name]
    return _TORCHRUN if name in _OF_WORKERS or name.startswith(_OURS) else None


def _is_address(interface: str) -> bool:
    """Return whether *interface* is an address or a network, not a name."""
    try:
        ipaddress.ip_network(interface, strict=False)
    except ValueError:
        return False
    return True


def _interface(text: str) -> str:
    if "${" not in text and (":" in text or "/" in text) and not _is_address(text):
        raise ValueError(
            'is no network interface: write its name, an address or a network, like "10.0.0.0/8"'
        )
    return text


Interface = Annotated[
    str,
    Field(
        pattern=or_reference("[A-Za-z0-9._-]{1,15}|[0-9A-Fa-f.:]+(/[0-9]{1,3})?"),
        examples=["eth0", "10.0.0.0/8"],
    ),
    AfterValidator(_interface),
    Description('a network interface: its name, an address or a network, like "eth0" or "10.0.0.0/8"'),
]
Streams = Annotated[
    str,
    Field(pattern=r"^([0-3]|[0-9]{1,4}:[0-3](,[0-9]{1,4}:[0-3])*)$", examples=["3", "0:3,1:2"]),
    Description('0 to 3 for all workers, or per local rank like "0:3,1:2"'),
]
LocalRanks = Annotated[
    str,
    Field(pattern=r"^[0-9]{1,4}(,[0-9]{1,4})*$", examples=["0", "0,1"]),
    Description('local ranks, like "0,1"'),
]
# torchrun takes them as one text, KEY=VALUE,KEY=VALUE, and its arguments are kept in a file, one per line.
ConfKey = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_.-]{1,100}$"), Description("a name of letters, digits, _ . -")
]
ConfText = Annotated[
    str,
    Field(pattern=r"^[^,\x00-\x20\x7f]([^,\x00-\x1f\x7f]*[^,\x00-\x20\x7f])?$"),
    Description("a text without commas"),
]
LogFolder = Annotated[
    str,
    Field(pattern=r"^[^\x00-\x1f\x7f-][^\x00-\x1f\x7f]*$"),
    Description("a folder, on one line and not beginning with -"),
]
VARIABLE_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,200}$"
VariableText = Annotated[
    str,
    Field(pattern=r"^[^\x00]*$", max_length=100_000),
    MayRefer(),
    Description("a text in quotes"),
]
IncludedName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$"), Description("a name of letters, digits and _")
]


def _with_named_keys(schema: dict[str, Any]) -> None:
    schema["patternProperties"] = {VARIABLE_NAME: schema.pop("additionalProperties")}


def _device_type(text: str) -> str:
    if text in {"gpu", "nvidia", "hip", "rocm"}:
        raise ValueError('is no device type of torch: write "cuda", which also stands for AMD\'s GPUs')
    return text


class VariableTable(Table):
    """A variable that is declared secret or not."""

    value: VariableText = Field(description="Its value; may hold ${env:NAME}.", examples=["${env:LICENSE}"])
    secret: bool = Field(
        default=True,
        description="Keep its value out of every record and all output; names with token, key, password and the like "
        "are secret unless this is false.",
    )


class EnvTable(Table, extra="allow", json_schema_extra=_with_named_keys):
    """Environment variables of the workers, set before torch and the job's modules are imported; texts may hold ${env:NAME}.

    A value whose name looks secret, or that is declared so with { value = "${env:NAME}", secret = true }, stands in no record.
    """

    __pydantic_extra__: dict[str, VariableText | VariableTable] = Field(init=False)

    @model_validator(mode="after")
    def _check_names(self) -> EnvTable:
        for name in self.model_extra or ():
            if not re.fullmatch(VARIABLE_NAME, name):
                message = f"env: {show(name)} must be a name of letters, digits and _"
                raise bad_key(name, codes.MALFORMED, message, at_key=True)
            remedy = why_refused(name)
            if remedy is not None:
                raise bad_key(
                    name, codes.NOT_PASSABLE, f"env.{name} cannot be set by a job", remedy, at_key=True
                )
        return self

    def values(self) -> dict[str, str]:
        """Return each variable's value."""
        return {
            name: each.value if isinstance(each, VariableTable) else each
            for name, each in (self.model_extra or {}).items()
        }

    def secrets(self) -> frozenset[str]:
        """Return the variables whose values are secret."""
        return frozenset(
            name
            for name, each in (self.model_extra or {}).items()
            if (each.secret if isinstance(each, VariableTable) else is_secret(name))
        )


DeviceType = Annotated[
    str,
    Field(pattern=r"^[a-z][a-z0-9]{1,30}$", examples=["cpu", "cuda", "xpu"]),
    AfterValidator(_device_type),
    Description('"auto", "cpu", or a type of torch without a number, like "cuda" or "xpu"'),
]
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_FILE = r"[^-\s\x00-\x1f\x7f][^\x00-\x1f\x7f]*"
_MODULE = rf"^{_NAME}(\.{_NAME})*$"


def _file(text: str) -> str:
    if not re.fullmatch(_FILE, text):
        raise ValueError("must be a file, whose name begins with no - and no space")
    return text


def _argument(text: str) -> str:
    if "\0" in text or "\n" in text:
        raise ValueError("must be one line")
    return text


ScriptFile = Annotated[
    str, AfterValidator(_file), editor_hints(f"^{_FILE}$", "train.py"), Description('a file, like "train.py"')
]
Argument = Annotated[
    str,
    AfterValidator(_argument),
    editor_hints(r"^[^\n]*$", "--lr=0.1"),
    Description('a text, like "--lr=0.1"'),
]
ModuleName = Annotated[
    str,
    Field(pattern=_MODULE, max_length=500, examples=["pkg.train"]),
    Description('"package.module", like "pkg.train"'),
]


class ScriptTable(Table):
    """A training script of your own, started as by torchrun; instead of [model], [optimizer], [dataset] and [train]."""

    entry: ScriptFile | None = optional(
        description="The script, relative to the project root, which is its working folder.",
        examples=["train.py"],
    )
    module: ModuleName | None = optional(
        description="Instead of a file: the module that `python -m` would run.",
        examples=["pkg.train"],
    )
    args: list[Argument] = Field(
        default=[],
        max_length=1000,
        description="Arguments of the script, passed unchanged.",
        examples=[["--lr=0.1", "--epochs=3"]],
    )
    preload: list[ModuleName] = Field(
        default=[],
        max_length=1000,
        description="Modules to import once for all workers and restarts; torch always is.",
        examples=[["torchvision", "pkg.models"]],
    )
    silence: DurationText | None = optional(
        description="Workers that print nothing for this long count as hung: a failure. Without it nothing counts as "
        "a hang until the script calls `elasticflow.join`.",
        examples=["20 min"],
    )

    @property
    def folder(self) -> str:
        """The first folder of the script's imports, from the project root: the script's own, or the root for a module; job.path comes last."""
        return "." if self.entry is None else PurePosixPath(self.entry).parent.as_posix()

    @model_validator(mode="after")
    def _one_program(self) -> ScriptTable:
        if (self.entry is None) is (self.module is None):
            raise one_of("entry", "module")
        return self


class NodesTable(Table):
    """The range of nodes the job may run on."""

    min: int = Field(default=1, ge=1, le=MOST_NODES, description="Minimum number of nodes.", examples=[1])
    max: int = Field(default=1, ge=1, le=MOST_NODES, description="Maximum number of nodes.", examples=[4])
    nproc_per_node: Literal["auto", "gpu", "cpu"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        default="auto",
        description="Workers per node; auto: one per GPU, else one per core.",
        examples=["auto", "gpu", 8],
    )
    device: DeviceType = Field(
        default="auto",
        description="Type of device that workers train on, as torch calls it; auto: the machine's accelerator, else the CPU, and the CPU "
        'if nproc_per_node is "cpu". A type that a machine lacks is refused; cpu hides its GPUs, and is refused where torch sees an '
        "accelerator that cannot be hidden (XPU).",
    )
    endpoint: Annotated[Endpoint | None, MayRefer()] = optional(
        description="host:port of the rendezvous, for several machines; may hold ${env:NAME}.",
    )
    interface: Annotated[Interface | None, MayRefer()] = optional(
        description="Network interface of the workers' traffic: name, address or network; may hold ${env:NAME}.",
    )
    token_file: Annotated[str | None, MayRefer("/etc/elasticflow/token")] = optional(
        min_length=1,
        examples=["~/elasticflow-token"],
        description="File with the token that the run's machines share, on each machine; ELASTICFLOW_TOKEN overrides "
        "it.",
    )

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> NodesTable:
        if self.min > self.max:
            message = f"nodes.min ({self.min}) is greater than nodes.max ({self.max})"
            remedy = f"set max to {self.min} or more, or min to {self.max} or less"
            raise bad_key("max", codes.EMPTY_RANGE, message, remedy)
        return self

    @property
    def interface_name(self) -> str | None:
        """The interface if it is given by its name: each machine finds its own one that has a given address or network."""
        return None if self.interface is None or _is_address(self.interface) else self.interface

    @property
    def device_of_workers(self) -> DeviceType:
        """The type that workers are told to train on: a worker for each core trains on the CPU, unless `device` says otherwise."""
        return "cpu" if self.device == "auto" and self.nproc_per_node == "cpu" else self.device

    @property
    def largest_world_size(self) -> tuple[int, bool]:
        """The most workers that the job may have, and whether the number is exact (else there may be more)."""
        if isinstance(self.nproc_per_node, int):
            return self.max * self.nproc_per_node, True
        return self.max, False


class RestartsTable(Table):
    """Restarts after failures."""

    budget: int = Field(
        default=3,
        ge=0,
        le=10**6,
        description="Failures in one window; resizes, drains and preemptions are free.",
        examples=[5],
    )
    refill: ProgressText | None = optional(
        description='The budget is full again after this much progress or time: "1 h", "1000 steps".',
    )
    hang_timeout: DurationText = Field(
        default="10 min",
        description="Workers without progress for this long count as hung: a failure. The run learns shorter limits, "
        "phase by phase.",
    )
    warm: Warm = Field(
        default="auto",
        description="Preparation for a restart: a process to fork, standby workers that have imported everything and "
        "opened the GPU, or nothing.",
    )


class KeepTable(Table):
    """Retention of snapshots."""

    last: int = Field(
        default=3, ge=1, le=10**6, description="Keep this many of the newest snapshots.", examples=[3]
    )
    best: int | None = optional(
        ge=1,
        le=10**6,
        description="Keep this many of the best snapshots by evaluation.best; of equal ones the newest. A snapshot "
        "is taken at each new best value.",
        examples=[1],
    )
    every: IntervalText | None = optional(
        description='Keep a snapshot at each interval: "5000 steps", "1 epoch", "6 h".',
        examples=["5000 steps", "1 epoch", "6 h"],
    )
    within: DurationText | None = optional(
        description="Keep snapshots that are at most this much older than the newest.",
        examples=["2 h"],
    )


class SnapshotsTable(Table):
    """Interval, place and retention of snapshots."""

    uri: Annotated[str | None, MayRefer("s3://bucket/name")] = optional(
        min_length=1,
        description="Any fsspec URL or path; default: the run folder. May hold ${env:NAME} and ${job.name}.",
        examples=["s3://bucket/mnist", "/scratch/snapshots"],
    )
    every: IntervalText | list[IntervalText] = Field(
        default=["10 min", "1 epoch"],
        description="A snapshot at any of these; always one at the end and on drain.",
        examples=["10 min", ["500 steps", "10 min"]],
    )
    memory: IntervalText | Literal["auto", "off", False] = Field(
        default="auto",
        description='Also hold the state in the node\'s memory, for workers that take the place of dead ones: "auto" as '
        "often as it takes 2 % of the time at most, where the memory is there; or at this interval; or not. What is held ends "
        "with the launch.",
        examples=["auto", "1 step", "off"],
    )
    staging_limit: SizeText | None = optional(
        description="Maximum memory of each node for snapshots; default: as much as is free."
    )
    keep: KeepTable = Field(
        default=KeepTable(), description="Retention of snapshots.", examples=[{"last": 3, "best": 1}]
    )
    include: dict[IncludedName, Entry] = Field(
        default={},
        description="Objects of your modules, by name, whose state_dict() belongs to a snapshot.",
        examples=[{"vocabulary": "examples.text:vocabulary"}],
    )
    ignore: list[str] = Field(
        default=[],
        description="State that no snapshot holds and no step depends on, by the names in the refusal; `*` stands for a number.",
        examples=[["optimizer.last_norm", "model.layers.*.scores"]],
    )
    integrity: Integrity = Field(
        default="crc32", description="Digest of every file, taken while it is written and checked on load."
    )
    grace: DurationText = Field(default="30 s", description="Time that a preempted worker has to exit.")
    options: Annotated[Args, MayRefer()] = Field(
        default={},
        description='For the file system; secrets come from the environment: secret = "${env:NAME}".',
        examples=[{"anon": True}],
    )

    def settings(self, best_mode: BestMode | None = None) -> SnapshotSettings:
        """Return the settings that every process of the run gets; *best_mode*: the order in which `keep.best` ranks."""
        return SnapshotSettings(
            uri=self.uri,
            every=intervals(self.every),
            memory=self.memory if self.memory and self.memory != "off" else None,
            keep=Keep(**self.keep.model_dump(), best_mode=best_mode),
            integrity=self.integrity,
            staging_limit=self.staging_limit,
            options=self.options,
            ignore=tuple(self.ignore),
        )


class TorchrunTable(Table):
    """Every torchrun option that no other table owns."""

    rdzv_backend: Literal["c10d", "etcd-v2", "static"] = Field(
        default="c10d",
        description="Rendezvous of nodes; static: a fixed set of nodes, each started with its rank.",
    )
    rdzv_conf: dict[ConfKey, ConfText | int | float | bool] = Field(
        default={},
        description="Extra rendezvous configuration; is_host = false: `elasticflow rendezvous serve` serves the endpoint.",
        examples=[{"is_host": False}],
    )
    start_method: Literal["fork", "spawn"] = Field(
        default="fork", description="Start of workers by `elasticflow run`; fork: from a warm server."
    )
    monitor_interval: float = Field(
        default=0.1,
        gt=0,
        le=60,
        description="Seconds between torchrun's checks of its workers.",
        examples=[0.1],
    )
    tee: Streams | None = optional(description="torchrun --tee.")
    redirects: Streams | None = optional(description="torchrun --redirects.")
    local_ranks_filter: LocalRanks | None = optional(
        description="torchrun --local-ranks-filter: local ranks whose lines are shown.",
        examples=["0"],
    )
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = optional(
        description="torchrun --numa-binding."
    )
    log_dir: Annotated[LogFolder | None, MayRefer()] = optional(
        description="torchrun --log-dir; may hold ${env:NAME} and ${job.name}.",
        examples=["logs"],
    )

    @property
    def is_store_outside(self) -> bool:
        """True if the rendezvous has a store that neither torchrun nor our supervisor serves."""
        is_host = str(self.rdzv_conf.get("is_host", "true")).lower()
        return self.rdzv_backend == "etcd-v2" or (self.rdzv_backend == "c10d" and is_host in {"false", "0"})
