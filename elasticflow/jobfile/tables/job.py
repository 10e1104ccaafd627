"""The job file as one frozen record: closed, strict, bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, get_args

from pydantic import BaseModel, Field, PrivateAttr, TypeAdapter, field_validator, model_validator
from pydantic_core import PydanticCustomError

from elasticflow.jobfile.tables.evaluation import Evaluation, EvaluationTable, evaluation_sets
from elasticflow.jobfile.tables.hooks import HooksTable  # noqa: TC001  # pydantic reads the fields' types
from elasticflow.jobfile.tables.kubernetes import KubernetesTable  # noqa: TC001  # as above
from elasticflow.jobfile.tables.launching import (
    EnvTable,
    NodesTable,
    RestartsTable,
    ScriptTable,
    SnapshotsTable,
    TorchrunTable,
)
from elasticflow.jobfile.tables.logging import LoggingTable
from elasticflow.jobfile.tables.notify import NotifyTable  # noqa: TC001  # as above
from elasticflow.jobfile.tables.parallel import ParallelTable  # noqa: TC001  # as above
from elasticflow.jobfile.tables.ray import RayTable  # noqa: TC001  # as above
from elasticflow.jobfile.tables.slurm import SlurmTable  # noqa: TC001  # as above
from elasticflow.jobfile.tables.training import (
    DatasetTable,
    DdpTable,
    JobTable,
    LrSchedulerTable,
    ModelTable,
    OptimizerTable,
    TrainTable,
)
from elasticflow.jobfile.tables.types import Name, Table, optional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.types import TextWithSecrets


class MatrixTable(Table):
    """One file, several jobs: each case is the file with some keys changed, named `<job.name>-<case>`."""

    axes: dict[str, Any] = Field(
        default={},
        description="Keys of the job, each with a list of values; every combination is a case.",
        examples=[{"optimizer": {"args": {"lr": [1e-3, 3e-3]}}, "job": {"seed": [1, 2]}}],
    )
    exclude: list[dict[str, Any]] = Field(
        default=[],
        description="Combinations to leave out: all with these values of these axes.",
        examples=[[{"optimizer": {"args": {"lr": 3e-3}}, "job": {"seed": 2}}]],
    )
    cases: dict[Name, dict[str, Any]] = Field(
        default={},
        description="Further cases by name, each with the keys it changes.",
        examples=[{"wide": {"model": {"args": {"width": 64}}}}],
    )


NEEDED_TO_TRAIN = ("model", "optimizer", "dataset", "train")
"""Tables that a job without [script] must have."""

OF_TRAINING = (*NEEDED_TO_TRAIN, "lr_scheduler", "evaluation", "hooks", "ddp", "parallel")
"""Tables that say what is trained: beside [script] they have no meaning."""


_ANYTHING = TypeAdapter(Any)


class Job(Table, defer_build=True):
    """A whole job file, resolved: `extends` merged, a case chosen, `--set` applied, defaults filled in.

    Built on first use: `validate` goes table by table and never needs the whole.

    A job with [script] has none of the tables `OF_TRAINING`; any other job has the tables `NEEDED_TO_TRAIN`, as their
    types say. Code that handles both kinds looks at `script` first.
    """

    job: JobTable
    script: ScriptTable | None = None
    model: ModelTable = optional()  # type: ignore[assignment]
    optimizer: OptimizerTable = optional()  # type: ignore[assignment]
    lr_scheduler: LrSchedulerTable | None = None
    dataset: DatasetTable = optional()  # type: ignore[assignment]
    evaluation: Evaluation | None = None
    hooks: HooksTable | None = None
    train: TrainTable = optional()  # type: ignore[assignment]
    ddp: DdpTable = Field(default_factory=DdpTable)
    parallel: ParallelTable | None = None
    env: EnvTable | None = None
    nodes: NodesTable = Field(default_factory=NodesTable)
    restarts: RestartsTable = Field(default_factory=RestartsTable)
    snapshots: SnapshotsTable = Field(default_factory=SnapshotsTable)
    logging: LoggingTable = Field(default_factory=LoggingTable)
    notify: NotifyTable | None = None
    torchrun: TorchrunTable = Field(default_factory=TorchrunTable)
    kubernetes: KubernetesTable | None = None
    slurm: SlurmTable | None = None
    ray: RayTable | None = None
    matrix: MatrixTable | None = optional(exclude=True)  # part of the file only: a resolved job is one case

    @field_validator("evaluation")
    @classmethod
    def _has_a_set(cls, evaluation: Evaluation | None) -> Evaluation | None:
        if evaluation == {}:
            raise ValueError("must have an entry, or a table for each of several sets")
        return evaluation

    @model_validator(mode="after")
    def _trains_or_is_a_script(self) -> Job:
        given = [name for name in OF_TRAINING if name in self.model_fields_set]
        missing = [name for name in NEEDED_TO_TRAIN if name not in self.model_fields_set]
        if self.script is not None and given:
            message = "[{table}] has no meaning beside [script]"
            raise PydanticCustomError("beside_script", message, {"table": given[0]})
        if self.script is None and missing:
            raise PydanticCustomError("missing", "missing table [{table}]", {"table": missing[0]})
        return self

    _secrets: dict[tuple[str | int, ...], tuple[object, ...]] = PrivateAttr(default_factory=dict)

    @property
    def evaluations(self) -> Mapping[str, EvaluationTable]:
        """Every evaluation set by its name; the name of a single set is empty."""
        return evaluation_sets(self.evaluation)

    @property
    def secrets(self) -> Mapping[KeyPath, TextWithSecrets]:
        """Texts that hold secrets of the environment, by key: records may hold them in this form only."""
        return self._secrets  # type: ignore[return-value]  # pydantic evaluates annotations of private attributes

    def as_tables(self) -> dict[str, Any]:
        """Return what `model_dump` does; each table has its schema by now, and that of a whole job takes 40 ms to build."""
        tables: dict[str, Any] = _ANYTHING.dump_python(
            {name: table for name, table in self if name != "matrix"}
        )
        return tables

    def with_secrets(self, secrets: Mapping[KeyPath, TextWithSecrets]) -> Job:
        """Add its secrets to a job that has just been made, and return the job."""
        self._secrets.update(secrets)
        return self


def model_of(name: str) -> type[BaseModel]:
    """Return the model of a table."""
    annotation = Job.model_fields[name].annotation
    members = [annotation, *get_args(annotation)]
    return next(each for each in members if isinstance(each, type) and issubclass(each, BaseModel))


class ValidTables(TypedDict, total=False):
    """The tables of a job file that are valid by themselves; None: an optional table that is left out."""

    job: JobTable
    script: ScriptTable | None
    model: ModelTable
    optimizer: OptimizerTable
    lr_scheduler: LrSchedulerTable | None
    dataset: DatasetTable
    evaluation: Evaluation | None
    hooks: HooksTable | None
    train: TrainTable
    ddp: DdpTable
    parallel: ParallelTable | None
    env: EnvTable | None
    nodes: NodesTable
    restarts: RestartsTable
    snapshots: SnapshotsTable
    logging: LoggingTable
    notify: NotifyTable | None
    torchrun: TorchrunTable
    slurm: SlurmTable | None
    kubernetes: KubernetesTable | None
    ray: RayTable | None
