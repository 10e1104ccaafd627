"""The exported part of a snapshot: its value, the names of its parameters, and its bytes, read once and verified."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from elasticflow.errors import ExportError, SnapshotError
from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.format.state_json import PARAMETERS, decode
from elasticflow.snapshots.read import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.format.pieces import Span
    from elasticflow.snapshots.format.state_json import Ref
    from elasticflow.snapshots.store.catalog import Catalog

    Take = Callable[[int, memoryview], None]

Part = Literal["model", "ema", "optimizer", "all"]
_ONE_OF_SEVERAL = "optimizer."
# torch.optim.swa_utils.AveragedModel puts this before each name.
_AVERAGED = "module."


@dataclass(eq=False)
class Export:
    """A choice of what to export.

    Attributes:
        progress: Called with the bytes read so far.
    """

    catalog: Catalog
    manifest: Manifest
    part: Part
    progress: Callable[[int], None] | None = None

    def value(self) -> Any:
        """Return the part as its `state_dict()` was, each tensor a Ref: model and EMA under the model's own names.

        Raises:
            ExportError: the snapshot has no such part.
        """
        state = self._state
        if self.part == "all":
            parts = {name: decode(value) for name, value in state["state"].items() if name != PARAMETERS}
            return {**parts, "position": state["position"]}
        if self.part == "optimizer" and (several := self._optimizers(state["state"])):
            return several
        if self.part not in state["state"]:
            there = ", ".join(name for name in state["state"] if name != PARAMETERS)
            raise ExportError(f"snapshot {self.manifest.name} has no {self.part}", f"it has {there}")
        found = decode(state["state"][self.part])
        if self.part != "ema":
            return found
        return {k.removeprefix(_AVERAGED): v for k, v in found.items() if k.startswith(_AVERAGED)}

    @staticmethod
    def _optimizers(parts: dict[str, Any]) -> dict[str, Any]:
        """Return the state of each of several optimizers, by its own name; empty where there is one."""
        return {
            name.removeprefix(_ONE_OF_SEVERAL): decode(value)
            for name, value in parts.items()
            if name.startswith(_ONE_OF_SEVERAL)
        }

    def parameter_names(self) -> dict[str, list[list[str | None]]]:
        """Return, for each optimizer's part, the model's names of each group's parameters; empty if nothing tells them."""
        found = self._state["state"].get(PARAMETERS)
        if found is None:
            return {}
        by_part = found if isinstance(found, dict) else {"optimizer": found}
        return {
            part: [[None if n is None else str(n).removeprefix("model/") for n in group] for group in groups]
            for part, groups in by_part.items()
        }

    @cached_property
    def _state(self) -> dict[str, Any]:
        try:
            return verify.read_state(self.catalog, self.manifest)
        except DamagedSnapshotError as error:
            raise self.damaged(error.message) from None

    def damaged(self, how: str) -> DamagedSnapshotError:
        """Return the error that the snapshot is not what was written."""
        message = f"snapshot {self.manifest.name} is damaged: {how}"
        return DamagedSnapshotError(message, "export another: elasticflow snapshots list")


def measured_part(catalog: Catalog, manifest: Manifest) -> Literal["model", "ema"]:
    """Return which weights of the snapshot its run's evaluations measure: their average, or the model's own.

    Raises:
        DamagedSnapshotError: the snapshot is not what was written.
        SnapshotError: it cannot be read.
    """
    parts = verify.read_state(catalog, manifest)["state"]
    evaluation = decode(parts["evaluation"]) if "evaluation" in parts else {}
    return "ema" if evaluation.get("weights") == "ema" and "ema" in parts else "model"


@dataclass(frozen=True)
class TensorSlice:
    """Bytes that are wanted: a stored tensor or one element of it.

    Attributes:
        spans: Where they lie, in their order; files are paths in the storage.
    """

    spans: tuple[Span, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return sum(span.nbytes for span in self.spans)

    @property
    def itemsize(self) -> int:
        """Bytes of one element; 1 if there is none."""
        return self.nbytes // max(1, math.prod(self.shape)) or 1


def slice_of(export: Export, ref: Ref) -> TensorSlice:
    """Return the place of the tensor."""
    whole, folder = export.manifest.whole[ref.key], export.catalog.folder()
    begin, end, shape = 0, whole.nbytes, whole.shape
    if ref.index is not None:
        size = whole.nbytes // math.prod(whole.shape)
        begin, end, shape = ref.index * size, (ref.index + 1) * size, ()
    spans = tuple(
        span._replace(file=f"{folder}/{export.manifest.location(span.file)}")
        for span in whole.spans(begin, end)
    )
    return TensorSlice(spans, whole.dtype, shape)


def copy(export: Export, wanted: Iterable[tuple[TensorSlice, Take]]) -> None:
    """Read the files that hold the pieces, verify all of them, and hand each piece's bytes over.

    Args:
        wanted: Pieces, each with a receiver that takes an offset in the piece and bytes; called from several threads.

    Raises:
        DamagedSnapshotError: a file is not what was written; the bytes handed over so far are worthless then.
        SnapshotError: the store cannot be read.
        OSError: a receiver raised it.
    """
    handing = _Distributor(wanted)
    stream = verify.SnapshotStream(
        export.catalog, export.manifest, handing.paths, sink=handing, progress=export.progress
    )
    try:
        damage = stream.read()
    except SnapshotError:
        if handing.failure is not None:
            raise handing.failure from None
        raise
    for text in damage:
        raise export.damaged(text)


class _Wanted(NamedTuple):
    """Bytes of a file that a receiver wants, and their offset in its piece."""

    span: Span
    offset: int
    take: Take


class _Distributor:
    """Finds the pieces that a stretch of a file holds, and hands them its bytes."""

    def __init__(self, wanted: Iterable[tuple[TensorSlice, Take]]) -> None:
        self._wanted: dict[str, list[_Wanted]] = defaultdict(list)
        for piece, take in wanted:
            offset = 0
            for span in piece.spans:
                self._wanted[span.file].append(_Wanted(span, offset, take))
                offset += span.nbytes
        for of_file in self._wanted.values():
            of_file.sort(key=lambda each: each.span.offset)
        # Tensors do not overlap, so their ends are in the same order.
        self._ends = {
            path: [span.offset + span.nbytes for span, _, _ in of_file]
            for path, of_file in self._wanted.items()
        }
        self.failure: OSError | None = None

    @property
    def paths(self) -> set[str]:
        """The files that hold something wanted."""
        return set(self._wanted)

    def __call__(self, path: str, offset: int, data: memoryview) -> None:
        """Hand over the wanted parts of *data*, at *offset* of the file."""
        end = offset + len(data)
        for span, begin, take in self._wanted[path][bisect_right(self._ends[path], offset) :]:
            if span.offset >= end:
                break
            first, last = max(offset, span.offset), min(end, span.offset + span.nbytes)
            try:
                take(begin + first - span.offset, data[first - offset : last - offset])
            except OSError as error:
                self.failure = error
                raise
