"""The weight of a changed job key for a run that continues: one table for job files and scripts.

A script on `elasticflow.join` states some of these keys by arguments of its calls; they weigh as much there.
"""

from __future__ import annotations

from typing import Any, Literal

Weight = Literal["harmless", "trajectory", "corrupting"]

_OTHER_STATE = "the snapshots hold other state than the job would"
_OTHER_CURVE = "the rest of the run is trained in another way"
_OTHER_OPTIONS = f"{_OTHER_CURVE}; what the optimizer has learned stays"
_OTHER_RATES = f"{_OTHER_CURVE}: with the rates of a run that had begun like this"

_OTHER_EVALUATION = (
    "the weights do not depend on it; if the data is another, the best value is looked for anew"
)

# The longest prefix of a key that stands here decides; a key in no table changes the trajectory.
_WEIGHTS: dict[str, tuple[Weight, str]] = {
    "job": ("harmless", "names and places only"),
    "job.seed": ("corrupting", "the order of samples is another: some would be repeated, some left out"),
    "script": ("harmless", "a script resumes from its own checkpoint"),
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
    "train.channels_last": ("harmless", "equal up to rounding"),
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
    "parallel": ("harmless", "the model is cut into other parts; snapshots are restored at any degree"),
    "parallel.offload": ("harmless", "equal up to rounding"),
    "env": ("harmless", "libraries and the job's code read it, from here on"),
    "hooks": ("harmless", "a hook that changes what is trained is refused when it does"),
    "nodes": ("harmless", "the global batch is the same at every world size"),
    "nodes.device": ("harmless", "equal up to rounding"),
    "restarts": ("harmless", "counts from now on"),
    "snapshots": ("harmless", "counts from now on"),
    "snapshots.include": ("corrupting", _OTHER_STATE),
    "snapshots.uri": ("trajectory", "the run starts again unless its snapshots were moved there"),
    "logging": ("harmless", "counts from now on"),
    "notify": ("harmless", "counts from now on"),
    "torchrun": ("harmless", "counts from now on"),
    "kubernetes": ("harmless", "where the nodes run does not change what is trained"),
    "slurm": ("harmless", "where the nodes run does not change what is trained"),
    "ray": ("harmless", "where the nodes run does not change what is trained"),
}

# In exact mode the bits are promised, not only the curve.
BITS = 'train.consistency = "exact" promises bits that this may change'
EXACT_WEIGHTS: dict[str, tuple[Weight, str]] = {
    "nodes.device": ("trajectory", BITS),
    "parallel.offload": ("trajectory", BITS),
    "train.channels_last": ("trajectory", BITS),
    "train.compile": ("trajectory", BITS),
    "train.threads": ("trajectory", BITS),
    "env": ("trajectory", BITS),
}

# Keys of the evaluation whose metric the learning rate goes by.
OF_SCHEDULE: tuple[Weight, str] = (
    "trajectory",
    "lr_scheduler.metric: the learning rate follows from this evaluation",
)
KEYS_OF_SCHEDULE = frozenset({
    "entry", "args", "samples", "every", "batch_size", "collate", "metrics", "weights", "step",
})  # fmt: skip

# Keys whose coming or going gives the snapshot other parts.
LISTS = ("optimizer.groups", "dataset.mix")  # of tables, compared one by one
_PARTS = frozenset({"lr_scheduler.entry", "lr_scheduler.metric", "train.ema"})


def weigh(key: str, was: Any, now: Any) -> tuple[Weight, str]:
    """Return the weight of a change of *key* from *was* to *now*, and the reason.

    Args:
        key: A dotted key of the job file, without numbers of lists and names of sets.
        was: Value of the run so far; None: absent.
        now: Value to continue with; None: absent.
    """
    if key in _PARTS and (was is None or now is None):
        return "corrupting", _OTHER_STATE
    if key == "train.precision" and "fp16" in (was, now):
        return "corrupting", f"{_OTHER_STATE}: fp16 has a gradient scaler"
    parts = key.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_WEIGHTS[prefix] for prefix in prefixes if prefix in _WEIGHTS), ("trajectory", _OTHER_CURVE))
