"""Looks at a job's data for `--deep`: opens it, reads samples and makes a batch of them."""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from elasticflow.deep.child.report import BrokenError
from elasticflow.deep.child.run import Alone
from elasticflow.deep.messages import Facts
from elasticflow.errors import DatasetError
from elasticflow.runtime.data import notes, overlap
from elasticflow.runtime.data.dataset import OpenedDataset, checked_length, values_of, varies
from elasticflow.runtime.data.fingerprint import fingerprint_of, look_at
from elasticflow.runtime.data.mixture import in_words
from elasticflow.runtime.data.order.mixed import MixedOrder
from elasticflow.runtime.data.sample_reader import checked_collate
from elasticflow.runtime.data.shard_reader import ShardReader, require_iterable
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.random_streams import GENERATORS
from elasticflow.runtime.process.reachable import leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.deep.child.entry_point import DataTable, EntryPoint
    from elasticflow.deep.child.report import Report

# The limit for looking up samples of the evaluation in the training data.
_OVERLAP_LIMIT_S = 5.0
# Data that opens faster than this is opened again, to see that it is the same.
_QUICK_S = 2.0
# Samples of a data shard that are compared with and without `skip`, and at most as many before them.
_SKIPPED = 8


class Data:
    """The data of a table of the job file.

    Args:
        most: Number of samples that are read, at least 2. Data in shards gives its first samples.

    Attributes:
        dataset: The opened data; None before that, and for data shards.
    """

    def __init__(self, report: Report, code: EntryPoint, table: DataTable, *, most: int = 2) -> None:
        self._most, self.num_samples = most, 0
        self._report, self._code, self._table, self._key = report, code, table, table.key
        self._args = code.key_of(table.build)
        self._entry = self._args if self._args == "dataset.mix" else f"{table.key}.entry"
        self.dataset: Any = None

    def batch(self) -> Any:
        """Return a batch of the first, the last and some samples between, or of the first samples of data shard 0.

        All of them are read, also if a forward takes one sample, and the batch holds no more.

        Raises:
            BrokenError: no batch can be made; the problem was reported.
        """
        code, is_training = self._code, self._table.is_training
        if is_training and "SHARDS" in code:
            return self._collated(*self._of_shard(code["SHARDS"]))
        build = partial(code.call, self._table.build)
        began = time.monotonic()
        self.dataset = dataset = self._opened(build)
        if is_training:
            doing = "looking up what the job's arguments name of the data"
            look_up = partial(values_of, dataset, code.get("VALUES") or {})
            values = self._report.call("result", self._entry, doing, look_up)
            code.dataset = OpenedDataset(dataset, values=values)
        is_quick = time.monotonic() < began + _QUICK_S
        length = self._length(dataset)
        indices = sorted({n * (length - 1) // (self._most - 1) for n in range(self._most)})
        if is_training and "build_order" in code:
            indices = self._in_order(indices)
        batch = self._collated(dataset, indices, [self._sample(dataset, index) for index in indices])
        self._require_samples_that_stay(dataset)
        if is_quick:
            self._require_the_same_again(build)
        return batch

    def require_apart_from(self, training: Data) -> None:
        """Report samples of this dataset that are in the training data, too; both must have been looked at.

        Raises:
            BrokenError: there are such samples, or a sample cannot be read; the problem was reported.
        """

        def look_up() -> overlap.Overlap:
            return overlap.compare(training.dataset, self.dataset, _OVERLAP_LIMIT_S)

        doing = f"looking up samples of {self._key} in the training data"
        both = self._report.call("sample", self._entry, doing, look_up)
        if both.is_leak:
            remedy = (
                "split the data once, with the same seed for both parts, or name data that is held back;\n"
                f'if that is meant, say so with {self._key}.overlap = "allowed"'
            )
            self._report.refuse("overlap", self._entry, DatasetError(both.text(), remedy))
        if both.is_natural:
            self._report.note(f"{both.text()}; {both.doubt}, so whether that is a leak cannot be told")
        elif both.found:
            self._report.note(both.text())
        elif both.doubt:
            text = "whether evaluation samples are in the training data cannot be told for sure: "
            self._report.note(f"{text}{both.doubt}")

    def _in_order(self, indices: list[int]) -> list[int]:
        """Have the job's sampler order the samples and report the result; return *indices*, or samples of every set."""
        code, report = self._code, self._report
        key = code.key_of("build_order")
        build = partial(code.call, "build_order", worker=Alone(report, code.seed))
        made = report.call("result", key, f"reading {key} of every sample", build)
        if not isinstance(made, MixedOrder):
            report.note(made.in_words())
            return indices
        assert not isinstance(made.record, int)
        sizes, shares = made.record["sets"], made.record["shares"]
        total = sum(shares)
        report.facts(Facts(sets=tuple(sizes), shares=tuple(share / total for share in shares)))
        report.note(in_words(sizes, shares))
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        chosen = dict.fromkeys([*firsts, *indices])
        return sorted(list(chosen)[: max(len(sizes), len(indices))])

    def _require_samples_that_stay(self, dataset: Any) -> None:
        look = self._report.call(
            "sample", self._entry, f"reading samples of {self._key} twice", lambda: look_at(dataset)
        )
        if look.unseen:
            self._report.note(
                f"samples of {self._key} hold {', '.join(look.unseen)}, which cannot be looked into: other data in there "
                "is not noticed, unless an attribute `fingerprint` of the dataset tells"
            )
        if look.varying is None:
            return
        if self._code.is_exact:
            error = varies(self._key, look.varying, "exact mode cannot repeat a step")
            self._report.problem("other_data", self._entry, error)
        else:
            error = varies(self._key, look.varying, "what a restart reads again is other data")
            self._report.warn("other_data", self._entry, error.message, error.remedy or "")

    def _require_the_same_again(self, build: Callable[[], Any]) -> None:
        def marks() -> tuple[str, str]:
            return fingerprint_of(self.dataset), fingerprint_of(build())

        once, again = self._report.call("factory", self._args, f"opening {self._key} again", marks)
        if once != again:
            message = f"{self._key}.entry returns other data when it is called again, as every worker and every restart does"
            remedy = (
                "draw from random, numpy's global generator or torch's, which begin in the same state at each call,\n"
                "or give a generator of your own a seed: default_rng(0), train_test_split(seed=0)"
            )
            self._report.problem("other_data", self._entry, DatasetError(message, remedy))

    def _opened(self, build: Callable[[], Any]) -> Any:
        report, doing = self._report, f"opening {self._key}"
        if "prepare" not in self._code:
            return report.call("factory", self._args, doing, build)
        report.doing(doing, self._args)
        try:
            return build()
        except Exception as error:
            why = f"{self._key} cannot be opened here ({type(error).__name__}: {error})"
            self._unprepared(why)
            raise BrokenError from error

    def _unprepared(self, why: str) -> None:
        remedy = f"{self._code.entries['dataset.prepare']} was not called, since it may download: run it by hand, and check again"
        message = f"{why}, perhaps since dataset.prepare has not run"
        self._report.warn("unknown", self._args, message, remedy)

    def _length(self, dataset: Any) -> int:
        report, code, is_training = self._report, self._code, self._table.is_training
        name = "train" if is_training else self._key
        length = report.call(
            "result",
            self._entry,
            f"counting the samples of {self._key}",
            lambda: checked_length(dataset, name, None),
        )
        if not is_training:
            return length
        report.facts(Facts(samples=length))
        try:
            checked_length(dataset, name, code.get("SAMPLES"))
        except DatasetError as error:
            report.problem("length", "dataset.samples", error)
        size = code["GLOBAL_BATCH_SIZE"]
        if code["TAIL"] == "drop" and length < size:
            message = f"no step is ever made: an epoch has {length} samples, a batch {size}, and the tail is dropped"
            remedy = 'use a smaller batch, or tail = "spill" or "short"'
            report.problem("length", "dataset.global_batch_size", DatasetError(message, remedy))
        return length

    def _sample(self, dataset: Any, index: int) -> Any:
        def read() -> Any:
            random_streams.seed_all(index)
            try:
                many = getattr(dataset, "__getitems__", None)
                return dataset[index] if many is None else many([index])[0]
            except Exception as error:
                notes.of_sample(error, dataset, index)
                raise

        doing = f"reading sample {index} of {self._key}"
        return self._report.call("sample", self._entry, doing, read)

    def _of_shard(self, shards: int) -> tuple[Any, list[int], list[Any]]:
        report, build = self._report, self._code["build_dataset"]
        opened = report.call(
            "factory", self._args, "opening data shard 0", lambda: build(shard=0, shards=shards)
        )
        shard = report.call("result", self._entry, "opening data shard 0", lambda: require_iterable(opened))
        began = time.monotonic()

        def first(shard: Any) -> list[Any]:
            random_streams.seed_all(0)
            return list(itertools.islice(shard, self._most))

        samples = report.call("sample", self._entry, "reading data shard 0", lambda: first(shard))
        if not samples:
            if "prepare" not in self._code:
                report.note("data shard 0 has no samples")
            else:
                self._unprepared("data shard 0 has no samples")
            raise BrokenError
        if time.monotonic() < began + _QUICK_S:
            again = report.call(
                "factory",
                self._args,
                "reading data shard 0 again",
                lambda: first(build(shard=0, shards=shards)),
            )
            if fingerprint_of(samples) != fingerprint_of(again):
                message = (
                    "data shard 0 yields other samples when it is read again, as each start of a run reads it"
                )
                remedy = "give each shard an order of its own: sorted files, no threads that race, generators with a seed;\n"
                remedy += "what the model makes while it is trained (reinforcement learning) is no data for a job: store it first"
                report.problem("other_data", self._entry, DatasetError(message, remedy))
            elif callable(getattr(shard, "skip", None)):
                self._look_at_skip(build, shards)
        return shard, list(range(len(samples))), samples

    def _look_at_skip(self, build: Callable[..., Any], shards: int) -> None:
        """Report if a run that is resumed within a shard would read other samples than an undisturbed one."""
        reader = ShardReader(build, shards, seed=0, size=2 * _SKIPPED, epochs=1)

        def read(cursor: int) -> list[Any]:
            chunks = reader.chunks([0], 0, [cursor, *[0] * (shards - 1)])
            return next(chunk.samples for chunk in chunks if not chunk.passed)

        def both() -> tuple[list[Any], list[Any]]:
            whole = read(0)
            cursor = min(_SKIPPED, len(whole) // 2)
            return whole[cursor:], read(cursor)[: len(whole) - cursor]

        whole, rest = self._report.call("sample", self._entry, "reading data shard 0 after skip()", both)
        if fingerprint_of(whole) != fingerprint_of(rest):
            message = "data shard 0 yields other samples after skip() than without it, and a resumed run calls skip()"
            remedy = "let skip() change nothing in what follows: a buffer that shuffles takes its numbers from a generator of its own;\n"
            remedy += "a shard without skip() is read again up to the run's position"
            self._report.problem("other_data", self._entry, DatasetError(message, remedy))

    def _collate(self) -> tuple[Callable[[list[Any]], Any], str]:
        """Return the collate function and its key.

        Raises:
            BrokenError: the function cannot be made or is not callable; the problem was reported.
        """
        code, name = self._code, self._table.collate
        if name not in code:
            name = "build_collate"
        if name not in code:
            return default_collate, self._entry
        key = code.key_of(name)
        made = self._report.call("factory", key, f"making {key}", lambda: code.call(name))
        return self._report.call("result", key, f"making {key}", lambda: checked_collate(made)), key

    def _look_for_generators(self, collate: Callable[[list[Any]], Any], key: str) -> None:
        """Warn if *collate*, which has made a batch, keeps a random generator of its own."""
        held = next((each for each in leaves({key: collate}, {}) if isinstance(each.value, GENERATORS)), None)
        if held is not None:
            message = (
                f"{held.path} is a random generator of its own: what it draws depends on the batches before"
            )
            remedy = "leave its seed out: what the global generators draw follows from job.seed and the batch, after a restart, too"
            self._report.warn("state", key, message, remedy)

    def _collated(self, dataset: Any, indices: list[int], samples: list[Any]) -> Any:
        if self._table.takes_one:
            samples = samples[:1]
        self.num_samples = len(samples)
        report = self._report
        collate, key = self._collate()

        def make() -> Any:
            try:
                return collate(samples)
            except Exception as error:
                notes.of_batch(error, dataset, indices, samples)
                raise

        if self._table.is_training:
            report.facts(Facts(sample=notes.form(samples[0])))
        batch = report.call("collate", key, f"making a batch of {self._key}", make)
        self._look_for_generators(collate, key)
        if self._code.has_loss and not (isinstance(batch, list | tuple) and len(batch) == 2):
            message = f"model.loss is called on batches of (inputs, targets), and a batch of {self._key} is {notes.form(batch)}"
            remedy = "let samples be (input, target), or use model.step instead of model.loss"
            report.refuse("collate", key, DatasetError(message, remedy))
        return batch
