"""The stages of a script's training: each loop over `Run.batches`, or over `Run.epochs`, is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from elasticflow.errors import DatasetError, StateError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

    from elasticflow.runtime.data.index_loader import Batch as OwnPart
    from elasticflow.runtime.loop.batch import Batch
    from elasticflow.runtime.loop.source import Source
    from elasticflow.runtime.process.position import Position

_TAILS = ("spill", "short", "drop")
_NEVER_NONE = ("size", "num_workers")


@dataclass
class EpochLoop:
    """A loop over `Run.epochs` that is under way.

    Attributes:
        source: That dataset, opened; None: no batches yet.
        reading: The batches that are left, over all epochs.
        switches: The dataset's attributes as that reading began.
        first_step: Step at which the current epoch began, in this process.
        has_batches: `Run.batches` was called in the current epoch.
    """

    number: int
    stage: int
    dataset: Any = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    source: Source | None = None
    reading: Iterator[tuple[OwnPart, Batch]] | None = None
    switches: list[Any] = field(default_factory=list)
    first_step: int = 0
    has_batches: bool = False


class Stages:
    """The stages that the script has begun in this process, in the order of its calls.

    Attributes:
        epochs: The loop over `Run.epochs` that is under way; None: the script is in none.
        is_after_batches: The script does what follows an epoch's batches.
    """

    def __init__(self) -> None:
        self.epochs: EpochLoop | None = None
        self.is_after_batches = False
        self._next = 0
        self._lines: set[tuple[str, int, str, int]] = set()

    def begin_epochs(self, number: int) -> int:
        """Begin a loop over epochs; return its stage.

        Raises:
            StateError: the script is in a loop over epochs already.
        """
        if self.epochs is not None:
            raise StateError(
                "run.epochs was called inside of run.epochs",
                "one loop over epochs has one over batches in it",
            )
        self.epochs = EpochLoop(number, self._claim())
        return self.epochs.stage

    def end_epochs(self) -> None:
        """End the loop over epochs."""
        self.epochs, self.is_after_batches = None, False

    def begin_epoch(self, position: Position) -> None:
        """Begin an epoch of that loop."""
        assert self.epochs is not None
        self.epochs.first_step, self.epochs.has_batches = position.step, False

    def has_stepped(self, position: Position) -> bool:
        """Return True if a step was made in the current epoch."""
        return self.epochs is not None and position.step > self.epochs.first_step

    def require_whole_epoch(self, position: Position) -> None:
        """Make sure that the epoch came to its end.

        Raises:
            StateError: the epoch made no step, or its batches were left by break.
        """
        if not self.has_stepped(position):
            raise StateError(
                "an epoch of run.epochs made no step",
                "inside it, for batch in run.batches(dataset, size=...): ... run.step(loss=loss)",
            )
        if not position.is_epoch_end:
            raise StateError(
                f"the loop over an epoch's batches was left after step {position.step}, before the epoch's end: a run that goes "
                "on from a snapshot would come back to the batches that were left out",
                "run.stop(reason) ends training early; for shorter epochs give run.batches a part of the dataset "
                "(torch.utils.data.Subset)",
            )

    def stage_of_call(self) -> int:
        """Return the stage of this call of `Run.batches`, which `require_new` begins."""
        return self._next if self.epochs is None else self.epochs.stage

    def source_again(self, dataset: Any, arguments: Mapping[str, Any]) -> Source | None:
        """Return the data of earlier epochs if this epoch reads the same object; None if the data must be opened.

        Raises:
            StateError: the arguments differ from the previous epoch's, or the epoch has had its batches.
        """
        epochs = self.epochs
        if epochs is None:
            return None
        if epochs.has_batches:
            raise StateError(
                "run.batches was called a second time in one epoch of run.epochs",
                "an epoch has one loop over its batches; torch.utils.data.ConcatDataset joins datasets",
            )
        epochs.has_batches = True
        if epochs.source is not None and arguments != epochs.arguments:
            raise StateError(
                f"run.batches was given {_listed(arguments)} in this epoch, and {_listed(epochs.arguments)} in the one before",
                "a loop over run.epochs has one dataset and one size; another loop over epochs after it may have others",
            )
        epochs.arguments = arguments
        if dataset is not epochs.dataset:
            epochs.dataset = dataset
            return None
        return epochs.source

    def require_new(self, source: Source, caller: FrameType) -> None:
        """Take in *source*, which the line *caller* is at has opened.

        Raises:
            StateError: that line has read this data already, and its epochs are over.
            DatasetError: earlier epochs read other data.
        """
        epochs = self.epochs
        if epochs is not None:
            if epochs.source is not None and epochs.source.opened.fingerprint != source.opened.fingerprint:
                raise DatasetError(
                    "run.batches was given other data in this epoch than in the one before",
                    "a loop over run.epochs has one dataset; what differs from epoch to epoch can follow from random numbers, "
                    "which are seeded by epoch and sample",
                )
            size, samples = source.schedule.global_batch_size, source.schedule.samples
            if samples is not None and samples < size and epochs.arguments["tail"] == "spill":
                raise StateError(
                    f"run.batches was given size={size} and {samples} samples: one batch goes through more than one epoch",
                    'inside of run.epochs use a smaller size, or tail="short", by which an epoch ends with a smaller batch',
                )
            epochs.source, epochs.reading = source, None
            return
        size = source.schedule.global_batch_size
        line = (caller.f_code.co_filename, caller.f_lineno, str(source.opened.fingerprint), size)
        if line in self._lines:
            raise StateError(
                "run.batches was called a second time for the same data: its epochs are over after the first loop",
                "for epoch in run.epochs(10): for batch in run.batches(dataset, size=256): goes through ten epochs; "
                "without an outer loop, run.batches(dataset, size=256, epochs=10); a stage with another size is a loop of its own",
            )
        self._lines.add(line)
        self._claim()

    def reading(self, source: Source, position: Position) -> Iterator[tuple[OwnPart, Batch]]:
        """Return the batches of *source* after *position*; an epoch continues the reading that the previous epoch began.

        Unless the script has changed the dataset since then, which loader processes would not learn.
        """
        epochs = self.epochs
        if epochs is None:
            return source.batches(position)
        switches = _switches_of(epochs.dataset)
        if epochs.reading is None or switches != epochs.switches:
            epochs.reading, epochs.switches = source.batches(position), switches
        return epochs.reading

    def require_arguments(self, dataset: Any, given: Mapping[str, Any]) -> None:
        """Make sure that `Run.batches` can be called like this.

        Raises:
            StateError: an argument cannot be used; the message names it.
        """
        if isinstance(dataset, DataLoader):
            raise StateError(
                "run.batches was given a DataLoader, which makes batches itself",
                "give it the dataset: run.batches(loader.dataset, size=..., num_workers=..., collate=...)",
            )
        for name, value in given.items():
            if name == "tail" or (value is None and name not in _NEVER_NONE):
                continue
            least = 0 if name == "num_workers" else 1
            if type(value) is not int or value < least:
                raise StateError(
                    f"run.batches({name}={value!r}): must be a whole number from {least}",
                    f"give it another {name}",
                )
        if given["tail"] not in _TAILS:
            names = ", ".join(_TAILS)
            raise StateError(
                f"run.batches(tail={given['tail']!r}): must be one of {names}", "spill is the default"
            )
        lengths = [name for name in ("epochs", "steps") if given[name] is not None]
        if self.epochs is not None and lengths:
            raise StateError(
                f"run.batches was given {lengths[0]} inside of run.epochs, which says how many there are",
                "leave it out",
            )
        if self.epochs is None and len(lengths) != 1:
            raise StateError(
                f"run.batches was given {'both epochs and steps' if lengths else 'neither epochs nor steps'}",
                "run.batches(dataset, size=256, epochs=10); inside of run.epochs(10) it needs neither",
            )

    def _claim(self) -> int:
        stage, self._next = self._next, self._next + 1
        return stage


def _listed(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in arguments.items() if value is not None)


def _switches_of(thing: Any, depth: int = 2) -> list[Any]:
    """Return the attributes of a dataset, and of the objects in it: numbers and text, and the identity of others."""
    held = list(getattr(thing, "__dict__", {}).items())
    own = [(name, value if isinstance(value, int | float | str) else id(value)) for name, value in held]
    return [*own, *(_switches_of(value, depth - 1) for _, value in held if depth > 0)]
