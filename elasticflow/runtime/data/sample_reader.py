"""Samples read and made into batches, each under its own random stream.

A sample is the same in a given epoch, whoever reads it: any rank, loader process, world size or batch size. Seeding
costs more than reading a sample of many datasets, so only datasets that draw are seeded, and only the generators they
use: a first draw is noticed, and the samples read until then are read again, seeded.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from elasticflow.errors import DatasetError
from elasticflow.runtime.data import held_generators, notes
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.random_streams import Draws, Generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

EVALUATION = 1  # what a dataset is used for, in the keys of its streams; 0: training


def checked_collate(collate: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any]:
    """Return the function that makes batches, torch's own if that is None.

    Raises:
        DatasetError: it cannot be called.
    """
    if collate is None:
        return default_collate
    if not callable(collate):
        message = f"collate is made as {notes.form(collate)}, which cannot be called with a list of samples"
        raise DatasetError(message, "return a function, or an object whose class has __call__(self, samples)")
    return collate


class SampleReader:
    """Reads batches of a dataset by place and indices.

    What the dataset draws from random, numpy's global generator or torch's on the CPU depends on seed, epoch and
    index alone, and so does what it draws from a library's (`held_generators.LIBRARIES`); what *collate* draws depends on
    the place and the number of the samples. Generators of a dataset's own are its own business.

    Args:
        dataset: The dataset. If it has `__getitems__`, many samples are read at once, unless it draws.
        generators: This process's; None: the process that reads first makes its own.
        has_repeats: A sample may come several times in an epoch, and is to be read differently each time.

    Raises:
        DatasetError: *collate* cannot be called.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        *,
        use: int = 0,
        generators: Generators | None = None,
        has_repeats: bool = False,
    ) -> None:
        self._dataset, self._collate, self._seed, self._use = dataset, checked_collate(collate), seed, use
        # A sample comes once in each stretch of places: its draws are keyed by the stretch and its index.
        self._length = 1 if has_repeats else len(dataset)
        self._many = getattr(dataset, "__getitems__", None)
        self._is_careful = False
        self._generators: Generators
        self._iterate: Callable[[list[int]], Iterable[int]] = iter
        if generators is not None:
            self._adopt(generators)

    def _adopt(self, generators: Generators) -> None:
        self._generators = generators
        generators.add(held_generators.of_libraries(self._dataset, self._collate))
        self._is_careful = not generators.can_look
        self._of_samples, self._of_collate = Draws(generators), Draws(generators)

    def enter_process(self, iterate: Callable[[list[int]], Iterable[int]]) -> None:
        """Read in this process from now on, which does nothing else; *iterate* yields the indices it is given."""
        generators = Generators(self._seed, torch.device("cpu"))
        generators.rest()
        self._iterate = iterate
        self._adopt(generators)

    def read(self, place: int, indices: list[int]) -> Any:
        """Return the batch of the samples *indices*, which stand at *place* of the stream and after it.

        Raises:
            DatasetError: dataset or collate raised StopIteration, or the dataset gave another number of samples.
            Exception: another exception of dataset or collate, with a note that names sample and dataset.
        """
        try:
            return self._batch(place, indices)
        except StopIteration as error:
            # Whoever goes through the batches would take it for their end.
            where = "; ".join(getattr(error, "__notes__", ()))
            raise DatasetError(
                f"StopIteration was raised {where}",
                "some next() there found nothing more: give it a default, or do without an iterator, whose place a restart loses",
            ) from error

    def _batch(self, place: int, indices: list[int]) -> Any:
        generators = self._generators
        generators.before_data()
        if not self._is_careful:
            batch = self._collated(indices, self._read(indices))
            if not generators.have_moved():
                return batch
            self._is_careful = True
        while True:
            generators.after_data()
            samples = self._read_seeded(place, indices)
            generators.after_data()
            self._of_collate.seed(random_streams.batch_key(self._seed, place, len(indices), self._use))
            batch = self._collated(indices, samples)
            if not self._of_collate.are_more():
                generators.after_data()
                return batch

    def _read_seeded(self, place: int, indices: list[int]) -> list[Any]:
        draws = self._of_samples
        if not draws:  # as far as is known, only collate draws
            samples = self._read(indices)
            if not draws.are_more():
                return samples
            self._generators.after_data()
        return [
            self._read_alone(at // self._length, index)
            for at, index in zip(count(place), self._iterate(indices), strict=False)
        ]

    def _read_alone(self, epoch: int, index: int) -> Any:
        draws, dataset, many = self._of_samples, self._dataset, self._many
        while True:
            draws.seed(random_streams.sample_key(self._seed, epoch, index, self._use))
            try:
                sample = dataset[index] if many is None else many([index])[0]
            except Exception as error:
                notes.of_sample(error, dataset, index)
                raise
            if not draws.are_more():
                return sample

    def _read(self, indices: list[int]) -> list[Any]:
        if self._many is not None:
            return self._read_at_once(self._many, indices)
        samples: list[Any] = []
        try:
            # No map(): a StopIteration of the dataset would end it.
            for index in self._iterate(indices):
                samples.append(self._dataset[index])  # noqa: PERF401  # the count names the sample that fails
        except Exception as error:
            notes.of_sample(error, self._dataset, indices[len(samples)])
            raise
        return samples

    def _read_at_once(self, many: Callable[[list[int]], Any], indices: list[int]) -> list[Any]:
        next(iter(self._iterate(indices)))  # the first one stands for all
        try:
            samples: Any = many(indices)
        except Exception as error:
            self._note_culprit(error, many, indices)
            raise
        if isinstance(samples, list | tuple) and len(samples) != len(indices):
            raise DatasetError(
                f"__getitems__ of {notes.name_of(self._dataset)} returned {len(samples)} samples for {len(indices)} indices",
                "return one for each index, in the same order, for an index that comes twice, too",
            )
        found: list[Any] = samples
        return found

    def _note_culprit(self, error: Exception, many: Callable[[list[int]], Any], indices: list[int]) -> None:
        for index in indices:
            try:
                many([index])
            except Exception:  # noqa: BLE001  # whatever it is, the first error is raised
                notes.of_sample(error, self._dataset, index)
                return
        notes.of_samples(error, self._dataset, indices)

    def _collated(self, indices: list[int], samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            notes.of_batch(error, self._dataset, indices, samples)
            raise
