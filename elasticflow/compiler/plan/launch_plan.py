"""Job -> LaunchPlan: everything a launch needs, decided and checked; pure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from elasticflow.compiler.plan import torchrun
from elasticflow.compiler.provenance.job_json import job_digest
from elasticflow.jobfile.entry_points.calls import calls_of
from elasticflow.jobfile.tables.evaluation import ranking_set
from elasticflow.protocol.child_processes import (
    Program,
    Warm,  # pydantic reads the fields' types
)
from elasticflow.protocol.loop_settings import LoopSettings
from elasticflow.protocol.shard_groups import Shard  # noqa: TC001  # pydantic reads the fields' types
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.run_folder import from_root
from elasticflow.system.redaction import without_secrets
from elasticflow.system.units import parse_duration, parse_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.tables.job import Job


class Fact(BaseModel):
    """A frozen record that goes to plan.json and back unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptPlan(Fact):
    """A user's script that a launch runs; paths are relative to the project root, where the script is started.

    Attributes:
        entry: File of the script; None: the script is a module.
        module: The module that is run as by `python -m`.
        path: Folders at the end of `sys.path`.
        silence_s: Seconds without a line that count as a hang; None: silence is never a hang.
        log_every: Steps between two lines of the log, for a script that calls `elasticflow.join`.
    """

    entry: str | None
    module: str | None
    args: tuple[str, ...]
    path: tuple[str, ...]
    silence_s: float | None
    log_every: int

    @property
    def shown(self) -> str:
        """The file, or the module with `-m`, as a person would type it."""
        return self.entry if self.entry is not None else f"-m {self.module}"

    def program(self, project_root: Path) -> Program:
        """Return the program that the agents of a machine start; *project_root*: on that machine."""
        root = project_root.absolute()
        return Program(
            entry="" if self.entry is None else str(root / self.entry),
            name=self.entry or "",
            module=self.module or "",
            args=self.args,
            folder=str(root),
            path=tuple(str(root / part) for part in self.path),
            silence_s=self.silence_s,
        )


def script_plan(job: Job) -> ScriptPlan | None:
    """Return the script that a job runs; None for a job without [script]."""
    script = job.script
    if script is None:
        return None
    return ScriptPlan(
        entry=script.entry,
        module=script.module,
        args=tuple(script.args),
        path=tuple(job.job.path),
        silence_s=None if script.silence is None else parse_duration(script.silence),
        log_every=int(parse_interval(job.logging.every).amount),
    )


def torchrun_command(plan: ScriptPlan) -> tuple[str, ...]:
    """Return the end of torchrun's command, after its options: the program and its arguments."""
    # torchrun's parser looks at the script's arguments, too, and refuses `--logs` as short for two options of its own.
    end = ("--",) if any(text.startswith("--") for text in plan.args) else ()
    program = ("--module", *end, plan.module) if plan.module is not None else (*end, plan.entry or "")
    return (*program, *plan.args)


class RestartPlan(Fact):
    """The budget of failures, its refill by time or progress, and the seconds without progress that count as a hang.

    Attributes:
        warm: The way in which workers are kept ready; absent from plans of earlier versions.
    """

    budget: int
    refill_s: float | None
    refill_steps: int | None
    refill_epochs: int | None
    hang_timeout_s: float
    grace_s: float
    warm: Warm = "auto"


SnapshotsOfPlan = Annotated[
    SnapshotSettings,
    BeforeValidator(lambda given: SnapshotSettings.arguments(given) if isinstance(given, dict) else given),
    PlainSerializer(SnapshotSettings.to_json),
]


class LaunchPlan(Fact):
    """Everything a launch needs; written to plan.json, read back by `resume`.

    Attributes:
        job_digest: SHA-256 over the resolved job's canonical JSON.
        job_files: The job file and the files it extends, relative to the project root.
        case: Name of the case in the job file's [matrix]; None without a matrix.
        module_path: Folders of the job's own code, relative to the project root.
        modules: Modules of the job's factories, which the fork server imports once.
        rdzv_backend: Backend of the rendezvous store; static: node ranks are given, not found.
        is_store_outside: The store is served by neither torchrun nor our supervisor.
        torchrun_args: torchrun's argv after its own name; the program, `train.py` or the script with its arguments, is last.
        env: Variables that the job sets for its workers; absent from plan.json if there are none.
        env_secrets: Variables of `env` whose values no record holds.
        token_file: Path of the token that the machines of the run share; absent from plan.json without a token.
        start_method: fork (from a warm server) or spawn.
        seed: Seed of every random state; 0 in plans of earlier versions, which did not record it.
        script: The script that runs instead of train.py; absent from plan.json without a script.
        shard: Workers that hold one copy of the model; absent from plan.json if it is 1.
        compiles: The model is compiled; absent from plan.json if it is not.
    """

    format: Literal[1] = 1
    job_name: str
    job_digest: str
    job_files: tuple[str, ...]
    module_path: tuple[str, ...]
    modules: tuple[str, ...]
    nodes_min: int
    nodes_max: int
    nproc_per_node: int | Literal["auto", "gpu", "cpu"]
    endpoint: str | None
    interface: str | None
    rdzv_backend: Literal["c10d", "etcd-v2", "static"]
    is_store_outside: bool
    rdzv_options: dict[str, str]
    torchrun_args: tuple[str, ...]
    environment: dict[str, str]
    reasons: dict[str, str]
    start_method: Literal["fork", "spawn"]
    restarts: RestartPlan
    snapshots: SnapshotsOfPlan
    log_level: str
    case: str | None = None
    script: ScriptPlan | None = None
    seed: int = 0
    compiles: bool = False
    shard: Shard = 1
    env: dict[str, str] = Field(default={})
    env_secrets: tuple[str, ...] = ()
    token_file: str | None = None

    @model_serializer(mode="wrap")
    def _to_plan_json(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = serialize(self)
        if not self.compiles:
            del content["compiles"]
        if self.shard == 1:
            del content["shard"]
        for key in ("env", "env_secrets", "token_file", "script"):
            if not content[key]:
                del content[key]
        return content

    def loop_settings(self, project_root: Path) -> LoopSettings:
        """Return the job file's settings for a script that calls `elasticflow.join`; *project_root*: on this machine."""
        assert self.script is not None, "a generated train.py has what the job file says"
        snapshots = self.snapshots
        if snapshots.uri is not None:
            snapshots = replace(snapshots, uri=from_root(snapshots.uri, project_root.absolute()))
        return LoopSettings(
            self.job_name, self.job_digest, self.seed, snapshots, self.script.log_every, self.log_level
        )

    def public(self) -> LaunchPlan:
        """Return the plan without secrets, as it may be shown and recorded."""
        snapshots = SnapshotSettings.from_json(without_secrets(self.snapshots.to_json()))
        env = {name: value for name, value in self.env.items() if name not in self.env_secrets}
        return self.model_copy(update={"snapshots": snapshots, "env": env})


def plan_job(
    job: Job, *, project_root: Path, job_files: Sequence[Path], case: str | None = None
) -> LaunchPlan:
    """Return everything a launch of *job* needs; reads nothing but its arguments.

    Args:
        project_root: Folder that the paths of the plan are relative to.
        job_files: The job file first, then the files it extends.
        case: Name of the job's case in the job file's [matrix].

    Raises:
        JobRefusedError: torchrun cannot do what the job asks, or an argument cannot be recorded.
    """
    variables, script = torchrun.variables(job), script_plan(job)
    return LaunchPlan(
        job_name=job.job.name,
        job_digest=job_digest(job),
        job_files=tuple(Path(os.path.relpath(path, project_root)).as_posix() for path in job_files),
        module_path=tuple(job.job.path) if job.script is None else (job.script.folder,),
        modules=_modules(job),
        nodes_min=job.nodes.min,
        nodes_max=job.nodes.max,
        nproc_per_node=job.nodes.nproc_per_node,
        endpoint=job.nodes.endpoint,
        interface=job.nodes.interface,
        rdzv_backend=job.torchrun.rdzv_backend,
        is_store_outside=job.torchrun.is_store_outside,
        rdzv_options=torchrun.store_options(job),
        torchrun_args=torchrun.arguments(job)
        if script is None
        else torchrun.arguments(job, torchrun_command(script)),
        environment={variable.name: variable.value for variable in variables},
        reasons={variable.name: variable.reason for variable in variables},
        start_method=job.torchrun.start_method,
        restarts=_restarts(job),
        snapshots=snapshot_settings(job),
        log_level=job.logging.level,
        case=case,
        seed=job.job.seed,
        script=script,
        compiles=job.script is None and job.train.compile,
        shard=1 if job.script is not None or job.parallel is None else job.parallel.shard,
        env={} if job.env is None else job.env.values(),
        env_secrets=() if job.env is None else tuple(sorted(job.env.secrets())),
        token_file=job.nodes.token_file,
    )


def entries(job: Job) -> dict[str, str]:
    """Return every `package.module:attribute` of the job by its key, in the order of the job file."""
    return {".".join(map(str, call.path)): call.text for call in calls_of(job)}


def _modules(job: Job) -> tuple[str, ...]:
    named = [] if job.script is None else list(job.script.preload)
    # FSDP2 asks the compiler how to shard: each worker would import it.
    if job.parallel is not None or "torch.distributed.fsdp" in named:
        named.append("torch._dynamo.config")
    return tuple(dict.fromkeys([*named, *(entry.partition(":")[0] for entry in entries(job).values())]))


def snapshot_settings(job: Job) -> SnapshotSettings:
    """Return the settings in [snapshots] of *job*; the order of `keep.best` comes from [evaluation]."""
    ranking = ranking_set(job.evaluation)
    best = None if ranking is None else ranking[1].best
    return job.snapshots.settings(None if best is None else "max" if best.startswith("max ") else "min")


def _restarts(job: Job) -> RestartPlan:
    refill = parse_interval(job.restarts.refill) if job.restarts.refill else None
    unit, amount = (refill.unit, refill.amount) if refill else (None, 0)
    return RestartPlan(
        budget=job.restarts.budget,
        refill_s=amount if unit == "s" else None,
        refill_steps=int(amount) if unit == "step" else None,
        refill_epochs=int(amount) if unit == "epoch" else None,
        hang_timeout_s=parse_duration(job.restarts.hang_timeout),
        grace_s=parse_duration(job.snapshots.grace),
        warm=job.restarts.warm,
    )
