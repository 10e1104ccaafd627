"""The job file's tables as frozen pydantic models: closed, strict, bounded (floor 1).

One model per table. A model checks its own table; what needs several tables is checked in
`spec/checks.py`. Defaults stand here and nowhere else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from elasticflow.spec.units import parse_duration, parse_interval

MOST_NODES = 65_536
MOST_SAMPLES = 10**15

ENTRY = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"


def _interval(text: str) -> str:
    parse_interval(text)
    return text


def _duration(text: str) -> str:
    parse_duration(text)
    return text


Entry = Annotated[str, Field(pattern=ENTRY, max_length=500, examples=["examples.mnist:Net"])]
"""`package.module:attribute`."""
IntervalText = Annotated[str, AfterValidator(_interval), Field(examples=["500 steps", "10 min", "1 epoch"])]
DurationText = Annotated[str, AfterValidator(_duration), Field(examples=["30 s", "10 min"])]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Args = dict[str, Any]


class Table(BaseModel):
    """A closed, frozen, strict table: "8" is not 8, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class JobTable(Table):
    """Who the job is."""

    name: Name = Field(description="Name of the job; its runs lie in runs/<name>/.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the data order and of every random stream.")
    path: list[str] = Field(default=["."], min_length=1, description="Where factories are found, relative to the project root.")


class ModelTable(Table):
    """The model and what one training step does."""

    entry: Entry = Field(description="Any callable that returns an nn.Module.")
    args: Args = Field(default={}, description="Keyword arguments of the callable.")
    loss: Entry | None = Field(default=None, description="Called as loss(model(inputs), targets) on batches of (inputs, targets).")
    step: Entry | None = Field(default=None, description="Called as step(model, batch); returns a loss, (loss_sum, count) or a dict with `loss`.")
    weights: str | None = Field(default=None, description="A safetensors file to start from.")

    @model_validator(mode="after")
    def _one_of_loss_and_step(self) -> ModelTable:
        if (self.loss is None) == (self.step is None):
            raise ValueError("needs exactly one of `loss` and `step`")
        return self


class OptimizerTable(Table):
    """The optimizer."""

    entry: Entry = Field(description="Called with the parameters, or with the model if its first parameter is named `model`.")
    args: Args = Field(default={}, description="Keyword arguments of the callable.")
    clip_grad_norm: float | None = Field(default=None, gt=0, description="Clip the gradient of the global batch to this norm.")


class LrSchedulerTable(Table):
    """The learning-rate schedule."""

    entry: Entry = Field(description="Called with the optimizer.")
    args: Args = Field(default={}, description="Keyword arguments of the callable.")
    interval: Literal["step", "epoch"] = Field(default="step", description="When the schedule advances.")


class DatasetTable(Table):
    """The training data and how it is cut into batches."""

    entry: Entry = Field(description="Any callable that returns a map-style dataset.")
    args: Args = Field(default={}, description="Keyword arguments of the callable.")
    prepare: Entry | None = Field(default=None, description="Called without arguments once per node before the dataset is opened.")
    collate: Entry | None = Field(default=None, description="Turns a list of samples into a batch; default: torch's.")
    samples: int | None = Field(default=None, ge=1, le=MOST_SAMPLES, description="Length of the dataset; lets `plan` know more, checked when the run starts.")
    global_batch_size: int = Field(ge=1, le=10**9, description="Samples per optimizer step, the same at every node count.")
    micro_batch_size: int | None = Field(default=None, ge=1, le=10**9, description="Most samples one worker takes in one forward.")
    num_workers: int = Field(default=0, ge=0, le=1024, description="Loader processes of each worker.")
    tail: Literal["spill", "short", "drop"] = Field(default="spill", description="What becomes of the samples at an epoch's end that fill no batch.")


class EvaluationTable(Table):
    """Metrics over a second dataset, every sample once."""

    entry: Entry = Field(description="Any callable that returns a map-style dataset.")
    args: Args = Field(default={}, description="Keyword arguments of the callable.")
    every: IntervalText | list[IntervalText] = Field(default="1 epoch", description="When to evaluate; always at the end.")
    batch_size: int | None = Field(default=None, ge=1, le=10**9, description="Samples per forward; default: dataset.micro_batch_size, else 256.")
    metrics: dict[str, Entry] = Field(default={}, description="Name to callable(outputs, targets) -> mean over the batch; with model.step: callable(model, batch).")
    best: str | None = Field(default=None, pattern=r"^(max|min) [A-Za-z_][A-Za-z0-9_]*$", description='What keep.best means: "max accuracy", "min loss".')

    @model_validator(mode="after")
    def _best_names_a_metric(self) -> EvaluationTable:
        if self.best is not None and self.best.split()[1] not in {*self.metrics, "loss"}:
            names = ", ".join(sorted({*self.metrics, "loss"}))
            raise ValueError(f'best = "{self.best}" names no metric; there are: {names}')
        return self


class TrainTable(Table):
    """How long and how to train."""

    epochs: int | None = Field(default=None, ge=1, le=10**9, description="Passes over the dataset.")
    steps: int | None = Field(default=None, ge=1, le=10**12, description="Optimizer steps.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(default="fp32", description="bf16: autocast; fp16: autocast with gradient scaling.")
    compile: bool = Field(default=False, description="Compile the model with torch.compile.")
    ema: float | None = Field(default=None, gt=0, lt=1, description="Keep an exponential moving average of the weights with this decay.")
    threads: int | None = Field(default=None, ge=1, le=1024, description="CPU threads per worker; default: the node's cores shared out.")
    on_nonfinite: Literal["stop", "skip"] = Field(default="stop", description="What a loss that is not finite does.")
    consistency: Literal["batch", "exact"] = Field(default="batch", description="exact: bitwise the same weights at any world size.")
    virtual_shards: int | None = Field(default=None, ge=1, le=MOST_NODES, description="exact only; at least the largest world size.")

    @model_validator(mode="after")
    def _one_of_epochs_and_steps(self) -> TrainTable:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError("needs exactly one of `epochs` and `steps`")
        return self


class DdpTable(Table):
    """Options of DistributedDataParallel."""

    find_unused_parameters: bool = Field(default=False, description="For models that leave parameters out of some steps.")
    sync_batchnorm: bool = Field(default=False, description="Replace BatchNorm by SyncBatchNorm (CUDA only).")
    bucket_cap_mb: int | None = Field(default=None, ge=1, le=100_000, description="Size of a gradient bucket in MiB.")
    gradient_as_bucket_view: bool = Field(default=False, description="Gradients are views of the buckets: saves their memory.")


class NodesTable(Table):
    """The range of nodes the job may run on."""

    min: int = Field(default=1, ge=1, le=MOST_NODES, description="Fewest nodes the job trains on.")
    max: int = Field(default=1, ge=1, le=MOST_NODES, description="Most nodes the job trains on.")
    nproc_per_node: Literal["auto", "gpu", "cpu"] | Annotated[int, Field(ge=1, le=1024)] = Field(default="auto", description="Workers per node; auto: one per GPU, else one per core.")
    endpoint: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+:\d{1,5}$", description="host:port of the rendezvous, for several machines.")
    interface: str | None = Field(default=None, pattern=r"^[A-Za-z0-9._-]+$", description="Network interface the workers talk over.")

    @model_validator(mode="after")
    def _min_is_at_most_max(self) -> NodesTable:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is greater than max ({self.max})")
        return self


class RestartsTable(Table):
    """What a failure costs."""

    budget: int = Field(default=3, ge=0, le=10**6, description="Failures in one window; resizes, drains and preemptions are free.")
    refill: IntervalText | None = Field(default=None, description='The budget is full again after this much progress or time: "1 h", "1000 steps".')
    hang_timeout: DurationText = Field(default="10 min", description="A rank without progress for this long is a failure.")


class KeepTable(Table):
    """Which snapshots stay."""

    last: int = Field(default=3, ge=1, le=10**6, description="The newest ones.")
    best: int | None = Field(default=None, ge=1, le=10**6, description="The best ones by evaluation.best.")
    every: IntervalText | None = Field(default=None, description='One at each of these: "5000 steps", "1 epoch".')


class SnapshotsTable(Table):
    """When snapshots are taken, where they go, which stay."""

    uri: str | None = Field(default=None, min_length=1, description="Any fsspec URL or path; default: the run folder.")
    every: IntervalText | list[IntervalText] = Field(default=["10 min", "1 epoch"], description="Any of these; always at the end and on drain.")
    memory: IntervalText | None = Field(default=None, description="A tier in the node's memory.")
    keep: KeepTable = Field(default=KeepTable(), description="Which snapshots stay.")
    grace: DurationText = Field(default="30 s", description="Time a preempted worker has.")
    options: Args = Field(default={}, description="For the file system; secrets come from the environment.")


class LoggingTable(Table):
    """What is logged."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="Lines below it are dropped.")
    every: Annotated[str, Field(pattern=r"^\d{1,9} steps?$")] = Field(default="1 step", description="A metrics line at each of these.")
    sinks: list[Literal["tensorboard", "mlflow", "wandb", "trackio"]] = Field(default=[], description="Where metrics go besides the run folder.")


class TorchrunTable(Table):
    """Every torchrun option that no other table owns."""

    rdzv_backend: Literal["c10d", "etcd-v2", "static"] = Field(default="c10d", description="Rendezvous backend of the torchrun command.")
    rdzv_conf: dict[str, str | int | float | bool] = Field(default={}, description="Extra rendezvous configuration.")
    start_method: Literal["fork", "spawn"] = Field(default="fork", description="How `elasticflow run` starts workers; fork: from a warm server.")
    monitor_interval: float = Field(default=0.1, gt=0, le=60, description="Seconds between torchrun's looks at its workers.")
    tee: Annotated[str, Field(pattern=r"^[0-3](,?\d*:[0-3])*$")] | None = Field(default=None, description="torchrun --tee.")
    redirects: Annotated[str, Field(pattern=r"^[0-3](,?\d*:[0-3])*$")] | None = Field(default=None, description="torchrun --redirects.")
    local_ranks_filter: str | None = Field(default=None, description="torchrun --local-ranks-filter.")
    numa_binding: Literal["node", "socket", "exclusive", "core-complex"] | None = Field(default=None, description="torchrun --numa-binding.")
    log_dir: str | None = Field(default=None, description="torchrun --log-dir.")


class Job(Table):
    """A whole job file, resolved: `extends` merged, `--set` applied, defaults filled in."""

    job: JobTable
    model: ModelTable
    optimizer: OptimizerTable
    lr_scheduler: LrSchedulerTable | None = None
    dataset: DatasetTable
    evaluation: EvaluationTable | None = None
    train: TrainTable
    ddp: DdpTable = DdpTable()
    nodes: NodesTable = NodesTable()
    restarts: RestartsTable = RestartsTable()
    snapshots: SnapshotsTable = SnapshotsTable()
    logging: LoggingTable = LoggingTable()
    torchrun: TorchrunTable = TorchrunTable()


RESERVED_TABLES = ("slurm", "kubernetes", "notify", "matrix")
"""Tables of the design that this version does not read; named in the error instead of "unknown"."""
