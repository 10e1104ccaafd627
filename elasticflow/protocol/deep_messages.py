"""What the child process of `--deep` is asked, and what it reports.

The request is one JSON object on standard input, each message one on a line of a pipe (`json_codec.py`).
`elasticflow/deep_check` asks, `elasticflow/runtime/deep` answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticflow.protocol.json_codec import MessageCodec


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
    """What the child has to know of `[dataset]`; of its sampler which key says how samples are drawn; of a mixture the shares.

    Attributes:
        collate: What makes batches, or what it is made by.
        collate_is_made: It is made, with arguments.
    """

    entry: str | None
    has_args: bool
    shards: int | None
    prepare: str | None
    collate: str | None
    samples: int | None
    global_batch_size: int
    micro_batch_size: int | None
    tail: str
    sampler: str | None = None
    weights: tuple[float, ...] | None = None
    temperature: float = 1.0
    collate_is_made: bool = False


@dataclass(frozen=True)
class EvaluationSet:
    """What the child has to know of one evaluation set.

    Attributes:
        name: Its name; empty where there is one without a name.
        metrics: Their names.
        is_to_be_apart: Its samples are to be looked up in the training data.
        own_collate: Its batches are not made by `dataset.collate`.
    """

    name: str
    entry: str
    has_args: bool
    metrics: tuple[str, ...]
    is_to_be_apart: bool
    own_collate: bool = False

    @property
    def key(self) -> str:
        """The key of its table: `evaluation`, or `evaluation.val`."""
        return f"evaluation.{self.name}" if self.name else "evaluation"


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
        gradient_checkpointing: `train.gradient_checkpointing`.
    """

    seed: int
    model: ModelTable
    optimizer: OptimizerTable
    lr_scheduler: SchedulerTable | None
    dataset: DatasetTable
    evaluations: tuple[EvaluationSet, ...]
    precision: str
    ema: float | None
    consistency: str
    find_unused_parameters: bool
    include: dict[str, str]
    ignore: tuple[str, ...]
    gradient_checkpointing: bool | tuple[str, ...] = False


@dataclass(frozen=True)
class DeepRequest:
    """What the child is to try out.

    Attributes:
        job: The resolved job, as far as the child has to know it.
        entries: What the job names, by key of the job file.
        entry_point: The text of its train.py.
        own: Folders of the job's own code.
        takes_step: A step is to be trained on the CPU.
    """

    job: DeepJob
    entries: dict[str, str]
    entry_point: str
    own: list[str]
    takes_step: bool


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
    """Something that was found out; None: nothing of it.

    Attributes:
        samples: Of the training data.
        evaluation_samples: Of the evaluation's; of several sets, of the last one.
        sample: What the first training sample is, in words.
        parameters: Numbers in the model.
        trainable: Those of them that take a gradient.
        snapshot_bytes: Of a whole snapshot.
        model_bytes: Of the model in it.
        optimizer_bytes: Of the optimizers in it.
        loss: Of the first step, as Python writes it.
        sets: Samples of each set of the mixture.
        shares: Of these sets among all samples drawn.
        groups: Of parameters, each as the event `parameters.grouped` has it, if the job declares some.
    """

    samples: int | None = None
    evaluation_samples: int | None = None
    sample: str | None = None
    parameters: int | None = None
    trainable: int | None = None
    snapshot_bytes: int | None = None
    model_bytes: int | None = None
    optimizer_bytes: int | None = None
    loss: str | None = None
    sets: tuple[int, ...] | None = None
    shares: tuple[float, ...] | None = None
    groups: tuple[dict[str, Any], ...] | None = None

    def known(self) -> dict[str, Any]:
        """Return by name what is not None."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class Done:
    """Everything was tried."""


DeepMessage = Doing | Problem | Note | Facts | Done

MESSAGES: MessageCodec[DeepMessage] = MessageCodec(
    "type", {"doing": Doing, "problem": Problem, "note": Note, "facts": Facts, "done": Done}
)
