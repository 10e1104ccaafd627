"""A device that is not there: tensors that say they lie on it, computed on the CPU, and a log of what the host waits for.

torch runs its real code for another device: modules, autograd, optimizers and DistributedDataParallel see `lazy:0`, for which
there is no autocast. The device obeys as few promises as it may:

* A kernel runs at once, since nothing can see how late it runs but the copies between the device and the host.
* A copy to pinned memory without blocking arrives when the host has waited for it. Until then the memory holds nonsense.
* A copy from pinned memory without blocking reads it at any time until the host has waited for it: the test fails if the
  memory was written meanwhile.
* A copy on a stream of its own runs as late as the events, and kernels of that stream, allow: it sees what other streams have
  written by then.

With a `seed` the streams' work runs in an order drawn at random wherever events leave it open, and the allocator gives memory
that was freed to the next copy of the same stream, as torch's does: once the streams of `record_stream` are through with it.

`torch.accelerator` and `torch.cuda` do not see the device, so other tests of the process stay as they are.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
import traceback
import weakref
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import elasticflow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A kind that the CPU build knows and that is no accelerator: autograd's engine asks it for no stream, and computes its
# gradients in the calling thread (torch 2.13, `should_run_in_cpu_ready_queue` in torch/csrc/autograd/engine.cpp).
DEVICE = torch.device("lazy", 0)
_HOST = torch.device("cpu")
_OURS, _TORCH = str(Path(elasticflow.__file__).parent), str(Path(torch.__file__).parent)
_ROOMS = (_OURS, f"{_TORCH}/amp", f"{_TORCH}/nn/utils", f"{_TORCH}/optim")
_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

aten = torch.ops.aten


class Wait(NamedTuple):
    """A place at which the host waits for the device.

    Attributes:
        reason: What it waits for.
        place: Module and function: the innermost of elasticflow, else of torch's optimizers; else the job's own code.
    """

    reason: str
    place: str


class DeviceTensor(Tensor):
    """A tensor on the pretended device; its values lie `on_host`."""

    on_host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[Self], values: Tensor) -> Self:
        """Return a tensor on the device."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device=DEVICE,
        )  # fmt: skip
        made.on_host = values
        return made

    def data_ptr(self) -> int:
        """Return the address, which a view shares with its base."""
        return self.on_host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory, which can be given back and taken again."""
        return self.on_host.untyped_storage()

    def record_stream(self, stream: Any) -> None:
        """Have the allocator know of another stream's use."""
        _now().record_stream(self, stream)

    def tolist(self) -> Any:
        """Return the values; torch refuses to for a tensor of a subclass."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.on_host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation."""
        del types
        assert _Pretence.now is not None, "a tensor of the pretended device outlived its test"
        return _Pretence.now.run(func, args, kwargs or {})


class Event:
    """An event of the pretended device; `query` says no until somebody has waited."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._stream: Stream | None = None
        self._at = 0

    def record(self, stream: Stream | None = None) -> None:
        """Stand behind the work that the stream has by now."""
        self._stream = stream or _now().stream
        self._at = self._stream.submitted

    def elapsed_time(self, _: Event) -> float:
        """Return the milliseconds between two events."""
        return 0.0

    def query(self) -> bool:
        """Return True if the work is known to be done."""
        return self._stream is None or self._stream.done >= self._at

    def synchronize(self) -> None:
        """Have the host wait; a thread beside the test's own waits until that has waited, or until the test is over."""
        if self._stream is None:
            return
        if threading.current_thread() is threading.main_thread():
            _now().wait("an event")
            self._stream.run_to(self._at)
        began = _now()
        while not self.query():
            assert _Pretence.now is began, "the test ended before the device had done its work"
            time.sleep(0.0005)

    def let_pass(self) -> None:
        """Have the device do the work that the event stands behind."""
        if self._stream is not None:
            self._stream.run_to(self._at, arrives=False)

    def wait(self, stream: Stream | None = None) -> None:
        """Have a stream wait, which the host does not."""
        stream = stream or _now().stream
        if self._stream is not None and self._stream is not stream:
            stream.hold_until(self)


class _Work(NamedTuple):
    number: int
    is_arrival: bool
    run: Callable[[], object]
    behind: Event | None

    def may_run(self) -> bool:
        return self.behind is None or self.behind.query()


class Stream:
    """A stream of the pretended device: work that nobody has waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.submitted = self.done = 0
        self.device = DEVICE
        self._work: list[_Work] = []
        self._before: list[Stream] = []
        if _Pretence.now is not None:
            _Pretence.now.streams.append(self)

    def add(
        self, work: Callable[[], object], *, is_arrival: bool = False, behind: Event | None = None
    ) -> None:
        """Add work, *behind* an event; an arrival at the host is seen by the host alone."""
        self.submitted += 1
        self._work.append(_Work(self.submitted, is_arrival, work, behind))

    def hold_until(self, event: Event) -> None:
        """Have later work of this stream wait for an event."""
        if _now().random is None:
            event.let_pass()
        else:
            self.add(event.let_pass, behind=event)

    def run_next(self) -> bool:
        """Run the next piece of work; False if there is none, or it stands behind an event that is not through."""
        if not self._work or not self._work[0].may_run():
            return False
        work = self._work.pop(0)
        work.run()
        self.done = work.number
        return True

    def run_to(self, number: int, *, arrives: bool = True) -> None:
        """Run the work up to that number; without *arrives* the device waits, and nothing arrives at the host."""
        due = [each for each in self._work if each.number <= number and (arrives or not each.is_arrival)]
        self._work = [each for each in self._work if each not in due]
        for work in due:
            work.run()
        if arrives:
            self.done = max(self.done, number)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event behind the work that there is."""
        event = event or Event()
        event.record(self)
        return event

    def is_capturing(self) -> bool:
        """False: no graph is captured."""
        return False

    def wait_event(self, event: Event) -> None:
        """Have this stream wait."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Have this stream wait for all that another one has."""
        stream.run_to(stream.submitted, arrives=False)

    def synchronize(self) -> None:
        """Have the host wait."""
        _now().wait("a stream")
        self.run_to(self.submitted)

    def __enter__(self) -> Self:
        self._before.append(_now().stream)
        _now().stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _now().stream = self._before.pop()


@dataclasses.dataclass(eq=False)
class _Block:
    """Memory: of the stream that it was allocated on, in use by others until their events are through."""

    memory: Tensor
    stream: Stream
    users: list[Stream] = dataclasses.field(default_factory=list)
    until: list[Event] = dataclasses.field(default_factory=list)


class Pretence:
    """The device within one test.

    Args:
        seed: Of the order of the streams' work, which is then drawn at random; None: side streams run as late as they may.

    Attributes:
        device: To put tensors on.
        waits: Places at which the host has waited for the device, in order.
        stream: The stream that work goes to.
        main: The stream that is there from the beginning.
        streams: All of them, in the order in which they were made.
        random: Draws the order; None without a seed.
        reused: Allocations that got memory which another tensor had had.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.device = DEVICE
        self.waits: list[Wait] = []
        self.main = self.stream = Stream()
        self.streams = [self.main]
        self.random = None if seed is None else random.Random(seed)
        self.reused = 0
        self._pinned: dict[int, Tensor] = {}
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []

    def run_some(self, most: int | None = None) -> None:
        """Run up to *most* pieces of work, of one stream or another; without, as many as may have run by now: none, or a lot."""
        assert self.random is not None
        for _ in range(self.random.choice([0, 0, 1, 2, 5]) if most is None else most):
            if not any(stream.run_next() for stream in self.random.sample(self.streams, len(self.streams))):
                return

    def allocated(self, like: Tensor) -> DeviceTensor:
        """Return a tensor on the device; with a seed its memory may have been another tensor's, of which no view may be left."""
        if self.random is None:
            return DeviceTensor(like)
        fit = (
            block for block in self._free
            if block.stream is self.stream and all(event.query() for event in block.until)
            and (block.memory.shape, block.memory.stride(), block.memory.dtype) == (like.shape, like.stride(), like.dtype)
        )  # fmt: skip
        block = next(fit, None)
        if block is None:
            block = _Block(like.fill_(-1), self.stream)
        else:
            self._free.remove(block)
            self.reused += 1
            block.users, block.until = [], []
        tensor = DeviceTensor(block.memory)
        self._blocks[id(tensor)] = block
        weakref.finalize(tensor, self._freed, id(tensor)).atexit = False
        return tensor

    def record_stream(self, tensor: DeviceTensor, stream: Stream) -> None:
        """Keep a tensor's memory, once it is freed, until *stream* is through with the work that it has by then."""
        if self.random is not None:
            memory = tensor.untyped_storage().data_ptr()
            blocks = self._blocks.values()
            next(b for b in blocks if b.memory.untyped_storage().data_ptr() == memory).users.append(stream)

    def _freed(self, number: int) -> None:
        block = self._blocks.pop(number)
        block.until = [user.record_event() for user in block.users]
        self._free.append(block)

    def wait(self, reason: str) -> None:
        """Note that the host waits."""
        self.waits.append(Wait(reason, _place()))

    def pin(self, tensor: Tensor) -> Tensor:
        """Note that a tensor's memory is pinned, and return the tensor."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """True if a tensor lies in pinned memory."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def pin_range(self, address: int, tensor: Tensor) -> None:
        """Pin memory that was not allocated for it, as cudaHostRegister does."""
        self._pinned[address] = tensor

    def synchronize(self, *_: Any) -> None:
        """Have the host wait for all that the device has."""
        self.wait("the device")
        self._catch_up()

    def pinned(self, tensor: Tensor) -> Tensor:
        """Return a tensor in pinned memory: the same if it is there."""
        return tensor if self.is_pinned(tensor) else self.pin(tensor.clone())

    def _catch_up(self) -> None:
        self.stream.run_to(self.stream.submitted)
        self.main.run_to(self.main.submitted)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation of which a tensor is on the device."""
        if func is aten.copy_.default:
            return self.copy(*args, **kwargs)
        if func is aten._to_copy.default and not isinstance(args[0], DeviceTensor):
            return self._moved(*args, **kwargs)
        if func is aten._to_copy.default and _is_host(kwargs.get("device")):
            return self._moved(*args, **kwargs)
        if _reads_values(func, args):
            self.wait(f"a value: {func.overloadpacket.__name__}")
            self._catch_up()
        if self.stream is not self.main and not func.is_view:
            self.stream.run_to(self.stream.submitted, arrives=False)
        known: dict[int, DeviceTensor] = {}

        def values_of(value: Any) -> Any:
            if isinstance(value, DeviceTensor):
                known[id(value.on_host)] = value
                return value.on_host
            return _HOST if isinstance(value, torch.device) else value

        def on_device(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return known[id(value)] if id(value) in known else DeviceTensor(value)

        return tree_map(on_device, func(*tree_map(values_of, args), **tree_map(values_of, kwargs)))

    def _moved(
        self, source: Tensor, *, dtype: Any = None, non_blocking: bool = False, **options: Any
    ) -> Tensor:
        """Copy between the device and the host, into new memory."""
        is_to_host = isinstance(source, DeviceTensor)
        shape = source.on_host if isinstance(source, DeviceTensor) else source
        like = torch.empty_like(shape, dtype=dtype, memory_format=options.get("memory_format"))
        if is_to_host and non_blocking:
            self.pin(like)  # as torch's does
        target: Tensor = like if is_to_host else self.allocated(like)
        return self.copy(target, source, non_blocking)

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy *source*, of which one or the other is on the device, to *target*, and return that."""
        host = next((t for t in (target, source) if not isinstance(t, DeviceTensor)), None)
        to, of = (t.on_host if isinstance(t, DeviceTensor) else t for t in (target, source))
        if host is None:
            self._submit(lambda: to.copy_(of))
        elif not non_blocking or not self.is_pinned(host):
            self.wait("a copy to the host" if host is target else "a copy to the device")
            self._catch_up()
            to.copy_(of)
        elif host is target:
            self._deliver(to, of)
        else:
            was = of.clone()
            self._submit(lambda: to.copy_(of))
            self.stream.add(lambda: _require_same(of, was), is_arrival=True)
        return target

    def _submit(self, work: Callable[[], object]) -> None:
        if self.stream is self.main and self.random is None:
            work()
        else:
            self.stream.add(work)

    def _deliver(self, to: Tensor, of: Tensor) -> None:
        arriving: list[Tensor] = []
        self._submit(lambda: arriving.append(of.clone()))
        to.view(torch.uint8).fill_(0xFF) if to.is_contiguous() and to.dim() else to.fill_(-1)
        self.stream.add(lambda: to.copy_(arriving.pop()), is_arrival=True)


class _Pretence:
    now: Pretence | None = None
    is_registered = False


def _now() -> Pretence:
    assert _Pretence.now is not None
    return _Pretence.now


def _reads_values(func: Any, args: Any) -> bool:
    """Return True if the host must know values of the operation's tensors to go on."""
    if func in {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}:
        return any(each is not None and each.dtype in {torch.bool, torch.uint8} for each in args[1])
    return bool(_DATA_DEPENDENT & {*func.tags})


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _require_same(now: Tensor, was: Tensor) -> None:
    bits = torch.uint8
    is_same = torch.equal(now.contiguous().reshape(-1).view(bits), was.contiguous().reshape(-1).view(bits))
    assert is_same, "pinned memory was written before the device had copied it"


def _place() -> str:
    frames = traceback.extract_stack()[:-2]
    for room in _ROOMS:
        for frame in reversed(frames):
            if frame.filename.startswith(room):
                return f"{Path(frame.filename).stem}.{frame.name}"
    return "the job's own code"


_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]


def _register() -> None:
    """Make torch know the device; for the rest of the process, in which `torch.accelerator` still sees none."""
    if _Pretence.is_registered:
        return
    _Pretence.is_registered = True
    generator = torch.Generator()
    module = SimpleNamespace(
        is_initialized=lambda: True, is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 1,
        manual_seed_all=generator.manual_seed, manual_seed=generator.manual_seed, _is_in_bad_fork=lambda: False,
        default_generators=(generator,), get_rng_state=lambda _=None: generator.get_state(),
        set_rng_state=lambda state, _=None: generator.set_state(state),
        Stream=Stream, Event=Event, stream=lambda stream: stream, current_stream=lambda *_: _now().stream,
    )  # fmt: skip
    setattr(torch, DEVICE.type, module)  # as torch._register_device_module does
    _library.impl("empty.memory_format", _factory(aten.empty.memory_format), "Lazy")
    _library.impl("empty_strided", _factory(aten.empty_strided.default), "Lazy")
    # `torch.tensor(..., device=)` fills its memory beneath the dispatch to Python.
    _library.impl("_copy_from", lambda source, target, _=False: _now().copy(target, source), "Lazy")


def _factory(operation: Any) -> Callable[..., DeviceTensor]:
    def make(*args: Any, pin_memory: Any = None, device: Any = None, **kwargs: Any) -> DeviceTensor:
        del pin_memory, device
        return _now().allocated(operation(*args, device=_HOST, **kwargs))

    return make


@contextmanager
def pretended(seed: int | None = None) -> Iterator[Pretence]:
    """Context in which the pretended device is there, with its pinned memory, streams and events; *seed*: see `Pretence`."""
    _register()
    with pytest.MonkeyPatch.context() as patch:
        _Pretence.now = now = Pretence(seed)
        for name in ("empty", "zeros", "empty_like", "tensor"):
            patch.setattr(torch, name, _pinning(now, getattr(torch, name)))
        patch.setattr(Tensor, "pin_memory", lambda tensor, *_: now.pinned(tensor))
        patch.setattr(Tensor, "is_pinned", lambda tensor, *_: now.is_pinned(tensor))
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: now.stream)
        patch.setattr(torch.accelerator, "synchronize", now.synchronize)
        try:
            yield now
        finally:
            _Pretence.now = None


def _pinning(now: Pretence, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        return now.pin(tensor) if pin_memory else tensor

    return made
