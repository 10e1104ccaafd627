"""Batches moved to the device: from pinned memory, on a stream of their own, while the device computes.

A batch that a loader process has delivered is moved while the step before it runs. What is read in this process is moved when
it is read: reading it earlier would call the dataset's code at another time, which may draw or keep count.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping, MutableMapping
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.data.loader_processes import LoaderProcesses


@lru_cache(maxsize=4)
def transfer_to(device: torch.device) -> Transfer:
    """Return what moves this process's batches to *device*; one for all loaders, so that they share the memory of its stream."""
    return Transfer() if device.type == "cpu" else DeviceTransfer(device)


class Transfer:
    """Leaves batches where they are: in the CPU's own memory."""

    pins_memory = False

    def move(self, batch: Any) -> Any:
        """Return a batch that was read in this process, with all that can be moved on the device.

        Tensors, in tuples, lists, mappings and dataclasses, too, and objects with a method `to` are moved; all else stays as it is.
        """
        return batch

    def move_ahead(self, batches: LoaderProcesses) -> Iterator[Any]:
        """Return *batches* on the device, in their order; each is moved while the one before it is in use, if it is there by then.

        An error in place of a batch is raised at its turn.
        """
        return iter(batches)


class DeviceTransfer(Transfer):
    """Moves batches to an accelerator.

    The copies run on a stream of their own. The stream that is current when a batch is handed out waits for the batch's copies
    on the device, and the allocator learns that it uses the tensors (`Tensor.record_stream`): their memory is given to a later
    copy only after the work that was queued when their last reference went.
    """

    pins_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def move(self, batch: Any) -> Any:
        """Return a batch on the device; see `Transfer`. The caller may overwrite what it gave."""
        return self.begin(batch, may_be_overwritten=True).handed_out()

    def move_ahead(self, batches: LoaderProcesses) -> Iterator[Any]:
        """Return *batches* on the device; see `Transfer`."""
        return _MovedAhead(self, batches)

    def begin(self, batch: Any, *, may_be_overwritten: bool) -> PendingBatch:
        """Begin to move a batch; *may_be_overwritten*: its tensors may be written to again at once, pinned ones, too."""
        started = _Started(self._device, self._stream, self.pins_memory, may_be_overwritten)
        moved = started.move(batch)
        return PendingBatch(moved, self._device, self._stream.record_event(), started.recorded)


class PendingBatch(NamedTuple):
    """A batch that is being moved.

    Attributes:
        batch: The batch on the device; not to be used before it is handed out.
        is_through: Recorded after its copies.
        recorded: Tensors allocated on the stream of the copies, and objects that hold such tensors; each has `record_stream`.
    """

    batch: Any
    device: torch.device
    is_through: torch.Event
    recorded: list[Any]

    def handed_out(self) -> Any:
        """Return the batch for use on the current stream, which waits for the copies; this process does not."""
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_event(self.is_through)
        for each in self.recorded:
            each.record_stream(stream if isinstance(each, Tensor) else _stream_of_its_kind(self.device))
        return self.batch


def _stream_of_its_kind(device: torch.device) -> torch.Stream:
    """Return a device's current stream in the class of its kind, as `torch.cuda.Stream`: DGL reads the handle in it, `cuda_stream`."""
    of_kind = getattr(torch, device.type, None)
    # torch.mps has no streams to give.
    current: Callable[[torch.device], torch.Stream] = getattr(
        of_kind, "current_stream", torch.accelerator.current_stream
    )
    return current(device)


class _MovedAhead:
    """Batches of loader processes, moved one ahead."""

    def __init__(self, transfer: DeviceTransfer, batches: LoaderProcesses) -> None:
        self._transfer, self._batches = transfer, batches
        self._ahead: PendingBatch | Exception | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        pending, self._ahead = self._ahead, None
        if pending is None:
            pending = self._begin()
        if isinstance(pending, Exception):
            raise pending
        if self._batches.is_next_here:
            try:
                self._ahead = self._begin()
            except Exception as error:  # noqa: BLE001  # raised at its turn: training may end before it
                self._ahead = error
        return pending.handed_out()

    def _begin(self) -> PendingBatch:
        return self._transfer.begin(next(self._batches), may_be_overwritten=False)


class _Started:
    """Moves the parts of one batch."""

    def __init__(
        self, device: torch.device, stream: torch.Stream, pins_memory: bool, may_be_overwritten: bool
    ) -> None:
        self._device, self._stream = device, stream
        self._pins_memory, self._may_be_overwritten = pins_memory, may_be_overwritten
        self.recorded: list[Any] = []

    def move(self, value: Any) -> Any:
        """Return *value* with all that can be moved on the device."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        # A dict whose keys are attributes may have a key of that name, or raise KeyError.
        moves_itself = callable(getattr(type(value) if isinstance(value, dict) else value, "to", None))
        if moves_itself and not isinstance(value, type):
            return self._object(value)
        return _rebuilt(value, self.move)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if not _is_plain(tensor):  # the stream of the copies does not know who made or uses it
            return tensor.to(self._device, non_blocking=True)
        source = tensor
        # A tensor whose elements share memory cannot be pinned; one that is not contiguous is copied on the CPU first anyway.
        if self._pins_memory and tensor.is_contiguous():
            source = tensor.pin_memory()
        # Pinned memory of the job's own is read by the device after `to` returns, and the job may write to it by then.
        waits = self._may_be_overwritten and source is tensor
        with self._stream:
            moved = source.to(self._device, non_blocking=not waits)
        self.recorded.append(moved)
        return moved

    def _object(self, value: Any) -> Any:
        """Return an object that moves itself: beside the training if the allocator can be told of the tensors that it makes."""
        takes_streams = callable(
            getattr(value, "record_stream", None)
        )  # as in torch_geometric, tensordict, DGL
        is_beside = takes_streams or _is_plain_mapping(value)  # the latter as in transformers
        if self._pins_memory and callable(getattr(value, "pin_memory", None)):
            value = value.pin_memory()
        # Beside the training a copy is waited for alone.
        options = {"non_blocking": not (is_beside and self._may_be_overwritten)}
        with self._stream if is_beside else nullcontext():
            moved = value.to(self._device, **(options if _takes_non_blocking(value.to) else {}))
        if moved is None:  # it has moved itself in place
            moved = value
        if takes_streams:
            self.recorded.append(moved)
        elif is_beside:
            self.recorded += [item for item in moved.values() if isinstance(item, Tensor)]
        return moved


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is on the CPU and has nothing but elements in memory of its own."""
    is_own_kind = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not is_own_kind


def _is_plain_mapping(value: Any) -> bool:
    known = str, bytes, int, float, type(None)
    return isinstance(value, Mapping) and all(
        _is_plain(item) if isinstance(item, Tensor) else isinstance(item, known) for item in value.values()
    )


def _takes_non_blocking(method: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):  # written in C, as torch's
        return True
    return any(each.name == "non_blocking" or each.kind is each.VAR_KEYWORD for each in parameters)


def _rebuilt(value: Any, move: Callable[[Any], Any]) -> Any:
    """Return a container with its items moved, of the same type, as torch's DataLoader makes it; anything else as it is."""
    if isinstance(value, Mapping):
        items = {key: move(item) for key, item in value.items()}
        try:
            if not isinstance(value, MutableMapping):
                return type(value)(items)  # type: ignore[call-arg]
            mapping = copy.copy(value)
            mapping.update(items)
        except TypeError:  # its type is made in another way
            return items
        return mapping
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(move, value))
    if isinstance(value, list | tuple):
        return type(value)(map(move, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        clone: Any = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(clone, field.name, move(getattr(value, field.name)))
        return clone
    return value
