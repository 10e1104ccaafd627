"""A CUDA driver that is only pretended, for torch's CUDA build on a machine without a GPU; this folder goes on PYTHONPATH.

True to the driver, as torch's sources have it (`torch/csrc/cuda/Module.cpp`, `torch/cuda/__init__.py`):

* `torch._C._cuda_init` succeeds, and so does `_cuda_getDeviceCount`. A process forked after either cannot use CUDA.
* NVML is asked first where torch asks it: `nvml.c`, in LD_LIBRARY_PATH, answers.

Not true, so that a worker gets past its first kernel: **tensors of the device are tensors of the CPU**, and say so. No kernel
runs, nothing is asynchronous, streams and events do nothing, and gloo stands in for nccl. So it shows which process opens
the device, when, and that the code around the device runs. It shows no bits, no times, no races and no memory of a GPU.

PRETENDED_GPUS: number of devices, 1 if unset. PRETENDED_LOG: a file that gets a line of JSON for each initialisation:
process, command, and the functions it came from.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from tests.gpu.pretended.driver import Driver
else:
    # This folder is on the path; the tests of the checkout whose product runs may be others.
    from driver import Driver

_MEMORY = 2 << 30


class _AfterImport(importlib.abc.MetaPathFinder):
    """Changes a module once it is imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute, change = spec.loader.exec_module, self._changes[name]

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


class _Stream:
    """A stream on which nothing is ever outstanding."""

    device_index, stream_id, cuda_stream = 0, 0, 0
    device: Any = None

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Event:
    """An event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, event: Any) -> float:
        return 0.0


class _Device(Driver):
    """The driver with its device, below torch."""

    def __init__(self, torch: Any) -> None:
        super().__init__()
        self._torch = torch
        self._device = 0
        self._is_ready = False
        self._files: list[int] = []

    def init(self) -> None:
        """Open the device. Torch calls it once, and not in a process that was forked after it."""
        super().init()
        for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            if Path(f"/dev/{name}").exists():
                self._files.append(os.open(f"/dev/{name}", os.O_RDWR))
        if log := os.environ.get("PRETENDED_LOG"):
            by = [frame.name for frame in reversed(traceback.extract_stack()[:-1])][:40]
            line = json.dumps({"pid": os.getpid(), "command": sys.argv, "by": by}) + "\n"
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(descriptor, line.encode())
            os.close(descriptor)
        cuda = self._torch.cuda
        cuda._get_device_properties = _properties
        cuda.default_generators = tuple(self._torch.Generator() for _ in range(cuda.device_count()))
        if not self._is_ready:
            self._is_ready = True
            _on_cpu(self._torch).__enter__()

    def set_device(self, index: int) -> None:
        self._torch.cuda._lazy_init()
        there = self._torch.cuda.device_count()
        if index >= there:
            raise self._torch.AcceleratorError("CUDA error: invalid device ordinal")
        self._device = index

    def device(self) -> int:
        return self._device

    def exchange(self, index: int) -> int:
        before = self._device
        if index >= 0:
            self.set_device(index)
        return before


def _properties(index: int) -> Any:
    uuid = f"00000000-0000-0000-0000-{index:012d}"
    return SimpleNamespace(
        name="Pretended GPU",
        major=9,
        minor=0,
        total_memory=_MEMORY,
        multi_processor_count=1,
        uuid=uuid,
        gcnArchName="",
        warp_size=32,
    )


def _on_cpu(torch: Any) -> Any:
    """Return the mode in which each function of torch takes the CPU for the device; a factory takes pageable memory for pinned."""
    from torch.overrides import TorchFunctionMode

    def moved(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            return "cpu"
        return value

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func is torch.device:
                return func(*args, **(kwargs or {}))
            kwargs = {key: moved(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
            if func is torch.Tensor.cuda:
                return args[0]
            return func(*map(moved, args), **kwargs)

    return OnCpu()


def _pretend(torch: Any) -> None:
    """Put the pretended driver below *torch*."""
    if not hasattr(torch._C, "_cuda_getDeviceCount"):
        raise SystemExit("the pretended driver needs torch's CUDA build")
    driver = _Device(torch)
    _Stream.device = torch.device("cuda", 0)
    stream = _Stream()
    below: dict[str, Any] = {
        "_cuda_init": driver.init,
        "_cuda_getDeviceCount": driver.count,
        "_cuda_isInBadFork": driver.is_in_bad_fork,
        "_cuda_setDevice": driver.set_device,
        "_cuda_getDevice": driver.device,
        "_cuda_synchronize": lambda: None,
        "_cuda_memoryStats": lambda *_: {},
        "_cuda_resetPeakMemoryStats": lambda *_: None,
        "_cuda_emptyCache": lambda: None,
        "_accelerator_getDeviceIndex": driver.device,
        "_accelerator_setDeviceIndex": driver.set_device,
        "_accelerator_exchangeDevice": driver.exchange,
        "_accelerator_maybeExchangeDevice": driver.exchange,
        "_accelerator_getStream": lambda *_: stream,
        "_accelerator_setStream": lambda *_: None,
        "_accelerator_synchronizeDevice": lambda *_: None,
    }
    for name, function in below.items():
        setattr(torch._C, name, function)
    cuda = torch.cuda
    # The compiler has a table of these by identity: no two names may have one function.
    above: dict[str, Any] = {
        "_is_in_bad_fork": driver.is_in_bad_fork,
        "_exchange_device": driver.exchange,
        "_maybe_exchange_device": partial(driver.exchange),
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda stream: stream or _Stream(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0, cudaGetLastError=lambda: 0
        ),
    }
    for name, function in above.items():
        setattr(cuda, name, function)
    torch.Stream, torch.Event = _Stream, _Event
    torch.Tensor.record_stream = lambda *_: None
    # Not by the mode, which does not reach the thread in which DataLoader pins batches.
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def _without_nccl(distributed: Any) -> None:
    """Have *distributed* take gloo where nccl is asked for."""
    form = distributed.init_process_group

    def init_process_group(
        backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any
    ) -> None:
        form("gloo" if backend is not None and "nccl" in backend else backend, *args, **kwargs)

    distributed.init_process_group = init_process_group


def _without_triton(of_triton: Any) -> None:
    """Have the compiler ask no driver for the GPU's kind: it makes kernels for the CPU."""
    of_triton.has_triton = lambda: False
    of_triton.triton_hash_with_backend = lambda: "pretended"


_CHANGES = {"torch": _pretend, "torch.distributed": _without_nccl, "torch.utils._triton": _without_triton}
sys.meta_path.insert(0, _AfterImport(_CHANGES))
