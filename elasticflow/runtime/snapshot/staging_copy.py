"""Copies from the device to staging memory; on CUDA the copy runs while training continues, and this process does not wait.

On a CUDA device the copy runs on its own stream, after the work already queued on the training stream. On the device, the
training stream waits for the copy as late as possible: at once for tensors that a forward may write (buffers, objects of
the job's own), at the optimizer's step for tensors that only that step writes. Each step checks if the copy is complete;
then the writer receives its message.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.runtime.snapshot.rank_shard import address_of
from elasticflow.runtime.state.tensors import copy
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import Tensor
    from torch.optim import Optimizer

    from elasticflow.runtime.snapshot.rank_shard import RankShard

# cudaHostRegisterPortable.
_PORTABLE = 1


def copier_for(device: torch.device, optimizers: Collection[Optimizer]) -> Copier:
    """Return the copier for *device*; the steps of *optimizers* write the copied tensors."""
    return CudaCopier(device, optimizers) if device.type == "cuda" else Copier()


class Copier:
    """Copies from the CPU's own memory: a copy is done when `start` returns.

    Attributes:
        is_copying: A copy has begun, and the actions that wait for it have not been called.
    """

    is_copying = False

    def start(self, shard: RankShard, target: memoryview, stepped: Collection[str]) -> None:
        """Begin to copy *shard* to the start of *target*, which nothing else may use until the copy is complete.

        Args:
            target: Staging memory; not larger than the shard.
            stepped: Keys of tensors that nothing but the optimizer's step writes.
        """
        shard.copy_into(target)

    def then(self, action: Callable[[], None]) -> None:
        """Call *action* once the copy is complete, after earlier actions; now, if the copy is complete."""
        action()

    def poll(self) -> None:
        """Call the waiting actions if the copy is complete; never waits."""

    def finish(self) -> None:
        """Wait until the copy is complete, and call the waiting actions."""


class CudaCopier(Copier):
    """Copies from a CUDA device.

    A forward that writes to a parameter of an optimizer would change it during the copy; no module of torch does that.

    Args:
        device: Device on which training runs.
        optimizers: Optimizers whose steps wait for the copy on the device.
    """

    def __init__(self, device: torch.device, optimizers: Collection[Optimizer]) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._is_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._is_through = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._memory = _PinnedMemory(device)
        # An optimizer's next step must wait for the copy.
        self._must_wait = False
        self._bounced: tuple[memoryview, Tensor] | None = None
        self._actions: list[Callable[[], None]] = []
        self.is_copying = False
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    def start(self, shard: RankShard, target: memoryview, stepped: Collection[str]) -> None:
        """Begin to copy; see `Copier`. Only the device waits for the copy."""
        self.finish()
        if not shard.nbytes:
            return
        memory = self._memory.of(shard, target)
        self._bounced = None if memory is target else (target, torch.frombuffer(memory, dtype=torch.uint8))
        views = shard.views_in(memory)
        on_device = [key for key in views if shard.tensors[key].device.type == "cuda"]
        on_cpu = [key for key in views if key not in set(on_device)]
        copy([views[key] for key in on_cpu], [shard.tensors[key] for key in on_cpu])
        training = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream), torch.no_grad():
            for event, is_late in ((self._is_read, False), (self._is_through, True)):
                for key in on_device:
                    if (key in stepped) == is_late:
                        # The device resolves conjugates and negations: the host would do it too early.
                        source = shard.tensors[key].resolve_conj().resolve_neg()
                        views[key].copy_(source, non_blocking=True)
                event.record(self._stream)
        training.wait_event(self._is_read)
        self._must_wait = self.is_copying = True
        fault_injection.reach("snapshot.after_copy")

    def then(self, action: Callable[[], None]) -> None:
        """Call *action* once the copy is complete; see `Copier`."""
        self._actions.append(action)
        self.poll()

    def poll(self) -> None:
        """Call the waiting actions if the copy is complete; never waits."""
        if not self.is_copying or self._is_through.query():  # type: ignore[no-untyped-call]
            self._act()

    def finish(self) -> None:
        """Wait until the copy is complete, and call the waiting actions."""
        if self.is_copying:
            self._is_through.synchronize()
        self._act()

    def _act(self) -> None:
        self.is_copying = False
        if self._bounced is not None:
            target, source = self._bounced
            self._bounced = None
            torch.frombuffer(target, dtype=torch.uint8).copy_(source[: target.nbytes])
        actions, self._actions = self._actions, []
        for action in actions:
            action()

    def _before_step(self, *_: Any) -> None:
        if self._must_wait:
            torch.cuda.current_stream(self._device).wait_event(self._is_through)
            self._must_wait = False


class _PinnedMemory:
    """Staging memory that the driver has pinned, so that the device writes to it directly."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shard: RankShard | None = None
        self._known: dict[int, memoryview] = {}
        self._bounce: Tensor | None = None

    def of(self, shard: RankShard, target: memoryview) -> memoryview:
        """Return *target*, pinned; other pinned memory if the driver refuses to pin *target*."""
        # A new layout has new buffers: unpin the old buffers.
        if shard is not self._shard:
            for address in self._known:
                torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
            self._known, self._bounce, self._shard = {}, None, shard
        if self._bounce is None and self._pin(target):
            return target
        if self._bounce is None:
            self._bounce = torch.empty(shard.nbytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(self._bounce.numpy().data)

    def _pin(self, target: memoryview) -> bool:
        address = address_of(target)
        if address not in self._known:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            if int(cudart.cudaHostRegister(address, target.nbytes, _PORTABLE)) != 0:
                # Clear the driver's last error, which the next kernel would report as its own.
                with suppress(RuntimeError):
                    torch.zeros(1, device=self._device)
                return False
            self._known[address] = target
        return True
