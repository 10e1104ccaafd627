"""The tables that say what is trained: model, optimizer, data, length.

One model per table. A model checks its own table; `jobfile/checks/all.py` checks several tables together.
Defaults are here and in `jobfile/tables/launching.py`, nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import ConfigDict, Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.evaluation import EXAMPLES, PATTERN, parse_stop_when
from elasticflow.jobfile.tables.types import (
    MOST_NODES,
    MOST_SAMPLES,
    Args,
    Collate,
    Description,
    DurationText,
    Entry,
    MayRefer,
    Name,
    StepsText,
    Table,
    bad_key,
    editor_hints,
    one_of,
    optional,
    parsed_by,
)

if TYPE_CHECKING:
    from pydantic.config import JsonDict

_KINDS = ("weights", "balance_by", "bucket_by", "temperature")
_WITH_DRAWS = ("weights", "balance_by")
_COLUMN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
SampleValues = Annotated[
    str,
    Field(pattern=rf"^{_COLUMN}(:{_COLUMN})?$", max_length=500, examples=["label", "examples.mnist:weights"]),
    Description('a column or an attribute of the dataset, like "label", or a function, like "mine:labels"'),
]


def _exactly_one() -> JsonDict:
    """Return the part of the schema that tells an editor which keys exclude each other."""
    choices: list[JsonDict] = [{"required": [key], "additionalProperties": True} for key in _KINDS]
    for key, choice in zip(_KINDS, choices, strict=True):
        if key not in _WITH_DRAWS:
            choice["properties"] = {"draws": False}
    return {"oneOf": [*choices]}


class SamplerTable(Table):
    """Another order than each sample once per epoch, shuffled."""

    model_config = ConfigDict(json_schema_extra=_exactly_one())

    weights: SampleValues | None = optional(
        description="A number for each sample, which is drawn with replacement in proportion to it. A column or an "
        "attribute of the dataset, or a function called once with it.",
        examples=["weight", "examples.mnist:weights"],
    )
    balance_by: SampleValues | None = optional(
        description="The class of each sample: drawn with replacement, each class as often as any other. "
        "A column or an attribute of the dataset, or a function called once with it.",
        examples=["label", "targets"],
    )
    bucket_by: SampleValues | None = optional(
        description="The length of each sample: batches of similar length, in a shuffled order, each sample once per "
        "epoch. A column or an attribute of the dataset, or a function called once with it.",
        examples=["length", "texts:lengths"],
    )
    temperature: float | None = optional(
        gt=0,
        le=1000,
        description="Of [[dataset.mix]]: each set's share is its size to the power of 1 / temperature: 1 draws by "
        "size, a higher value raises the shares of small sets.",
        examples=[2.0],
    )
    draws: int | None = optional(
        ge=1,
        le=MOST_SAMPLES,
        description="Draws in an epoch, with weights or balance_by; default: the number of samples.",
        examples=[100_000],
    )

    @property
    def kind(self) -> str:
        """The key that chooses the order: `weights`, `balance_by` and so on."""
        return next(key for key in _KINDS if getattr(self, key) is not None)

    @property
    def values(self) -> str:
        """The column, attribute or function that gives the number or the class of each sample."""
        return str(getattr(self, self.kind))

    @model_validator(mode="after")
    def _one_kind(self) -> SamplerTable:
        given = [key for key in _KINDS if getattr(self, key) is not None]
        if not given:
            message = (
                "a sampler needs `weights`, `balance_by`, `bucket_by` or, with [[dataset.mix]], `temperature`"
            )
            remedy = 'such as { balance_by = "label" }; without a sampler, each sample comes once per epoch, shuffled'
            raise bad_key("", codes.MISSING, message, remedy)
        if len(given) > 1:
            message = f"{' and '.join(f'`{key}`' for key in given)} of a sampler exclude each other"
            remedy = "keep one of them"
            if set(given) == {"weights", "balance_by"}:
                remedy = "keep one of them: weights of your own can balance classes, too"
            raise bad_key(given[1], codes.SAMPLER, message, remedy)
        if self.draws is not None and self.kind not in _WITH_DRAWS:
            what = "with `bucket_by` each comes once per epoch"
            if self.kind == "temperature":
                what = "an epoch of a mixture is as many samples as its sets have"
            message = f"`draws` is for samples that are drawn with replacement; {what}"
            raise bad_key("draws", codes.SAMPLER, message, "leave it out")
        return self


class MixTable(Table):
    """One of several training sets."""

    entry: Entry = Field(
        description="Any callable that returns a map-style dataset.", examples=["texts:Books"]
    )
    args: Args = Field(
        default={},
        description="Keyword arguments of the callable; a table { entry, args } among them makes an object; texts may hold ${env:NAME}.",
        examples=[{"split": "train"}],
    )
    weight: float | None = optional(
        gt=0,
        le=10**9,
        description="The set's share of all samples drawn, relative to the other sets' weights; default: by size.",
        examples=[0.7],
    )


_ARGS = "Keyword arguments of the callable; a table { entry, args } among them makes an object."
_ARGS_FROM_DATA = f'{_ARGS[:-1]}; "${{dataset.NAME}}" is an attribute of the training data, as in "${{dataset.vocab_size}}".'
_ARGS_AND_REFERENCES = f"{_ARGS[:-1]}; texts may hold ${{env:NAME}}."

StopWhenText = Annotated[
    str,
    parsed_by(parse_stop_when),
    editor_hints(PATTERN, *EXAMPLES),
    Description(f'like "{EXAMPLES[0]}" or "{EXAMPLES[1]}"'),
]


MetricOfSet = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?$"),
    Description('the name of a metric, like "loss" or "val.loss"'),
]


class JobTable(Table):
    """Name and seed of the job."""

    name: Name = Field(description="Name of the job; its runs lie in runs/<name>/.", examples=["mnist"])
    seed: int = Field(
        default=0,
        ge=0,
        le=2**63 - 1,
        description="Seed of the data order and of every random stream.",
        examples=[1234],
    )
    path: list[str] = Field(
        default=["."],
        min_length=1,
        description="Folders of the job's modules, relative to the project root.",
        examples=[["."], [".", "src"]],
    )


class ModelTable(Table):
    """The model and its training step."""

    entry: Entry = Field(description="Any callable that returns an nn.Module.")
    args: Args = Field(default={}, description=_ARGS_FROM_DATA, examples=[{"width": 32}])
    loss: Entry | None = optional(
        description="Called as loss(model(inputs), targets) on batches of (inputs, targets).",
        examples=["torch.nn.functional:cross_entropy"],
    )
    step: Entry | None = optional(
        description="Called as step(model, batch), a method of the model's class on the model; returns a loss, "
        "(loss_sum, count) or a dict with `loss`, `count` and scalars to log. A step that takes (model, "
        "batch, optimizers), or a method that takes (batch, optimizers), steps the optimizers itself, "
        "and returns the loss to report.",
        examples=["examples.mnist:training_step"],
    )
    loss_count: Entry | None = optional(
        description="Called as loss_count(batch): the number of items that the loss is a mean over, such as tokens "
        "without padding; default: the samples.",
        examples=["tokens:num_targets"],
    )
    flops_per_sample: float | None = optional(
        gt=0,
        allow_inf_nan=False,
        description="Floating-point operations of training on one sample, forward and backward; MFU is logged then.",
        examples=[1.2e9],
    )
    weights: Annotated[str | None, MayRefer()] = optional(
        description="Weights to start from: a safetensors file, its index, or a folder saved by transformers; may "
        "hold ${env:NAME}.",
        examples=["base.safetensors", "models/llama"],
    )

    @model_validator(mode="after")
    def _one_of_loss_and_step(self) -> ModelTable:
        if (self.loss is None) == (self.step is None):
            raise one_of("loss", "step")
        return self


Glob = Annotated[
    str,
    Field(min_length=1, max_length=500, examples=["*.bias"]),
    Description('a glob on names of parameters, like "*.bias"'),
]
ModuleGlob = Annotated[
    str,
    Field(min_length=1, max_length=500, examples=["blocks.*"]),
    Description('a glob on names of modules, like "blocks.*"'),
]
Ndim = Annotated[int, Field(ge=0, le=100), Description("a number of dimensions, like 1")]
GroupName = Annotated[str, Field(min_length=1, max_length=100), Description("a name of at most 100 letters")]


class GroupTable(Table):
    """Parameters with options of their own; a parameter belongs to the first group that fits it."""

    match: Glob | list[Glob] | None = optional(
        description="Takes parameters by name: a glob, or several of which one must match; * also matches dots.",
        examples=["*.bias", ["*.bias", "*norm*"]],
    )
    ndim: Ndim | list[Ndim] | None = optional(
        description="Takes parameters by their number of dimensions, or several: [0, 1] are biases, norms and scalars.",
        examples=[1, [0, 1]],
    )
    module: Entry | list[Entry] | None = optional(
        description="Takes the parameters of modules of this class, or several classes, and of their submodules.",
        examples=["torch.nn:LayerNorm", ["torch.nn:LayerNorm", "torch.nn:Embedding"]],
    )
    args: Args = Field(
        default={},
        description="Options that win over optimizer.args for these parameters.",
        examples=[{"weight_decay": 0.0}],
    )
    name: GroupName | None = optional(
        description="Name of the group where rates are logged; default: its selector.",
        examples=["no decay"],
    )

    @property
    def modules(self) -> list[str]:
        """The classes of `module`, whether one or several."""
        return self.module if isinstance(self.module, list) else [] if self.module is None else [self.module]

    @model_validator(mode="after")
    def _selects_something(self) -> GroupTable:
        for key in ("match", "ndim", "module"):
            if getattr(self, key) == []:
                raise bad_key(key, codes.OUT_OF_RANGE, f"`{key}` of a group must not be empty")
        if self.match is None and self.ndim is None and self.module is None:
            message = "a group of parameters needs `match`, `ndim` or `module`"
            remedy = 'such as match = ["*.bias", "*norm*"]; all others take optimizer.args'
            raise bad_key("", codes.MISSING, message, remedy)
        return self


class OptimizerTable(Table):
    """The optimizer."""

    entry: Entry = Field(
        description="Called with the parameters, with the model if its first parameter is named `model`, or on the "
        "model if it is a method of its class; may return several in a dict, for a step that steps them.",
        examples=["torch.optim:AdamW"],
    )
    args: Args = Field(default={}, description=_ARGS_FROM_DATA, examples=[{"lr": 1e-3}])
    clip_grad_norm: float | None = optional(
        gt=0,
        description="Clip the gradient of the global batch to this norm.",
        examples=[1.0],
    )
    groups: list[GroupTable] = Field(
        default=[],
        description="Groups of parameters with options of their own, such as no weight decay for biases and norms; "
        "the first group that fits a parameter takes it; the other parameters use args.",
        examples=[[{"ndim": [0, 1], "args": {"weight_decay": 0.0}}]],
    )


class LrSchedulerTable(Table):
    """The learning-rate schedule."""

    entry: Entry = Field(
        description="Called with the optimizer.", examples=["torch.optim.lr_scheduler:CosineAnnealingLR"]
    )
    args: Args = Field(default={}, description=_ARGS_FROM_DATA, examples=[{"T_max": 1000}])
    interval: Literal["step", "epoch", "evaluation"] = Field(
        default="step",
        description="The schedule advances after each step or epoch, or after each evaluation that measures `metric`.",
    )
    metric: MetricOfSet | None = optional(
        description="The metric that a schedule such as ReduceLROnPlateau goes by, as evaluation lines name it.",
        examples=["loss", "val.loss"],
    )


class DatasetTable(Table):
    """The training data and its batches."""

    entry: Entry | None = optional(
        description="Any callable that returns a map-style dataset; with `shards`, the samples of one shard in order.",
        examples=["examples.mnist:digits"],
    )
    args: Annotated[Args, MayRefer()] = Field(
        default={}, description=_ARGS_AND_REFERENCES, examples=[{"split": "train"}]
    )
    mix: Annotated[list[MixTable], MayRefer()] = Field(
        default=[],
        description="Several sets instead of one, drawn in proportion to their weights, each in epochs of its own.",
        examples=[[{"entry": "texts:Books", "weight": 0.7}, {"entry": "texts:Code", "weight": 0.3}]],
    )
    shards: int | None = optional(
        ge=1,
        le=MOST_NODES,
        description="For data that can only be read in order: the callable also gets `shard` and `shards`, and is "
        "called for each shard.",
        examples=[16],
    )
    prepare: Entry | None = optional(
        description="Called without arguments once per node before the dataset is opened.",
        examples=["examples.mnist:download"],
    )
    collate: Collate | None = optional(
        description="Turns a list of samples into a batch: a function, or { entry, args } for an object, such as "
        "transformers' collators; default: torch's.",
        examples=[
            "examples.mnist:collate",
            {"entry": "examples.texts:padded", "args": {"padding": 0}, "partial": True},
        ],
    )
    samples: int | None = optional(
        ge=1,
        le=MOST_SAMPLES,
        description="Length of the dataset, for `plan`; checked when the run starts.",
        examples=[60_000],
    )
    sampler: SamplerTable | None = optional(
        description="Order of samples: by weights, balanced by class, or in batches of similar length; default: each "
        "once per epoch, shuffled.",
        examples=[{"balance_by": "label"}, {"bucket_by": "texts:lengths"}],
    )
    global_batch_size: int = Field(
        ge=1,
        le=10**9,
        description="Samples per optimizer step, the same at every node count.",
        examples=[256],
    )
    micro_batch_size: int | None = optional(
        ge=1,
        le=10**9,
        description="Maximum number of samples of a worker in one forward.",
        examples=[64],
    )
    num_workers: int = Field(
        default=0, ge=0, le=1024, description="Loader processes of each worker.", examples=[2]
    )
    tail: Literal["spill", "short", "drop"] = Field(
        default="spill",
        description="The last samples of an epoch, which fill no batch: begin the next epoch's first batch, make a "
        "short batch, or are dropped.",
    )

    @model_validator(mode="after")
    def _one_of_entry_and_mix(self) -> DatasetTable:
        if (self.entry is None) == (not self.mix):
            raise one_of("entry", "mix")
        return self


class TrainTable(Table):
    """Length and manner of training."""

    epochs: int | None = optional(ge=1, le=10**9, description="Passes over the dataset.", examples=[5])
    steps: int | None = optional(ge=1, le=10**12, description="Optimizer steps.", examples=[2000])
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="bf16: autocast; fp16: autocast with gradient scaling."
    )
    tf32: bool | None = optional(
        description="On NVIDIA GPUs, compute float32 products of matrices, convolutions and recurrent layers by TF32 (faster, with "
        "10 bits of mantissa), or none of them; default: torch's, which is convolutions and recurrent layers alone.",
    )
    channels_last: bool = Field(
        default=False,
        description="Keep images and weights with four dimensions in the channels-last memory format, in which convolutions in "
        "half precision are faster.",
    )
    compile: bool = Field(
        default=False,
        description="Compile the model with torch.compile; its cache is kept for the run and beside the snapshots.",
    )
    gradient_checkpointing: bool | Annotated[list[ModuleGlob], Field(min_length=1)] = Field(
        default=False,
        description="Compute activations again in the backward pass instead of keeping them: less memory, more time, the same "
        "bits. true: models of transformers and timm; else globs of module names, each computed again as a whole.",
        examples=[True, ["blocks.*"]],
    )
    ema: float | None = optional(
        gt=0,
        lt=1,
        description="Keep an exponential moving average of the weights with this decay.",
        examples=[0.999],
    )
    threads: int | None = optional(
        ge=1,
        le=1024,
        description="CPU threads per worker; default: the node's cores shared out.",
        examples=[1],
    )
    on_nonfinite: Literal["stop", "skip"] = Field(
        default="stop", description="On a loss that is not finite: end the run, or leave the step out."
    )
    consistency: Literal["batch", "exact"] = Field(
        default="batch", description="exact: bitwise the same weights at any world size."
    )
    virtual_shards: int | None = optional(
        ge=1,
        le=MOST_NODES,
        description="exact only; at least the largest world size.",
        examples=[8],
    )
    compare_replicas: StepsText | Literal["never"] = Field(
        default="1000 steps",
        description="Interval of comparisons of the workers' parameters, besides those before each snapshot: they "
        "find a corrupted worker.",
        examples=["1000 steps", "never"],
    )

    time_limit: DurationText | None = optional(
        description="A launch ends after this time, with a snapshot, as on SIGTERM (exit code 75); the same command "
        "resumes the run.",
        examples=["23.5 h", "30 min"],
    )

    stop_when: StopWhenText | None = optional(
        description="End training when a metric of an evaluation has not been better for some evaluations in a row "
        '(with min or max before it if neither the loss nor `best` tells; "by 0.001" for a least '
        "difference), or is above or below a number.",
    )

    @model_validator(mode="after")
    def _one_of_epochs_and_steps(self) -> TrainTable:
        if (self.epochs is None) == (self.steps is None):
            raise one_of("epochs", "steps")
        return self


class DdpTable(Table):
    """Options of DistributedDataParallel."""

    find_unused_parameters: bool = Field(
        default=False, description="For models that leave parameters out of some steps."
    )
    sync_batchnorm: bool = Field(default=False, description="Replace BatchNorm by SyncBatchNorm (CUDA only).")
    bucket_cap_mb: int | None = optional(
        ge=1,
        le=100_000,
        description="Size of a gradient bucket in MiB.",
        examples=[25],
    )
    gradient_as_bucket_view: bool = Field(
        default=False, description="Gradients are views of the buckets: saves their memory."
    )
