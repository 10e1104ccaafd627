"""Batches on the device: no batch is used before its copy is through, or overwritten while it is in use, whatever comes first."""

from __future__ import annotations

import dataclasses
import random
import time
import weakref
from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from elasticflow.runtime.data import device_transfer, index_loader
from elasticflow.runtime.data.index_schedule import IndexSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEVICE = torch.device("cuda", 0)
NONSENSE = -1.0


class Event:
    """Done once the stream has done the work that it had when the event was recorded."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.given

    @property
    def is_done(self) -> bool:
        """True once it is."""
        return self.stream.done >= self.at


class Stream:
    """Work in its order, each piece behind the events that the stream was made to wait for."""

    def __init__(self, device: Device) -> None:
        self.device, self.given, self.done = device, 0, 0
        self._work: list[Event | Callable[[], None]] = []

    def add(self, work: Event | Callable[[], None]) -> None:
        """Queue work, or an event to wait for."""
        self._work.append(work)
        self.given += 1

    def run_next(self) -> bool:
        """Run the next piece; False if there is none, or it waits."""
        if not self._work or (isinstance(self._work[0], Event) and not self._work[0].is_done):
            return False
        work = self._work.pop(0)
        if not isinstance(work, Event):
            work()
        self.done += 1
        return True

    def record_event(self) -> Event:
        """Return an event behind all work so far."""
        return Event(self)

    def wait_event(self, event: Event) -> None:
        """Have later work wait."""
        self.add(event)

    def __enter__(self) -> None:
        self.device.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.device.current.pop()


@dataclasses.dataclass
class Block:
    """Memory of the device: of the stream that it was allocated on, in use by others until their events are done."""

    values: Tensor
    stream: Stream
    users: list[Stream] = dataclasses.field(default_factory=list)
    until: list[Event] = dataclasses.field(default_factory=list)


class Device:
    """A device with an allocator as torch's, whose streams run in an order drawn at random wherever events leave it open.

    Attributes:
        training: The stream of the training.
        current: The streams that were entered.
        read: What was read from batches, in order.
        reused: Allocations that got memory which another batch had had.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.training = Stream(self)
        self.streams, self.current = [self.training], [self.training]
        self._blocks: dict[int, Block] = {}
        self._free: list[Block] = []
        self.read: list[Any] = []
        self.reused = 0
        self.pinned: dict[int, Tensor] = {}

    def stream(self, *_: Any) -> Stream:
        """Return a new stream."""
        self.streams.append(Stream(self))
        return self.streams[-1]

    def run(self, most: int = 1_000_000) -> None:
        """Run up to *most* pieces of work, of one stream or the other."""
        for _ in range(most):
            if not any(stream.run_next() for stream in self._random.sample(self.streams, len(self.streams))):
                return

    def run_some(self) -> None:
        """Run as much as the device may have run by now: nothing or a lot."""
        self.run(self._random.choice([0, 0, 1, 2, 5]))

    def use(self, tensor: Tensor) -> None:
        """Queue a kernel that reads a tensor on the current stream."""
        block = self._blocks[id(tensor)]
        self.current[-1].add(lambda: self.read.append(block.values.tolist()))

    def to(self, tensor: Tensor, device: torch.device, *, non_blocking: bool = False) -> Tensor:
        """Copy a tensor from the CPU; a copy from pinned memory that does not block reads it when it runs."""
        assert device == DEVICE
        stream = self.current[-1]
        source = tensor if id(tensor) in self.pinned else tensor.clone()
        moved = torch.full_like(tensor, NONSENSE, dtype=torch.float64)
        block = self._allocate(moved, stream)
        stream.add(lambda: (block.values.fill_(NONSENSE), block.values.copy_(source), None)[2])
        while not non_blocking and stream.done < stream.given:
            self.run(1)
        return moved

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Have the allocator know of another stream's use."""
        self._blocks[id(tensor)].users.append(stream)

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """Return a tensor in pinned memory: the same if it is there."""
        if id(tensor) in self.pinned:
            return tensor
        pinned = tensor.clone()
        self.pinned[id(pinned)] = pinned
        return pinned

    def _allocate(self, tensor: Tensor, stream: Stream) -> Block:
        fit = (
            b for b in self._free if b.stream is stream and b.values.shape == tensor.shape
            and all(event.is_done for event in b.until)
        )  # fmt: skip
        block = next(fit, None)
        if block is None:
            block = Block(tensor.detach().clone(), stream)
        else:
            self._free.remove(block)
            self.reused += 1
            block.users, block.until = [], []
        self._blocks[id(tensor)] = block
        weakref.finalize(tensor, self._freed, id(tensor))
        return block

    def _freed(self, number: int) -> None:
        block = self._blocks.pop(number)
        block.until = [user.record_event() for user in block.users]
        self._free.append(block)


class Patched:
    """torch as it works with a `Device`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def device(self, seed: int) -> Device:
        """Return a device that torch works with from now on."""
        device = Device(seed)
        device_transfer.transfer_to.cache_clear()
        self._patch.setattr(torch, "Stream", device.stream)
        self._patch.setattr(torch.accelerator, "current_stream", lambda *_: device.current[-1])
        self._patch.setattr(torch.cuda, "current_stream", lambda *_: device.current[-1])
        self._patch.setattr(Tensor, "to", device.to)
        for name in ("to", "record_stream", "pin_memory"):
            method = getattr(device, name)
            self._patch.setattr(
                Tensor, name, lambda tensor, *given, _method=method, **more: _method(tensor, *given, **more)
            )
        return device

    def accelerator(self) -> None:
        """Have torch's DataLoader pin what its processes read."""
        self._patch.setattr(torch.accelerator, "is_available", lambda: True)
        self._patch.setattr(torch.accelerator, "current_accelerator", lambda: DEVICE)
        self._patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        self._patch.setattr(torch.accelerator, "set_device_index", lambda _: None)


@pytest.fixture
def patched() -> Iterator[Patched]:
    """Return torch patched; as it was after the test."""
    with pytest.MonkeyPatch.context() as patch:
        yield Patched(patch)
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
def test_batches_moved_ahead_are_read_as_they_were(patched: Patched, seed: int) -> None:
    """Copies and kernels run in any order that events leave open; a batch is dropped while the device still uses it."""
    device = patched.device(seed)
    chance = random.Random(seed)
    pinned = [device.pin_memory(rows(number)) for number in range(30)]
    delivered = Delivered(pinned, lambda: chance.random() < 0.7)
    for batch in device_transfer.transfer_to(DEVICE).move_ahead(delivered):
        device.use(batch)
        del batch
        device.run_some()
    device.run()
    assert device.read == [rows(number).tolist() for number in range(30)]
    assert device.reused


@pytest.mark.parametrize("seed", range(20))
def test_batches_read_here_may_be_written_to_at_once(patched: Patched, seed: int) -> None:
    """A dataset may give the same memory for each batch, pinned or not."""
    device = patched.device(seed)
    mine, pinned = rows(0), device.pin_memory(rows(0))
    for number in range(20):
        for memory in (mine, pinned):
            memory.fill_(number)
            (moved,) = device_transfer.transfer_to(DEVICE).move([memory])
            device.use(moved)
            del moved
        device.run_some()
    device.run()
    assert device.read == [rows(number).tolist() for number in range(20) for _ in range(2)]


def test_next_batch_is_copied_while_this_one_is_in_use(patched: Patched) -> None:
    """Its copy is queued before the training's work, and waits for none of it; one batch ahead, no more."""
    device = patched.device(0)
    delivered = Delivered([device.pin_memory(rows(number)) for number in range(5)], lambda: True)
    batches = device_transfer.transfer_to(DEVICE).move_ahead(delivered)
    next(batches)
    assert delivered.taken == 2
    assert device.streams[1].given == 2
    next(batches)
    assert delivered.taken == 3


def test_batch_that_is_not_there_is_not_waited_for(patched: Patched) -> None:
    """The step begins; the batch is taken at its turn."""
    device = patched.device(0)
    delivered = Delivered([device.pin_memory(rows(number)) for number in range(3)], lambda: False)
    batches = device_transfer.transfer_to(DEVICE).move_ahead(delivered)
    for number in range(3):
        next(batches)
        assert delivered.taken == number + 1


def test_error_of_a_batch_ahead_is_raised_at_its_turn(patched: Patched) -> None:
    """Training may end before that batch."""
    patched.device(0)
    delivered = Delivered([rows(0), ValueError("sample 7")], lambda: True)
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
def test_forms_of_batches(patched: Patched, form: str) -> None:
    """All of it is moved, in a batch of the same type, and is read as it was in any order of the device's work."""
    device = patched.device(len(form))
    made, inside = FORMS[form]
    transfer = device_transfer.transfer_to(DEVICE)
    for number in range(12):
        batch = made(rows(number))
        moved = transfer.move(batch)
        assert type(moved) is type(batch)
        tensor = inside(moved)
        if form == "tensor that is not contiguous":
            tensor = moved
        device.use(tensor)
        del moved, tensor, batch
        device.run_some()
    device.run()
    assert [torch.tensor(read).reshape(4, -1)[:, 0].tolist() for read in device.read] == [
        rows(number).tolist() for number in range(12)
    ]


def test_rest_of_a_batch_stays_as_it_is(patched: Patched) -> None:
    """Texts, numbers, objects without `to`, classes."""
    patched.device(0)
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


def test_nothing_is_read_ahead_in_the_training_process(patched: Patched, me: Any) -> None:
    """What the dataset is asked for after n batches is what n batches have."""
    patched.device(0)
    me.device, data = DEVICE, Numbers()
    schedule = IndexSchedule(24, 4, epochs=1, seed=3)
    for number, batch in enumerate(
        index_loader.IndexLoader(me, data, schedule, None).batches(schedule.start)
    ):
        next(batch.micro_batches)
        assert len(data.reads) == 4 * (number + 1)


@pytest.mark.usefixtures("real_processes")
def test_batches_of_loader_processes_are_moved_ahead(patched: Patched, me: Any) -> None:
    """With torch's own loader and its pinning thread: same batches as read here, and copies that run ahead."""
    device = patched.device(1)
    schedule = IndexSchedule(24, 4, epochs=2, seed=3)
    expected = [
        batch.tolist()
        for step in index_loader.IndexLoader(me, Numbers(), schedule, 2).batches(schedule.start)
        for batch, _ in step.micro_batches
    ]
    patched.accelerator()
    me.device = DEVICE
    used = ahead = 0
    for step in index_loader.IndexLoader(me, Numbers(), schedule, 2, num_workers=2).batches(schedule.start):
        for batch, _ in step.micro_batches:
            device.use(batch)
            del batch
            device.run_some()
            used += 1
            ahead += device.streams[1].given > used
            time.sleep(0.02)  # a step of training, in which the processes read
    device.run()
    assert device.read == expected
    assert ahead > 10


def test_cpu_batches_stay_what_they_are() -> None:
    """Nothing is copied or made again."""
    transfer = device_transfer.transfer_to(torch.device("cpu"))
    batch = {"x": [rows(1)], "o": Old(rows(2))}
    assert transfer.move(batch) is batch
    assert transfer.pins_memory is False
    delivered = Delivered([batch], lambda: True)
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
