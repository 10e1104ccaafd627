"""The job's functions and classes as train.py calls them, one by one: what `--deep` tries out, and standbys trace."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime.evaluation.metric import Metric  # = import.metric
from elasticflow.runtime.hooks.hooks import Hook  # = import.hooks
from elasticflow.runtime.data.mixture import MixedDataset  # = import.mixture
from elasticflow.runtime.model.gradient_checkpointing import checkpoint_activations  # = import.ac
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.training.loss import with_count  # = import.count
from elasticflow.runtime.training.param_groups import Group, parameter_groups  # = import.groups
from elasticflow.runtime.training.several_optimizers import CountedSchedule  # = import.schedules
from elasticflow.runtime.training.unwrap import unwrap_model  # = import.unwrap
from torch import Tensor, nn  # = import.torch

ROOT = Path(__file__).parents[5]  # = root
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # = path
SEED = 1234  # = seed
# if: values
VALUES = {"vocab_size": "model.args.vocab_size"}  # = values
dataset: Any = None  # what `--deep` has opened
# end


def build_model() -> nn.Module:
    """Return the model with its initial weights."""
    from examples.mnist import Net  # = model.import

    random_streams.begin(SEED, "model")
    return Net(width=16)  # = model


# if: checkpointing
def checkpoint(model: nn.Module) -> None:
    """Have the model's activations computed again in the backward pass."""
    checkpoint_activations(model, ["blocks.*"])  # = checkpointing


# end
def training_step(model: nn.Module, batch: Any) -> Any:  # = step.def
    """Return the loss of one micro-batch."""
    from torch.nn.functional import cross_entropy  # = step.import

    inputs, targets = batch  # = step.unpack
    return cross_entropy(model(inputs), targets)  # = step.call


# if: groups
def parameter_groups_of_job() -> list[Group]:
    """Return what says which options each parameter has."""
    from torch.nn import LayerNorm  # = groups.import

    return [Group(module=LayerNorm, args={"weight_decay": 0.0})]  # = groups


# end
def build_optimizer(model: nn.Module) -> Any:
    """Return the optimizer, or several in a dict or list."""
    from torch.optim import AdamW  # = optimizer.import

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=1e-3)  # = optimizer


# if: scheduler
def build_scheduler(optimizer: Any) -> Any:  # = scheduler.def
    """Return the learning-rate schedule."""
    from torch.optim.lr_scheduler import CosineAnnealingLR  # = scheduler.import

    random_streams.begin(SEED, "scheduler")
    return CosineAnnealingLR(optimizer, T_max=1000)  # = scheduler


# end
# if: not shards
def build_dataset() -> Any:
    """Return the training data."""
    from examples.mnist import digits  # = dataset.import

    random_streams.begin(SEED, "data")
    return MixedDataset(digits(split="train"))  # = dataset


# end
# if: shards
def build_dataset(shard: int, shards: int) -> Any:  # type: ignore[no-redef]  # noqa: F811  # = dataset.def
    """Return what yields the samples of one data shard in order."""
    from tests.compiler.golden.pieces import rows  # = dataset.import

    return rows("data", shard, shards)  # = dataset


# end
# if: sampler
def sampler_values() -> Any:
    """Return the column, the attribute or the function that says how samples are drawn."""
    from tests.compiler.golden.pieces import lengths  # = sampler.import

    return lengths  # = sampler


# end
# if: collate
def collate(samples: list[Any]) -> Any:
    """Return the batch made of these samples."""
    from torch.utils.data import default_collate  # = collate.import

    return default_collate(samples)  # = collate


# end
# if: collator
def build_collator() -> Any:
    """Return what makes a batch of a list of samples."""
    from tests.compiler.golden.pieces import Padded  # = collator.import

    random_streams.begin(SEED, "collate")
    return Padded(padding=0)  # = collator


# end
# if: evaluation_of_one
def build_evaluation_dataset() -> Any:
    """Return the evaluation data."""
    from examples.mnist import digits  # = evaluation.import

    random_streams.begin(SEED, "data")
    return digits(split="test")  # = evaluation


# end
# each: sets
def build_evaluation_dataset_val() -> Any:  # = set.def
    """Return the data of one of several evaluation sets."""
    from examples.mnist import digits  # = set.import

    random_streams.begin(SEED, "data")
    return digits(split="test")  # = set


# end
# each: collates
def collate_of_set_0() -> Any:  # = own.def
    """Return what makes a batch of an evaluation set's samples."""
    from tests.compiler.golden.pieces import Padded  # = own.import

    random_streams.begin(SEED, "collate")
    return Padded(padding=0)  # = own


# end
# each: metrics
def metric_0_accuracy() -> Any:  # = metric.def
    """Return what measures a metric."""
    from examples.mnist import accuracy  # = metric.import

    return accuracy  # = metric


# end
# each: hooks
def make_on_step() -> Hook:  # = hook.def
    """Return a hook, with the arguments that the job gives it."""
    from tests.compiler.golden.pieces import sample  # = hook.import

    return Hook(sample, "mine:sample", every=100)  # = hook


# end
