"""What the child process of `--deep` is asked, and what it reports.

The request is one JSON object on standard input, each message one JSON object on a line of a pipe, whose `type` says
which it is. `elasticflow/deep_check` asks, `elasticflow/runtime/deep` answers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class ModelTable:
    """What the child has to know of `[model]`; `has_args`: the job gives the factory arguments."""

    has_args: bool
    step: str | None
    loss: str | None
    weights: str | None


@dataclass(frozen=True)
class OptimizerTable:
    """What the child has to know of `[optimizer]`."""

    has_args: bool
    clip_grad_norm: float | None


@dataclass(frozen=True)
class SchedulerTable:
    """What the child has to know of `[lr_scheduler]`."""

    has_args: bool


@dataclass(frozen=True)
class DatasetTable:
    """What the child has to know of `[dataset]`."""

    entry: str
    has_args: bool
    shards: int | None
    prepare: str | None
    collate: str | None
    samples: int | None
    global_batch_size: int
    micro_batch_size: int | None
    tail: str


@dataclass(frozen=True)
class EvaluationTable:
    """What the child has to know of `[evaluation]`; of its metrics the names."""

    entry: str
    has_args: bool
    metrics: tuple[str, ...]


@dataclass(frozen=True)
class DeepJob:
    """What the child has to know of the job besides its train.py.

    Attributes:
        seed: `job.seed`.
        precision: `train.precision`.
        ema: `train.ema`.
        consistency: `train.consistency`.
        find_unused_parameters: `ddp.find_unused_parameters`.
        include: `snapshots.include`.
        ignore: `snapshots.ignore`.
    """

    seed: int
    model: ModelTable
    optimizer: OptimizerTable
    lr_scheduler: SchedulerTable | None
    dataset: DatasetTable
    evaluation: EvaluationTable | None
    precision: str
    ema: float | None
    consistency: str
    find_unused_parameters: bool
    include: dict[str, str]
    ignore: tuple[str, ...]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DeepJob:
        """Return the job that `dataclasses.asdict` turned into JSON."""
        scheduler, evaluation = content["lr_scheduler"], content["evaluation"]
        if evaluation is not None:
            evaluation = EvaluationTable(**{**evaluation, "metrics": tuple(evaluation["metrics"])})
        tables = {
            "model": ModelTable(**content["model"]),
            "optimizer": OptimizerTable(**content["optimizer"]),
            "lr_scheduler": None if scheduler is None else SchedulerTable(**scheduler),
            "dataset": DatasetTable(**content["dataset"]),
            "evaluation": evaluation,
        }
        return cls(**{**content, **tables, "ignore": tuple(content["ignore"])})


@dataclass(frozen=True)
class DeepRequest:
    """What the child is to try out.

    Attributes:
        job: The resolved job, as far as the child has to know it.
        entries: What the job names, by key of the job file.
        entry_point: The text of its train.py.
        own: Folders of the job's own code.
        takes_step: A step is to be trained on the CPU.
        is_to_be_apart: Samples of the evaluation are to be looked up in the training data.
    """

    job: DeepJob
    entries: dict[str, str]
    entry_point: str
    own: list[str]
    takes_step: bool
    is_to_be_apart: bool

    def to_json(self) -> dict[str, Any]:
        """Return the request as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> DeepRequest:
        """Return the request that `to_json` turned into JSON."""
        return cls(**{**content, "job": DeepJob.from_json(content["job"])})


@dataclass(frozen=True)
class Doing:
    """What comes next: it may hang, or end the process.

    Attributes:
        what: In words, such as "building the model".
        key: Key of the job file that it is about.
    """

    what: str
    key: str


@dataclass(frozen=True)
class Problem:
    """Something that is wrong, or need not be.

    Attributes:
        kind: One of those of `deep_check.DeepProblem`.
        key: Key of the job file.
        message: In one line.
        help: What to do; may be empty.
        frames: Where in the job's own code, outermost first.
        is_warning: It need not be wrong.
    """

    kind: str
    key: str
    message: str
    help: str = ""
    frames: tuple[str, ...] = ()
    is_warning: bool = False


@dataclass(frozen=True)
class Note:
    """How something was found out, or why it was not."""

    text: str


@dataclass(frozen=True)
class Facts:
    """What was found out, by name; see `deep_check.DeepReport`."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Done:
    """Everything was tried."""


DeepMessage = Doing | Problem | Note | Facts | Done

_TYPES: dict[str, type[DeepMessage]] = {
    "doing": Doing,
    "problem": Problem,
    "note": Note,
    "facts": Facts,
    "done": Done,
}
_NAMES = {message_type: name for name, message_type in _TYPES.items()}


def message_to_json(message: DeepMessage) -> dict[str, Any]:
    """Return *message* as JSON."""
    return {"type": _NAMES[type(message)], **asdict(message)}


def message_from_json(content: Mapping[str, Any]) -> DeepMessage | None:
    """Return the message that `message_to_json` turned into JSON; None if the job's own code wrote something else."""
    fields = dict(content)
    message_type = _TYPES.get(str(fields.pop("type", None)))
    if message_type is None:
        return None
    if "frames" in fields:
        fields["frames"] = tuple(fields["frames"])
    return message_type(**fields)
