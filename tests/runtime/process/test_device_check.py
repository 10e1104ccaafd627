"""The check of a node's devices. No driver is here: `nvidia-smi` and the kernel's lines are pretended, the sum is the processor's."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from elasticflow.protocol.child_processes import Finding
from elasticflow.runtime.process import device_check
from tests.command_line import forks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")

FAULTY = """#!/bin/sh
case "$1" in
--query-gpu=*)
    echo "GPU-aa, 00000000:3B:00.0, 0, No"
    echo "GPU-bb, 00000000:5E:00.0, 2, [N/A]" ;;
--query-remapped-rows=*)
    echo "GPU-aa, No, No"
    echo "GPU-bb, Yes, Yes" ;;
esac
"""
XID = b"4,812,5000000,-;NVRM: Xid (PCI:0000:5e:00): %d, pid='<unknown>', GPU has fallen off the bus.\n"


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, *lines: bytes) -> None:
    """Put *script* on PATH as `nvidia-smi`, and have the kernel's log hold *lines*."""
    tool = folder / "nvidia-smi"
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(device_check, "kernel_log", lambda _: iter(lines))


def found() -> list[tuple[str, str, bool]]:
    """Return the driver's errors: device, text, and whether the device is not to be used."""
    return [(each.device, each.text, each.is_fault) for _, each in device_check.ask_driver(0.0)]


def test_errors_of_the_driver_s_tool_are_told_by_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU outlives an ECC error and rows that wait for its reset; a row that could not be remapped it does not."""
    pretend(tmp_path, monkeypatch, FAULTY)
    assert found() == [
        ("GPU-bb", "2 uncorrected ECC errors since its last reset", False),
        ("GPU-bb", "rows of its memory are to be remapped at its next reset", False),
        ("GPU-bb", "a row of its memory could not be remapped: it has to be replaced", True),
    ]


def test_errors_in_the_kernel_s_log_are_told_by_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Xid 79 needs a reset; Xid 31 is a fault of a kernel; lines about other things are left out."""
    well = FAULTY.replace("2, [N/A]", "0, No").replace("Yes, Yes", "No, No")
    pretend(tmp_path, monkeypatch, well, XID % 79, b"6,1,1,-;usb 1-1: new device\n", XID % 31)
    words = "pid='<unknown>', GPU has fallen off the bus."
    assert found() == [
        ("GPU-bb", f"the driver reported Xid 79: {words}", True),
        ("GPU-bb", f"the driver reported Xid 31: {words}", False),
    ]


def test_gpus_of_other_jobs_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the job's devices are named; an error of no known GPU is no fault of those that computed right."""
    pretend(tmp_path, monkeypatch, FAULTY, XID.replace(b"5e", b"77") % 79)
    found = device_check.ask_driver(0.0)
    assert 4 == len(list(device_check.of_own(found, set())))
    assert ["GPU-bb", "GPU-bb", "GPU-bb", "PCI 77:00"] == [
        each.device for each in device_check.of_own(found, {"GPU-bb"})
    ]
    assert [("PCI 77:00", False)] == [
        (each.device, each.is_fault) for each in device_check.of_own(found, {"GPU-aa"})
    ]


@pytest.mark.parametrize(
    ("needed", "device", "driver", "faults"),
    [
        (8, "", False, []),  # the machine has no driver: the job trains on the CPU
        (8, "", True, ["cuda: torch sees 0 devices, and the node has 8 workers"]),
        (1, "cuda", False, ["cuda: torch sees 0 devices, and the node has 1 worker"]),
        (8, "cpu", False, []),
        (0, "cuda", True, []),  # a script
    ],
)
def test_lost_device_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: int, device: str, driver: bool, faults: list[str]
) -> None:
    """A GPU that fell off the bus is not among those that torch sees, and nothing else may tell of it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(device_check, "_DRIVER", str(tmp_path if driver else tmp_path / "none"))
    if device:
        monkeypatch.setenv("ELASTICFLOW_DEVICE", device)
    told = list(device_check.too_few([], needed))
    assert faults == [str(each) for each in told]
    assert all(each.is_fault for each in told)


@pytest.mark.parametrize(
    ("needed", "visible", "expected"),
    [
        (1, 2, ["cuda:0 begun", "cuda:0"]),
        (2, 2, ["GPU-bb", "GPU-bb", "GPU-bb", "cuda:0 begun", "cuda:0", "cuda:1 begun", "cuda:1"]),
        (2, 1, ["GPU-bb", "GPU-bb", "GPU-bb", "cuda fault", "cuda:0 begun", "cuda:0"]),
        (0, 2, ["GPU-bb", "GPU-bb", "GPU-bb", "cuda:0 begun", "cuda:0", "cuda:1 begun", "cuda:1"]),
    ],
)
def test_devices_that_no_worker_uses_are_not_judged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    needed: int,
    visible: int,
    expected: list[str],
) -> None:
    """One worker on a machine with two GPUs: the second, which is faulty, costs it no node. A script may use any."""
    pretend(tmp_path, monkeypatch, FAULTY)
    monkeypatch.setattr(sys, "argv", ["", str(os.getppid()), "0", str(needed)])
    monkeypatch.setattr(device_check, "die_with_parent", lambda _: None)
    monkeypatch.setattr(
        device_check, "visible_devices", lambda: [torch.device("cuda", number) for number in range(visible)]
    )
    monkeypatch.setattr(device_check, "uuid_of", lambda device: ("GPU-aa", "GPU-bb")[device.index])
    monkeypatch.setattr(device_check, "compute", lambda device: Finding(str(device)))
    device_check.main()
    findings = [Finding.of_line(line) for line in capsys.readouterr().out.splitlines()]
    assert expected == [
        f"{each.device}{' begun' * each.is_begun}{' fault' * (each.is_fault and each.device == 'cuda')}"
        for each in findings
        if each is not None
    ]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "#!/bin/sh\necho 'Unable to determine the device handle: GPU is lost.'\nexit 15\n",
            [("nvidia-smi", "Unable to determine the device handle: GPU is lost.", True)],
        ),
        ("#!/bin/sh\nsleep 60\n", [("nvidia-smi", "gives no answer within 0.2 s", True)]),
        ("#!/bin/sh\necho 'Field \"remapped_rows.pending\" is not a valid field to query.'\nexit 2\n", []),
        ("#!/bin/sh\necho 'No devices were found'\nexit 6\n", []),
        (
            "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n",
            [("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch", False)],
        ),
    ],
)
def test_tool_that_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: list[tuple[str, str, bool]]
) -> None:
    """A lost GPU and a tool that hangs are faults; a tool that is older, or finds no GPU, is none."""
    monkeypatch.setattr(device_check, "_TOOL_S", 0.2)
    pretend(tmp_path, monkeypatch, script)
    assert expected == found()


def test_sum_that_is_right_and_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that flips one bit of one product is told with the number of wrong results."""
    device = torch.device("cpu")
    assert Finding("cpu") == device_check.compute(device)
    multiply = torch.matmul

    def flawed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = multiply(left, right)
        result[3, 5] += 1.0
        return result

    monkeypatch.setattr(torch, "matmul", flawed)
    wrong = device_check.compute(device)
    assert ("computes a known sum wrong: 1 of 1048576 numbers", True) == (wrong.text, wrong.is_fault)


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        ("CUDA error: uncorrectable ECC error encountered\nmore", True),
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", False),
        ("CUDA error: system not yet initialized", False),
        ("CUDA error: out of memory", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
    ],
)
def test_device_that_cannot_be_asked_is_no_faulty_one(
    monkeypatch: pytest.MonkeyPatch, error: str, is_fault: bool
) -> None:
    """Another process may have the device, or its memory; an error of the device itself is a fault."""

    def fail(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError(error)

    monkeypatch.setattr(torch, "matmul", fail)
    finding = device_check.compute(torch.device("cpu"))
    assert (error.splitlines()[0], is_fault) == (finding.text, finding.is_fault)


def test_program_tells_the_driver_s_errors_where_torch_sees_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole program, on this machine: one line for each error, and no sum."""
    pretend(tmp_path, monkeypatch, FAULTY)
    command = [sys.executable, "-m", "elasticflow.runtime.process.device_check", str(os.getpid()), "1e9"]
    with forks():  # a fresh interpreter would import torch
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    lines = done.stdout.splitlines()
    findings = [Finding.of_line(line) for line in lines]
    assert ["GPU-bb", "GPU-bb", "GPU-bb"] == [each.device for each in findings if each is not None]


@pytest.mark.parametrize(
    "variable", [("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1"), ("ELASTICFLOW_DEVICE", "cpu")]
)
def test_job_on_the_cpu_has_no_faulty_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: tuple[str, str],
) -> None:
    """The GPUs of the machine are others', and their errors cost the job no node."""
    pretend(tmp_path, monkeypatch, FAULTY)
    monkeypatch.setattr(sys, "argv", ["", str(os.getppid()), "1e9"])
    monkeypatch.setattr(device_check, "die_with_parent", lambda _: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device_check, "visible_devices", list)  # what torch sees under such a variable
    device_check.main()
    assert 3 == len(capsys.readouterr().out.splitlines())
    monkeypatch.setenv(*variable)
    device_check.main()
    assert "" == capsys.readouterr().out
