"""Copies from the device to staging memory; the copy runs while training continues, and this process does not wait.

On a device the copy runs on its own stream, after the work already queued on the training stream. On the device, the
training stream waits for the copy as late as possible: at once for tensors that a forward may write (buffers, objects of
the job's own), at the optimizer's step for tensors that as a rule only that step writes.

Other code may write such a tensor, too, before the step: an embedding with `max_norm` in its forward, a clamp at the top of
a loop, the replay of a graph that contains the step. torch does not count all such writes: `_version` stays the same for
writes through `.data` and by fused optimizers (seen in torch 2.13), and the replay of a graph calls no hook. So the content
is compared: the device sums up the tensors in the order of the training stream, where `start` was called, and a thread of
this process sums up the copy. A copy with other sums is not handed over, and from then on the training stream waits at once.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.runtime.process.checksums import Sums
from elasticflow.runtime.snapshot.rank_shard import address_of
from elasticflow.runtime.state.tensors import copy
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from elasticflow.runtime.process.checksums import StartedSums
    from elasticflow.runtime.snapshot.rank_shard import RankShard

# cudaHostRegisterPortable.
_PORTABLE = 1


def copier_for(device: torch.device, optimizers: Collection[Optimizer]) -> Copier:
    """Return the copier for *device*; the steps of *optimizers* write the copied tensors."""
    return Copier() if device.type == "cpu" else DeviceCopier(device, optimizers)


class Copier:
    """Copies from the CPU's own memory: a copy is done when `start` returns.

    Attributes:
        is_copying: A copy has begun, and the actions that wait for it have not been called.
    """

    is_copying = False
    _shard: RankShard | None = None

    def start(
        self, shard: RankShard, target: memoryview, stepped: Collection[str], *, waits: bool = False
    ) -> None:
        """Begin to copy *shard* to the start of *target*, which nothing else may use until the copy is complete.

        Args:
            target: Staging memory; not larger than the shard.
            stepped: Keys of tensors that as a rule nothing but the optimizer's step writes.
            waits: The copy must not be overtaken: training waits for it at once, on the device.
        """
        self._shard = shard
        shard.copy_into(target)

    def then(self, action: Callable[[str | None], None]) -> None:
        """Call *action* once the copy is complete, after earlier actions; now, if the copy is complete.

        Args:
            action: Called with None, or with the key of a tensor that was written while it was copied: the copy is then not
                the state after the step, and must not be used.
        """
        action(None)

    def poll(self) -> None:
        """Call the waiting actions if the copy is complete; never waits."""

    def finish(self) -> None:
        """Wait until the copy is complete, and call the waiting actions."""

    def release(self, memory: memoryview) -> None:
        """Let go of a piece of staging memory, which is about to be unmapped."""
        if self._shard is not None:
            self._shard.forget(memory)


class DeviceCopier(Copier):
    """Copies from a device.

    The first copy waits for everything: each generation has a good copy, however often the job's own code overtakes later ones.

    Args:
        optimizers: Optimizers whose steps wait for the copy on the device.
    """

    def __init__(self, device: torch.device, optimizers: Collection[Optimizer]) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._is_read, self._is_through = torch.Event(device), torch.Event(device)
        self._memory = _PinnedMemory(device)
        self._comparison = _Comparison()
        self._thread = ThreadPoolExecutor(1, "copied")
        # Training waits at its optimizer's step for tensors that the step writes, and not at once.
        self._waits_late = self._was_overtaken = False
        self._bounced: tuple[memoryview, Tensor] | None = None
        # Its result is the key of a tensor that was written during the copy.
        self._settled: Future[str | None] | None = None
        self._overtaken: str | None = None
        self._actions: list[Callable[[str | None], None]] = []
        self.is_copying = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def start(
        self, shard: RankShard, target: memoryview, stepped: Collection[str], *, waits: bool = False
    ) -> None:
        """Begin to copy; see `Copier`. Only the device waits for the copy."""
        self.finish()
        self._shard, self._overtaken = shard, None
        if not shard.nbytes:
            return
        memory = self._memory.of(target)
        self._bounced = None if memory is target else (target, torch.frombuffer(memory, dtype=torch.uint8))
        views = shard.views_in(memory)
        on_device = [key for key in views if shard.tensors[key].device.type != "cpu"]
        on_cpu = [key for key in views if shard.tensors[key].device.type == "cpu"]
        copy([views[key] for key in on_cpu], [shard.tensors[key] for key in on_cpu])
        compared = {key for key in on_device if shard.keys[key] in stepped}
        late = compared if self._waits_late and not waits else set()
        training = torch.accelerator.current_stream(self._device)
        # On the training stream: no later write of it comes before the sums. Also compared if training waits at once: another
        # stream of the job's own does not wait.
        self._comparison.begin(shard, compared, views)
        self._stream.wait_stream(training)
        with self._stream, torch.no_grad():
            for event, is_late in ((self._is_read, False), (self._is_through, True)):
                for key in on_device:
                    if (key in late) == is_late:
                        # The device resolves conjugates and negations: the host would do it too early.
                        source = shard.tensors[key].resolve_conj().resolve_neg()
                        views[key].copy_(source, non_blocking=True)
                if is_late:
                    self._comparison.fetch()
                event.record(self._stream)
        training.wait_event(self._is_read)
        self.is_copying, self._waits_late = True, not self._was_overtaken
        # At once, so that the copy continues beside the next step even without `poll`: `finish` may come right after that step.
        self._settled = self._thread.submit(self._settle)
        fault_injection.reach("snapshot.after_copy")

    def then(self, action: Callable[[str | None], None]) -> None:
        """Call *action* once the copy is complete; see `Copier`."""
        self._actions.append(action)
        self.poll()

    def poll(self) -> None:
        """Call the waiting actions if the copy is complete; never waits."""
        if self._settled is None or self._settled.done():
            self._act()

    def finish(self) -> None:
        """Wait until the copy is complete, and call the waiting actions."""
        if self.is_copying:
            self._is_through.synchronize()
        self._act()

    def release(self, memory: memoryview) -> None:
        """Let go of a piece of staging memory, which is about to be unmapped."""
        self.finish()
        self._memory.release(memory)
        self._comparison = _Comparison()
        super().release(memory)

    def _settle(self) -> str | None:
        """Complete the copy in main memory; return the key of a tensor that was written meanwhile, if any. Runs in a thread."""
        # Other threads continue: torch releases the interpreter's lock (torch 2.13, THPEvent_synchronize in torch/csrc/Event.cpp).
        self._is_through.synchronize()
        overtaken = self._comparison.difference()
        if self._bounced is not None:
            target, source = self._bounced
            torch.frombuffer(target, dtype=torch.uint8).copy_(source[: target.nbytes])
        return overtaken

    def _act(self) -> None:
        if self._settled is not None:
            self._overtaken = self._settled.result()
            if self._overtaken is not None:
                self._was_overtaken, self._waits_late = True, False
            self._settled = self._bounced = None
        self.is_copying = False
        actions, self._actions = self._actions, []
        for action in actions:
            action(self._overtaken)

    def _before_step(self, *_: Any) -> None:
        if self.is_copying:
            training = torch.accelerator.current_stream(self._device)
            # A graph cannot wait for work outside of it; `torch.cuda.graph` waits for the device before it captures.
            if not training.is_capturing():
                training.wait_event(self._is_through)


class _Comparison:
    """Compares tensors with their copies in main memory by sums over their bits."""

    def __init__(self) -> None:
        self._sums = Sums({})
        # Views of a shard's buffers, and the sums over them, by the id of the views.
        self._sums_of_views: dict[int, tuple[Mapping[str, Tensor], Sums]] = {}
        self._shard: RankShard | None = None
        self._keys: Collection[str] = ()
        self._views: Mapping[str, Tensor] = {}
        self._started: StartedSums | None = None

    def begin(self, shard: RankShard, keys: Collection[str], views: Mapping[str, Tensor]) -> None:
        """Start to sum up the tensors *keys* of *shard*, on the device's current stream; *views* are their copies."""
        self._started = None
        if not keys:
            return
        tensors = {key: shard.tensors[key] for key in keys}
        if not self._sums.fits(tensors):
            self._sums = Sums(tensors)
        if shard is not self._shard or keys != self._keys:
            self._shard, self._keys, self._sums_of_views = shard, keys, {}
        self._started, self._views = self._sums.start(), views

    def fetch(self) -> None:
        """Move the sums to main memory, once the device's current stream comes to it."""
        if self._started is not None:
            self._started.fetch()

    def difference(self) -> str | None:
        """Return the first key whose copy differs; to be asked once the copy and `fetch` are complete."""
        if self._started is None:
            return None
        known = self._sums_of_views.get(id(self._views))
        if known is None:
            sums = Sums({key: self._views[key] for key in self._keys})
            known = self._sums_of_views[id(self._views)] = self._views, sums
        expected, copied = self._started.result(), known[1].start().result()
        return next((key for key, number in expected.items() if copied[key] != number), None)


class _PinnedMemory:
    """Staging memory that the driver has pinned, so that the device writes to it directly.

    A buffer is pinned once, and as long as it is mapped. Only CUDA can pin memory that is there already: for other devices,
    and where the driver refuses, pinned memory of torch's own takes the place of the buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By address; a view keeps its memory mapped.
        self._pinned: dict[int, memoryview] = {}
        self._can_pin = device.type == "cuda"
        self._bounce: Tensor | None = None

    def of(self, target: memoryview) -> memoryview:
        """Return *target*, pinned; or other pinned memory that is not smaller."""
        if self._can_pin and self._pin(target):
            return target
        self._can_pin = False
        if self._bounce is None or self._bounce.numel() < target.nbytes:
            self._bounce = torch.empty(target.nbytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(self._bounce.numpy().data)

    def release(self, memory: memoryview) -> None:
        """Unpin a buffer: it is about to be unmapped."""
        address = address_of(memory)
        if self._pinned.pop(address, None) is not None:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._bounce, self._can_pin = None, self._device.type == "cuda"

    def _pin(self, target: memoryview) -> bool:
        address = address_of(target)
        pinned = self._pinned.get(address)
        if pinned is not None and pinned.nbytes >= target.nbytes:
            return True
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if pinned is not None:
            del self._pinned[address]
            cudart.cudaHostUnregister(address)
        if int(cudart.cudaHostRegister(address, target.nbytes, _PORTABLE)) != 0:
            # Clear the driver's last error, which the next kernel would report as its own.
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            return False
        self._pinned[address] = target
        return True
