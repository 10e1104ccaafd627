"""A package that the gallery's jobs name: read by the checks, never imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shop.losses import weighted as weighted_loss

WIDTH = 16
SIZES = [8, 16]


class Net(nn.Module):
    """A model."""

    def __init__(self, width: int = 16, *, depth: int = 2, dropout: float | None = None) -> None:
        super().__init__()

    @classmethod
    def of(cls, size: Literal["small", "large"] = "small", *, width: int = 16) -> Net:
        """Make one."""
        return cls(width)


wide_net = partial(Net, 1024, depth=4)


@dataclass
class Recipe:
    """A model's numbers."""

    sizes: list[int] = field(default_factory=list)


class Nets:
    """Makes models."""

    @staticmethod
    def small() -> Net:
        """Make a small one."""
        return Net(8)


class Encoder(nn.Module):
    """A model with an argument that must be given."""

    def __init__(self, vocabulary: int, width: int = 16) -> None:
        super().__init__()


class Images(Dataset):
    """A dataset as it should be."""

    def __init__(self, split: str) -> None: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


class NoLength(Dataset):
    """A dataset that forgot its length."""

    def __getitem__(self, index: int) -> object: ...


class Stream(IterableDataset):
    """A stream."""

    def __iter__(self): ...


def lines(path: str = "."):
    """Yield samples."""
    yield from open(path)


def endless():
    """Return a stream."""
    return Stream()


def no_optimizer():
    """Take nothing."""


def loss_of_one(outputs):
    """Take too little."""


def accuracy(outputs, targets):
    """Take what a metric gets."""


def step(model, batch):
    """Take what a step gets."""


class Curriculum:
    """Gives its state and cannot take it back."""

    def state_dict(self):
        """Return nothing."""
        return {}


class Whole(Curriculum):
    """Takes it back, too."""

    def load_state_dict(self, state):
        """Do nothing."""


forgetful = Curriculum()
curriculum = Whole()


def rows(folder: str, shard: int, shards: int):
    """Yield the samples of one shard."""
    yield from sorted(folder)[shard::shards]


def batches():
    """Return a loader."""
    return DataLoader(Images("train"))


def sgd(params, lr: float | Tensor = 1e-3, momentum=0.0, nesterov=False, betas: tuple[float, float] = (0.9, 0.99)):
    """Take numbers."""


def padded(samples, padding):
    """Make a batch."""


def f1_score(y_true, y_pred, average="binary"):
    """Take the targets first."""


def pair_step(model, x, y):
    """Take a batch apart."""
