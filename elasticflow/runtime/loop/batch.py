"""A step's batch as the script gets it: this rank's part of the samples, and its share of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from elasticflow.errors import StateError
from elasticflow.runtime.data.rows import cut, is_column, leaves
from elasticflow.runtime.process.position import even_split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.runtime.data import index_loader
    from elasticflow.runtime.process.position import Position


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, on the run's device.

    Attributes:
        samples: Number of this rank's samples. It is 0 if the batch has fewer samples than there are ranks: `data` then holds
            one or two samples of another rank, so that the model can run, and `share` is 0.
        total: Number of all ranks' samples.
        share: Factor for the mean loss of `data`. DistributedDataParallel averages gradients over the ranks; with this factor
            the average is the mean over the global batch. It is 1 if all ranks have equally many samples.
        end: Position after the step: `end.step` counts from 1, `end.epoch` counts the finished passes over the dataset.
        most: Number of samples of the rank that has the most.
        number: Number of the batch in its epoch, from 0; `enumerate` would count wrongly after a restart in the middle of
            an epoch. None if data shards are read in order.
    """

    samples: int
    total: int
    share: float
    end: Position
    most: int
    read: Any = None
    number: int | None = None
    shards: index_loader.Batch | None = None

    @property
    def data(self) -> Any:
        """The samples, joined by `collate`, or as torch's DataLoader joins them.

        Raises:
            StateError: the run computes its gradients part by part, so that only `Run.gradients` reads the samples.
        """
        if self.shards is not None:
            raise StateError(
                "this batch comes in parts, virtual shards or micro-batches, of which each is read when its turn has come",
                "give run.gradients a function that takes one of them: run.gradients(lambda part: ..., batch)",
            )
        return self.read

    @property
    def is_last_of_epoch(self) -> bool:
        """True if the step of this batch reaches or crosses the end of an epoch."""
        return self.end.is_epoch_end

    @property
    def inputs(self) -> Any:
        """First item of `data`, if it is a pair."""
        return self._pair()[0]

    @property
    def targets(self) -> Any:
        """Second item of `data`, if it is a pair."""
        return self._pair()[1]

    def parts(self, most: int) -> Iterator[Batch]:
        """Yield this batch in pieces of at most *most* samples, each with its own share: for gradient accumulation.

        Every rank gets the same number of pieces, so that a piece may run a collective, as DistributedDataParallel does. A rank
        with fewer samples than pieces gets a sample again, with the share 0.

        Raises:
            StateError: *most* is not a whole number from 1, or the tensors of the batch have no rows to cut, or unequal numbers of rows.
        """
        if type(most) is not int or most < 1:
            raise StateError(f"batch.parts({most!r}): a part has a whole number of samples, from 1")
        rows, number = _rows(self.data), -(-self.most // most)
        for low, high in (even_split(rows, number, part) for part in range(number)):
            count = 0 if self.samples == 0 else high - low
            data = cut(self.data, rows, low, high) if high > low else cut(self.data, rows, 0, 1)
            yield Batch(
                count,
                self.total,
                self.share * (high - low) / rows,
                self.end,
                min(most, self.most),
                data,
                self.number,
            )

    def _pair(self) -> Any:
        data = self.data
        if isinstance(data, tuple | list) and len(data) == 2:
            return data
        raise StateError(
            f"the dataset's samples are no pairs of input and target: a batch is a {type(data).__name__}",
            "use batch.data",
        )


def _rows(data: Any) -> int:
    found = [each for each in leaves(data) if _must_have_rows(each)]
    if not any(isinstance(each, Tensor) for each in found):
        raise StateError(
            "batch.parts cuts tensors, and there is none in this batch", "cut batch.data in the script"
        )
    numbers = {len(each) for each in found}
    if len(numbers) > 1:
        raise StateError(
            f"batch.parts cuts all of a batch between the same rows, and this batch has tensors or texts of {_listed(numbers)} rows",
            "let the dataset or collate return a row for each sample, and what is no row per sample as a number or in an object of "
            "its own; or cut batch.data in the script",
        )
    return next(iter(numbers))


def _must_have_rows(leaf: Any) -> bool:
    is_of_texts = is_column(leaf) and all(isinstance(item, str | bytes) for item in leaf)
    return leaf.dim() > 0 if isinstance(leaf, Tensor) else is_of_texts


def _listed(numbers: Iterable[int]) -> str:
    *others, last = map(str, sorted(numbers))
    return f"{', '.join(others)} and {last}"
