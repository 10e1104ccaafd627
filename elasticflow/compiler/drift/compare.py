"""What differs between two resolved jobs, and how much it matters to a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.compiler.inputs.job_json import public_tables, to_json
from elasticflow.jobfile.tables.evaluation import without_set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.tables.job import Job

Weight = Literal["harmless", "trajectory", "corrupting"]

_OTHER_STATE = "the snapshots hold other state than the job would"
_OTHER_CURVE = "the rest of the run is trained in another way"
_OTHER_OPTIONS = f"{_OTHER_CURVE}; what the optimizer has learned stays"
_OTHER_RATES = f"{_OTHER_CURVE}: with the rates of a run that had begun like this"

_OTHER_EVALUATION = (
    "the weights do not depend on it; if the data is another, the best value is looked for anew"
)

# The longest prefix of a key that stands here decides; what is in no table of this kind changes the trajectory.
_WEIGHTS: dict[str, tuple[Weight, str]] = {
    "job": ("harmless", "names and places only"),
    "job.seed": ("corrupting", "the order of samples is another: some would be repeated, some left out"),
    "script": ("harmless", "a script goes on from what it has saved"),
    "model.entry": ("corrupting", _OTHER_STATE),
    "model.args": ("corrupting", _OTHER_STATE),
    "model.flops_per_sample": ("harmless", "a number in logs only"),
    "model.loss": ("trajectory", "another loss from here on"),
    "model.step": ("trajectory", "another training step from here on"),
    "model.weights": ("harmless", "a resumed run takes its weights from the snapshot"),
    "optimizer.entry": ("corrupting", _OTHER_STATE),
    "optimizer.args": ("trajectory", _OTHER_OPTIONS),
    "optimizer.clip_grad_norm": ("trajectory", _OTHER_CURVE),
    "optimizer.groups": ("corrupting", "the snapshots hold the optimizer's state by group"),
    "optimizer.groups.args": ("trajectory", _OTHER_OPTIONS),
    "optimizer.groups.name": ("harmless", "a name in logs only"),
    "lr_scheduler": ("trajectory", _OTHER_RATES),
    "lr_scheduler.entry": ("corrupting", _OTHER_STATE),
    "dataset": ("trajectory", _OTHER_CURVE),
    "dataset.entry": ("corrupting", "a position in one dataset means nothing in another"),
    "dataset.args": ("trajectory", "other data is refused when the run starts, by its fingerprint"),
    "dataset.prepare": ("harmless", "the data itself is compared when the run starts"),
    "dataset.samples": ("harmless", "compared with the data when the run starts"),
    "dataset.shards": ("corrupting", "positions are cursors in so many shards, which mean nothing in others"),
    "dataset.sampler": ("corrupting", "a position in one order of samples means other samples in another"),
    "dataset.mix": ("corrupting", "a position in one mixture means other samples in another"),
    "dataset.mix.args": ("trajectory", "other data is refused when the run starts, by its fingerprint"),
    "dataset.micro_batch_size": ("harmless", "the global batch stays the same"),
    "dataset.num_workers": ("harmless", "who loads a sample does not change it"),
    "evaluation": ("harmless", "the weights do not depend on it"),
    "evaluation.args": ("harmless", _OTHER_EVALUATION),
    "evaluation.best": ("harmless", "the weights do not depend on it; the best value is looked for anew"),
    "evaluation.entry": ("harmless", _OTHER_EVALUATION),
    "evaluation.metrics": (
        "harmless",
        "the weights do not depend on it; where it is the metric of `best`, the best value is looked for anew",
    ),
    "evaluation.samples": ("harmless", _OTHER_EVALUATION),
    "evaluation.weights": ("harmless", "the weights do not depend on it; the best value is looked for anew"),
    "train": ("trajectory", _OTHER_CURVE),
    "train.epochs": ("harmless", "the run ends sooner or later"),
    "train.steps": ("harmless", "the run ends sooner or later"),
    "train.stop_when": ("harmless", "the run ends sooner or later"),
    "train.time_limit": ("harmless", "counts from now on"),
    "train.compile": ("harmless", "equal up to rounding"),
    "train.gradient_checkpointing": ("harmless", "the same numbers, computed again instead of kept"),
    "train.threads": ("harmless", "equal up to rounding"),
    "train.compare_replicas": ("harmless", "what is compared does not change"),
    "train.consistency": (
        "trajectory",
        "bits, random streams and BatchNorm's batches are others from here on",
    ),
    "train.virtual_shards": (
        "trajectory",
        "bits, random streams and BatchNorm's batches are others from here on",
    ),
    "ddp": ("harmless", "equal up to rounding"),
    "ddp.sync_batchnorm": ("trajectory", "batch statistics are taken over other samples"),
    "env": ("harmless", "libraries and the job's code read it, from here on"),
    "hooks": ("harmless", "a hook that changes what is trained is refused when it does"),
    "nodes": ("harmless", "the global batch is the same at every world size"),
    "restarts": ("harmless", "counts from now on"),
    "snapshots": ("harmless", "counts from now on"),
    "snapshots.include": ("corrupting", _OTHER_STATE),
    "snapshots.uri": ("trajectory", "the run starts again unless its snapshots were moved there"),
    "logging": ("harmless", "counts from now on"),
    "notify": ("harmless", "counts from now on"),
    "torchrun": ("harmless", "counts from now on"),
    "kubernetes": ("harmless", "where the nodes run does not change what is trained"),
    "slurm": ("harmless", "where the nodes run does not change what is trained"),
}

# In exact mode the bits are promised, not only the curve.
_BITS = 'train.consistency = "exact" promises bits that this may change'
_EXACT_WEIGHTS: dict[str, tuple[Weight, str]] = {
    "train.compile": ("trajectory", _BITS),
    "train.threads": ("trajectory", _BITS),
    "env": ("trajectory", _BITS),
}

# Batches of like length are cut where a batch ends.
_CUTS = "dataset.sampler.bucket_by: the order of samples depends on it"
_BUCKETED_WEIGHTS: dict[str, tuple[Weight, str]] = {
    "dataset.global_batch_size": ("corrupting", _CUTS),
    "dataset.tail": ("corrupting", _CUTS),
}

# Keys whose coming or going gives the snapshot other parts.
_LISTS = ("optimizer.groups", "dataset.mix")  # of tables, compared one by one
_PARTS = frozenset({"lr_scheduler.entry", "train.ema"})


@dataclass(frozen=True)
class Difference:
    """One key that differs.

    Attributes:
        key: Dotted, as in the job file: `optimizer.args.lr`.
        old: Value of the run so far; None if the key was not there.
        new: Value now; None if the key is gone.
        weight: What it does to a run that goes on: nothing, another trajectory, or corruption.
        reason: Why it has that weight.
    """

    key: str
    old: Any
    new: Any
    weight: Weight
    reason: str

    @property
    def is_of_the_job(self) -> bool:
        """Whether it is a key of the job, not one of what else a launch is made from (`compiler/drift/origins.py`)."""
        return self.key.partition(".")[0] not in {"sources", "versions", "machine", "git"}

    def to_json(self) -> dict[str, Any]:
        """Return it as job.json and events hold it."""
        return dict(to_json(asdict(self)))


def compare(old: Job, new: Job) -> list[Difference]:
    """Return what differs, in the order of the job file, keys that came last."""
    before, after = dict(_leaves(public_tables(old))), dict(_leaves(public_tables(new)))
    is_script = new.script is not None
    is_exact = not is_script and new.train.consistency == "exact"
    own_weights = dict(_EXACT_WEIGHTS) if is_exact else {}
    if not is_script and new.dataset.sampler is not None and new.dataset.sampler.bucket_by is not None:
        own_weights |= _BUCKETED_WEIGHTS
    differences = []
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        if was != now or type(was) is not type(now):
            weight = own_weights.get("env" if key.startswith("env.") else key) or _weigh(key, was, now)
            differences.append(Difference(key, was, now, *weight))
    return differences


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):  # an empty one has no keys to differ in
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif key in _LISTS:
        for number, group in enumerate(value):
            yield from _leaves(group, f"{key}.{number}")
    else:
        yield key, value


def _weigh(key: str, was: Any, now: Any) -> tuple[Weight, str]:
    if key in _PARTS and (was is None or now is None):
        return "corrupting", _OTHER_STATE
    if key == "train.precision" and "fp16" in (was, now):
        return "corrupting", f"{_OTHER_STATE}: fp16 has a gradient scaler"
    parts = [str(part) for part in without_set(tuple(key.split(".")))]
    if ".".join(parts[:2]) in _LISTS and len(parts) > 2:
        del parts[2]  # the number of the table
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_WEIGHTS[prefix] for prefix in prefixes if prefix in _WEIGHTS), ("trajectory", _OTHER_CURVE))
