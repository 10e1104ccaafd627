"""The length of training, as far as the job file tells, and intervals that are longer than it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import set_tables
from elasticflow.jobfile.text.layers import value_at
from elasticflow.system.units import parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.training import DatasetTable, TrainTable
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source
    from elasticflow.system.units import Interval


def samples_per_epoch(dataset: DatasetTable, samples: int | None) -> int | None:
    """Return the samples of an epoch: the length of the data, unless the job gives the draws of an epoch."""
    return samples if dataset.sampler is None or dataset.sampler.draws is None else dataset.sampler.draws


def num_steps(train: TrainTable, dataset: DatasetTable, samples: int) -> int:
    """Return the optimizer steps of a whole run; *samples*: of an epoch."""
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


class TrainingLength(NamedTuple):
    """The length of a whole run; None for a figure that only the data tells.

    Attributes:
        epochs: Passes over the data, the last of which may be cut short.
    """

    steps: int | None
    epochs: int | None
    samples: int | None

    def is_beyond(self, interval: Interval) -> bool:
        """Return whether an interval is certainly longer than the run; never true for a time."""
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


def length_of_training(train: TrainTable, dataset: DatasetTable | None) -> TrainingLength:
    """Return the length of training, as far as `dataset.samples` or the draws of an epoch tell."""
    samples = None if dataset is None else samples_per_epoch(dataset, dataset.samples)
    batch = None if dataset is None else dataset.global_batch_size
    if dataset is None or samples is None:
        consumed = None if train.steps is None or batch is None else train.steps * batch
        return TrainingLength(train.steps, train.epochs, consumed)
    steps = num_steps(train, dataset, samples)
    consumed = steps * dataset.global_batch_size if train.epochs is None else train.epochs * samples
    per_epoch = steps_per_epoch(dataset, samples)[0]
    if train.epochs is not None:
        return TrainingLength(steps, train.epochs, consumed)
    if dataset.tail == "spill":
        return TrainingLength(steps, -(-consumed // samples), consumed)
    return TrainingLength(steps, -(-steps // per_epoch) if per_epoch else None, consumed)


# Words that stand in the place of an interval.
_NO_INTERVALS = frozenset({"never", "auto", "off"})
# Each key of an interval, and the consequence if the interval is longer than training.
_KEYS: dict[KeyPath, str] = {
    ("snapshots", "every"): "one snapshot is taken, at the end: a failure goes back to the beginning",
    ("snapshots", "memory"): "nothing is held in memory",
    ("snapshots", "keep", "every"): "no snapshot is kept for it",
    ("restarts", "refill"): "the budget is never filled up again",
    ("train", "compare_replicas"): "the workers' parameters are compared before snapshots only",
    ("logging", "every"): "no metrics line is written",
}


def _keys(raw: TomlTable) -> Iterator[tuple[KeyPath, str]]:
    for path, _ in set_tables(raw):
        yield (*path, "every"), "the model is evaluated once, at the end"
    yield from _KEYS.items()


def check_intervals(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield a warning for each interval in the files that is longer than training."""
    train = tables.get("train")
    if train is None:
        return
    length = length_of_training(train, tables.get("dataset"))
    for key, meaning in _keys(source.raw):
        given = value_at(key, source.raw) if tables.get(str(key[0])) is not None else None
        texts = [(path, text) for path, text in _texts(key, given) if text not in _NO_INTERVALS]
        never = [(path, text) for path, text in texts if length.is_beyond(parse_interval(text))]
        for path, text in never:
            message = f'{dotted(path)} never comes: it is "{text}", and training ends after {length}'
            remedy = f"shorten it; as it is, {meaning}"
            if len(never) < len(texts):
                remedy = "shorten it, or take it out of the list"
            yield source.problem(codes.NEVER_DUE, message, path, severity="warning", remedy=remedy)


def _texts(key: KeyPath, given: object) -> list[tuple[KeyPath, str]]:
    """Return an interval, or each of a list of them, with its key."""
    if isinstance(given, str):
        return [(key, given)]
    if isinstance(given, list):
        return [((*key, number), each) for number, each in enumerate(given) if isinstance(each, str)]
    return []
