"""Batches on the device: no batch is used before its copy is through, or overwritten while it is in use, whatever comes first."""

from __future__ import annotations

import dataclasses
import random
import time
from collections import OrderedDict, UserDict
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from elasticflow.runtime.data import device_transfer, index_loader
from elasticflow.runtime.data.index_schedule import IndexSchedule
from tests.pretended_device import DEVICE, DeviceTensor, pretended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.pretended_device import Pretence

# Work of a stream for each copy from pinned memory: the copy, and a check that its source is as it was.
_PER_COPY = 2


class Training:
    """A training's use of batches on the pretended device.

    Attributes:
        device: The device.
        read: Values that kernels have read from batches, in order.
    """

    def __init__(self, device: Pretence) -> None:
        self.device = device
        self.read: list[Any] = []

    def use(self, batch: Tensor) -> None:
        """Queue a kernel that reads a batch."""
        assert isinstance(batch, DeviceTensor)
        memory = batch.on_host
        self.device.main.add(lambda: self.read.append(memory.tolist()))

    def run(self) -> None:
        """Have the device do all its work."""
        self.device.run_some(1_000_000)


@pytest.fixture
def training_on() -> Iterator[Callable[[int], Training]]:
    """Return a call that begins a training on a device whose order is drawn from a seed."""
    with ExitStack() as stack:

        def begin(seed: int) -> Training:
            device_transfer.transfer_to.cache_clear()
            return Training(stack.enter_context(pretended(seed)))

        yield begin
    device_transfer.transfer_to.cache_clear()


class Delivered:
    """Batches of loader processes, of which the next is there or not."""

    def __init__(self, batches: Sequence[Any], is_here: Callable[[], bool]) -> None:
        self._batches, self._is_here, self.taken = list(batches), is_here, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    @property
    def is_next_here(self) -> bool:
        """True if the next one is."""
        return self.taken < len(self._batches) and self._is_here()

    def __next__(self) -> Any:
        if self.taken == len(self._batches):
            raise StopIteration
        self.taken += 1
        batch = self._batches[self.taken - 1]
        if isinstance(batch, Exception):
            raise batch
        return batch


def rows(number: int) -> Tensor:
    """Return the samples of a batch."""
    return torch.full((4,), float(number), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(60))
def test_batches_moved_ahead_are_read_as_they_were(training_on: Callable[[int], Training], seed: int) -> None:
    """Copies and kernels run in any order that events leave open; a batch is dropped while the device still uses it."""
    training = training_on(seed)
    chance = random.Random(seed)
    pinned = [rows(number).pin_memory() for number in range(30)]
    delivered: Any = Delivered(pinned, lambda: chance.random() < 0.7)
    for batch in device_transfer.transfer_to(DEVICE).move_ahead(delivered):
        training.use(batch)
        del batch
        training.device.run_some()
    training.run()
    assert training.read == [rows(number).tolist() for number in range(30)]
    assert training.device.reused


@pytest.mark.parametrize("seed", range(20))
def test_batches_read_here_may_be_written_to_at_once(
    training_on: Callable[[int], Training], seed: int
) -> None:
    """A dataset may give the same memory for each batch, pinned or not."""
    training = training_on(seed)
    mine, pinned = rows(0), rows(0).pin_memory()
    for number in range(20):
        for memory in (mine, pinned):
            memory.fill_(number)
            (moved,) = device_transfer.transfer_to(DEVICE).move([memory])
            training.use(moved)
            del moved
        training.device.run_some()
    training.run()
    assert training.read == [rows(number).tolist() for number in range(20) for _ in range(2)]


def test_next_batch_is_copied_while_this_one_is_in_use(training_on: Callable[[int], Training]) -> None:
    """Its copy is queued before the training's work, and waits for none of it; one batch ahead, no more."""
    training = training_on(0)
    delivered: Any = Delivered([rows(number).pin_memory() for number in range(5)], lambda: True)
    batches = device_transfer.transfer_to(DEVICE).move_ahead(delivered)
    next(batches)
    assert delivered.taken == 2
    assert training.device.streams[1].submitted == 2 * _PER_COPY
    next(batches)
    assert delivered.taken == 3


def test_batch_that_is_not_there_is_not_waited_for(training_on: Callable[[int], Training]) -> None:
    """The step begins; the batch is taken at its turn."""
    training_on(0)
    delivered: Any = Delivered([rows(number).pin_memory() for number in range(3)], lambda: False)
    batches = device_transfer.transfer_to(DEVICE).move_ahead(delivered)
    for number in range(3):
        next(batches)
        assert delivered.taken == number + 1


def test_error_of_a_batch_ahead_is_raised_at_its_turn(training_on: Callable[[int], Training]) -> None:
    """Training may end before that batch."""
    training_on(0)
    delivered: Any = Delivered([rows(0), ValueError("sample 7")], lambda: True)
    batches = device_transfer.transfer_to(DEVICE).move_ahead(delivered)
    next(batches)
    assert delivered.taken == 2
    with pytest.raises(ValueError, match="sample 7"):
        next(batches)


class Pair(NamedTuple):
    """Inputs and targets."""

    inputs: Any
    targets: Any


@dataclasses.dataclass(frozen=True)
class Example:
    """A frozen record, with a field that its constructor does not take."""

    inputs: Any
    name: str
    length: int = dataclasses.field(init=False, default=3)


class Old:
    """Moves itself; its `to` takes nothing but the device."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to(self, device: torch.device) -> Old:
        """Return it on the device."""
        return Old(self.values.to(device))


class InPlace(Old):
    """Moves itself in place, and returns nothing."""

    def to(self, device: torch.device, non_blocking: bool = False) -> None:  # type: ignore[override]
        """Move it."""
        self.values = self.values.to(device, non_blocking=non_blocking)


class Recorded(Old):
    """Tells the allocator about its own tensors."""

    def to(self, device: torch.device, **options: Any) -> Recorded:
        """Return it on the device."""
        return Recorded(self.values.to(device, **options))

    def record_stream(self, stream: Any) -> None:
        """Tell that *stream* uses it."""
        self.values.record_stream(stream)


class Encoding(UserDict[str, Any]):
    """A mapping that moves itself, as a tokenizer's."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        """Return it on the device."""
        self.data = {
            k: v.to(device, non_blocking=non_blocking) if isinstance(v, Tensor) else v
            for k, v in self.items()
        }
        return self


class Dotted(dict[str, Any]):
    """A dict whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda t: t, lambda b: b),
    "list": (lambda t: [t, "text"], lambda b: b[0]),
    "tuple": (lambda t: (1, (t,)), lambda b: b[1][0]),
    "named tuple": (lambda t: Pair([t], 7), lambda b: b.inputs[0]),
    "dict": (lambda t: {"x": {"y": t}}, lambda b: b["x"]["y"]),
    "ordered dict": (lambda t: OrderedDict(x=t), lambda b: b["x"]),
    "dict whose keys are attributes": (lambda t: Dotted(x=t), lambda b: b["x"]),
    "mapping": (lambda t: UserDict(x=t), lambda b: b["x"]),
    "mapping that moves itself": (lambda t: Encoding(x=t, n=None), lambda b: b["x"]),
    "mapping that moves itself, of more than tensors": (
        lambda t: Encoding(x=t, n=object()), lambda b: b["x"]
    ),
    "dataclass": (lambda t: Example({"x": t}, "a"), lambda b: b.inputs["x"]),
    "object whose `to` takes the device alone": (Old, lambda b: b.values),
    "object that moves itself in place": (InPlace, lambda b: b.values),
    "object that records streams": (Recorded, lambda b: b.values),
    "objects in a list": (lambda t: [Old(t)], lambda b: b[0].values),
    "tensor that is not contiguous": (lambda t: t.repeat(2, 1).t(), lambda b: b[:, 0]),
}  # fmt: skip


@pytest.mark.parametrize("form", list(FORMS))
def test_forms_of_batches(training_on: Callable[[int], Training], form: str) -> None:
    """All of it is moved, in a batch of the same type, and is read as it was in any order of the device's work."""
    training = training_on(len(form))
    made, inside = FORMS[form]
    transfer = device_transfer.transfer_to(DEVICE)
    for number in range(12):
        batch = made(rows(number))
        moved = transfer.move(batch)
        assert type(moved) is (DeviceTensor if isinstance(batch, Tensor) else type(batch))
        tensor = inside(moved)
        if form == "tensor that is not contiguous":
            tensor = moved
        training.use(tensor)
        del moved, tensor, batch
        training.device.run_some()
    training.run()
    assert [torch.tensor(read).reshape(4, -1)[:, 0].tolist() for read in training.read] == [
        rows(number).tolist() for number in range(12)
    ]


def test_rest_of_a_batch_stays_as_it_is(training_on: Callable[[int], Training]) -> None:
    """Texts, numbers, objects without `to`, classes."""
    training_on(0)
    thing = object()
    batch = ["text", b"bytes", 3, None, thing, Old, range(3), {1, 2}]
    moved = device_transfer.transfer_to(DEVICE).move(batch)
    assert all(after is before for after, before in zip(moved, batch, strict=True))
    example = device_transfer.transfer_to(DEVICE).move(Example(1, "a"))
    assert example == Example(1, "a")


def test_packed_sequence_moves_itself() -> None:
    """Its lengths have to stay on the CPU: rebuilding it from moved parts would be refused by torch."""
    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 1]))
    started = device_transfer.DeviceTransfer.__new__(device_transfer.DeviceTransfer)
    started._device, started.pins_memory = torch.device("meta"), False
    parts = device_transfer._Started(torch.device("meta"), None, False, False)  # type: ignore[arg-type]
    moved = parts.move(packed)
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


class Numbers:
    """Samples that are their own index, and count how often they are read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        self.reads.append(index)
        return torch.tensor(float(index), dtype=torch.float64)


def test_nothing_is_read_ahead_in_the_training_process(
    training_on: Callable[[int], Training], me: Any
) -> None:
    """What the dataset is asked for after n batches is what n batches have."""
    training_on(0)
    me.device, data = DEVICE, Numbers()
    schedule = IndexSchedule(24, 4, epochs=1, seed=3)
    for number, batch in enumerate(
        index_loader.IndexLoader(me, data, schedule, None).batches(schedule.start)
    ):
        next(batch.micro_batches)
        assert len(data.reads) == 4 * (number + 1)


@pytest.mark.usefixtures("real_processes")
def test_batches_of_loader_processes_are_moved_ahead(
    training_on: Callable[[int], Training], monkeypatch: pytest.MonkeyPatch, me: Any
) -> None:
    """With torch's own loader and its pinning thread: same batches as read here, and copies that run ahead."""
    training = training_on(1)
    schedule = IndexSchedule(24, 4, epochs=2, seed=3)
    expected = [
        batch.tolist()
        for step in index_loader.IndexLoader(me, Numbers(), schedule, 2).batches(schedule.start)
        for batch, _ in step.micro_batches
    ]
    # torch's DataLoader pins what its processes read.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: DEVICE)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    me.device = DEVICE
    used = ahead = 0
    for step in index_loader.IndexLoader(me, Numbers(), schedule, 2, num_workers=2).batches(schedule.start):
        for batch, _ in step.micro_batches:
            training.use(batch)
            del batch
            training.device.run_some()
            used += 1
            ahead += training.device.streams[1].submitted > used * _PER_COPY
            time.sleep(0.02)  # a step of training, in which the processes read
    training.run()
    assert training.read == expected
    assert ahead > 10


def test_cpu_batches_stay_what_they_are() -> None:
    """Nothing is copied or made again."""
    transfer = device_transfer.transfer_to(torch.device("cpu"))
    batch = {"x": [rows(1)], "o": Old(rows(2))}
    assert transfer.move(batch) is batch
    assert transfer.pins_memory is False
    delivered: Any = Delivered([batch], lambda: True)
    assert next(iter(transfer.move_ahead(delivered))) is batch


class Graph:
    """Tells a library of its own about the streams that use it, as DGL's graphs do."""

    handle = 0

    def record_stream(self, stream: Any) -> None:
        """Take the handle of CUDA's stream."""
        self.handle = stream.cuda_stream


def test_object_that_records_streams_gets_one_of_its_devices_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.Stream` has no handle for other libraries."""
    waited: list[Any] = []
    base = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: base)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    graph, event = Graph(), torch.Event("cpu")
    pending = device_transfer.PendingBatch("batch", torch.device("cuda", 0), event, [graph])
    assert pending.handed_out() == "batch"
    assert waited == [event]
    assert graph.handle == 7
