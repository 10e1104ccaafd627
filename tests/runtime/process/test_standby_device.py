"""The GPU of a standby: opened where memory is known to be free, and warmed up without a trace in the run."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from elasticflow.runtime.process import standby_device
from elasticflow.runtime.process.standby_device import library_variables, load_libraries, open_device

if TYPE_CHECKING:
    from pathlib import Path

WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Machine:
    """Two GPUs that are there by name only.

    Attributes:
        tool: Stand-in for nvidia-smi.
        opened: Devices that were opened, each with the workspace of cuBLAS at that moment.
        loaded: Devices whose libraries were loaded.
        error: What opening raises, if anything.
    """

    def __init__(self, tool: Path, patch: pytest.MonkeyPatch) -> None:
        self.tool = tool
        self.opened: list[tuple[str, str | None]] = []
        self.loaded: list[str] = []
        self.error: RuntimeError | None = None
        patch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is put back
        patch.delenv("CUBLAS_WORKSPACE_CONFIG")
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.accelerator, "device_count", lambda: 2)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid="ab"[n], total_memory=8 << 30)
        )
        patch.setattr(torch, "zeros", self._open)
        patch.setattr(standby_device, "load_libraries", lambda device: self.loaded.append(str(device)))

    def answers(self, line: str) -> None:
        """Have nvidia-smi answer in that way, about the second GPU."""
        self.tool.write_text(f'#!/bin/sh\ncase "$*" in *--id=GPU-b*) {line};; esac\n')
        self.tool.chmod(0o755)

    def _open(self, _: int, device: torch.device) -> None:
        if self.error is not None:
            raise self.error
        self.opened.append((str(device), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_processes: None) -> Machine:
    """Return the machine; its driver answers nothing yet."""
    return Machine(tmp_path / "nvidia-smi", monkeypatch)


def test_variables_that_libraries_read_are_told_from_others() -> None:
    """The others may be secrets: these are written to the run folder."""
    read = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "TORCH_BLAS_PREFER_CUBLASLT": "1"}
    assert library_variables({**read, "TOKEN": "secret"}) == read


@pytest.mark.parametrize(
    ("answer", "reason", "is_loaded"),
    [
        ("echo 79000, Default", "", True),
        ("echo 2000, Default", "", False),
        ("echo 900, Default", "900 MiB of its memory are free", False),
        ("echo 79000, Exclusive_Process", "its compute mode allows one process, which is the worker", False),
        ("echo [N/A], Default", "its driver does not report its free memory", False),
        ("exit 9", "its driver does not report its free memory", False),
    ],
)
def test_a_gpu_is_opened_where_memory_is_known_to_be_free(
    machine: Machine, answer: str, reason: str, *, is_loaded: bool
) -> None:
    """It takes of what the worker that trains may need; cuBLAS finds the workspace that it has in a worker."""
    machine.answers(answer)
    assert reason == open_device("cuda", 1, 2, WORKSPACE)
    assert ([] if reason else [("cuda:1", ":4096:8")]) == machine.opened
    assert (["cuda:1"] if is_loaded else []) == machine.loaded


def test_a_gpu_is_left_alone_where_the_worker_has_none(machine: Machine) -> None:
    """Three workers and two GPUs."""
    machine.answers("echo 79000, Default")
    assert "" == open_device("cuda", 1, 3, WORKSPACE)
    assert [] == machine.opened


def test_a_context_that_is_refused_leaves_a_standby_without_one(machine: Machine) -> None:
    """As another process may have taken the device, or its memory, since the driver was asked."""
    machine.answers("echo 79000, Default")
    machine.error = torch.AcceleratorError(
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore"
    )
    assert "CUDA error: CUDA-capable device(s) is/are busy or unavailable" == open_device(
        "cuda", 1, 2, WORKSPACE
    )
    assert [] == machine.loaded


@pytest.mark.parametrize(
    "variables", [None, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {**WORKSPACE, "NVIDIA_TF32_OVERRIDE": "0"}]
)
def test_libraries_are_left_to_the_worker_where_its_code_sets_their_variables(
    machine: Machine, variables: dict[str, str] | None
) -> None:
    """They read them when they begin, and bits depend on them."""
    machine.answers("echo 79000, Default")
    assert "" == open_device("cuda", 1, 2, variables)
    assert ([("cuda:1", ":4096:8")], []) == (machine.opened, machine.loaded)


def test_memory_of_amd_is_asked_without_a_context(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By amdsmi; where that is not installed, the GPU is left alone."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda _: 3 << 30)
    assert "" == open_device("cuda", 1, 2, WORKSPACE)
    assert (1, []) == (len(machine.opened), machine.loaded)

    monkeypatch.delattr(torch.cuda, "device_memory_used")
    assert "its driver does not report its free memory" == open_device("cuda", 1, 2, WORKSPACE)


def test_libraries_are_loaded_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each dtype, on the CPU here: no random number is drawn, no switch touched, no graph of autograd made."""
    asked: list[str] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: asked.append("synchronize"))
    monkeypatch.setattr(torch.accelerator.memory, "empty_cache", lambda: asked.append("empty_cache"))
    monkeypatch.setattr(torch.accelerator.memory, "reset_peak_memory_stats", lambda _: asked.append("reset"))
    backward = torch.ops.aten.convolution_backward
    gradients: list[torch.dtype] = []

    def seen(output: torch.Tensor, *rest: object) -> object:
        assert not torch.is_grad_enabled()
        gradients.append(output.dtype)
        return backward(output, *rest)

    monkeypatch.setattr(torch.ops.aten, "convolution_backward", seen)
    switches = (
        torch.__config__.show(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    drawn, threads = torch.get_rng_state(), threading.active_count()

    load_libraries(torch.device("cpu"))

    assert torch.equal(drawn, torch.get_rng_state())
    assert threads == threading.active_count()
    assert switches == (
        torch.__config__.show(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )
    assert torch.is_grad_enabled()
    assert [torch.float32] * 2 + [torch.bfloat16] * 2 + [torch.float16] * 2 == gradients
    assert ["synchronize", "empty_cache", "reset"] == asked


def test_an_operation_that_fails_is_passed_over_and_a_gpu_that_fails_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the second every call fails: the standby ends, and its worker is started anew."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(standby_device, "_compute", fails)
    for name in ("synchronize", "memory.empty_cache", "memory.reset_peak_memory_stats"):
        monkeypatch.setattr(f"torch.accelerator.{name}", lambda *_: None)
    load_libraries(torch.device("cpu"))

    monkeypatch.setattr(torch, "zeros", fails)
    with pytest.raises(RuntimeError, match="no kernel"):
        load_libraries(torch.device("cpu"))
