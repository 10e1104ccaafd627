"""How long training is, as far as the job file tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.job import DatasetTable, TrainTable
    from elasticflow.jobfile.tables.units import Interval


def num_steps(train: TrainTable, dataset: DatasetTable, samples: int) -> int:
    """Return the optimizer steps of a whole run over a dataset of so many samples."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    if dataset.tail == "spill":
        return -(-train.epochs * samples // dataset.global_batch_size)
    return train.epochs * steps_per_epoch(dataset, samples)[0]


def steps_per_epoch(dataset: DatasetTable, samples: int) -> tuple[int, int]:
    """Return the fewest and the most optimizer steps that end within one epoch; the same at every world size."""
    full, up = samples // dataset.global_batch_size, -(-samples // dataset.global_batch_size)
    return {"spill": (full, up), "short": (up, up), "drop": (full, full)}[dataset.tail]


class Horizon(NamedTuple):
    """The length of a whole run; None for what only the data tells.

    Attributes:
        steps: Optimizer steps.
        epochs: Passes over the data that are begun.
        samples: Samples consumed.
    """

    steps: int | None
    epochs: int | None
    samples: int | None

    def is_beyond(self, interval: Interval) -> bool:
        """Return whether an interval is longer than the run for certain; a time never is."""
        length = {"step": self.steps, "epoch": self.epochs, "sample": self.samples, "s": None}[interval.unit]
        return length is not None and interval.amount > length

    def __str__(self) -> str:
        """Return the length as the job file says it."""
        if self.epochs is None or self.steps is None:
            return (
                counted(self.steps, "step") if self.steps is not None else counted(self.epochs or 0, "epoch")
            )
        return f"{counted(self.steps, 'step')} ({counted(self.epochs, 'epoch')})"


def counted(number: int, what: str) -> str:
    """Return a number of things in words: `1 step`, `5 steps`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def horizon_of(train: TrainTable, dataset: DatasetTable | None) -> Horizon:
    """Return how long training is, the length of the data being `dataset.samples` or unknown."""
    samples = None if dataset is None else dataset.samples
    batch = None if dataset is None else dataset.global_batch_size
    if dataset is None or samples is None:
        consumed = None if train.steps is None or batch is None else train.steps * batch
        return Horizon(train.steps, train.epochs, consumed)
    steps = num_steps(train, dataset, samples)
    consumed = steps * dataset.global_batch_size if train.epochs is None else train.epochs * samples
    per_epoch = steps_per_epoch(dataset, samples)[0]
    if train.epochs is not None:
        return Horizon(steps, train.epochs, consumed)
    if dataset.tail == "spill":
        return Horizon(steps, -(-consumed // samples), consumed)
    return Horizon(steps, -(-steps // per_epoch) if per_epoch else None, consumed)
