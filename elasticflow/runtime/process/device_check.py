"""The check of this node's accelerators, a program: `python -m elasticflow.runtime.process.device_check PARENT SINCE [WORKERS]`.

It asks the driver's tool and the kernel's log for errors since SINCE, in seconds after the machine's start, then has each device
that the job uses compute a sum whose right result is known: with WORKERS on this node, which take devices 0 to WORKERS - 1, these;
else all that torch sees, as a script may use any. Each line on standard output is a `Finding`; the agent, PARENT, bounds
the time (`launcher/agent/device_health.py`), as a call of a driver may never return.

The driver's tool is `nvidia-smi`, whose fields are those of its `--help-query-gpu` and `--help-query-remapped-rows`. Where it is
absent, as with ROCm and XPU, the sum is all there is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.protocol import worker_environment
from elasticflow.protocol.child_processes import Finding
from elasticflow.system import nvidia_smi
from elasticflow.system.device_errors import class_of_device_error
from elasticflow.system.kernel_files import kernel_log
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import torch

_TOOL_S = 30.0
_DRIVER = "/dev/nvidiactl"  # there once NVIDIA's driver is loaded
# Exit codes of nvidia-smi: it does not know a field, it finds no GPU; a GPU has fallen off the bus or is otherwise inaccessible.
_TELLS_NOTHING, _LOST_DEVICE = {2, 6}, 15
_GPU_FIELDS = ("uuid", "pci.bus_id", "ecc.errors.uncorrected.volatile.total", "retired_pages.pending")
_ROW_FIELDS = ("gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
_XID = re.compile(rb"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+), ?(.*)")
# Errors after which the device computes nothing before it is reset: a row that could not be remapped, a device that fell off the
# bus, memory errors that were not contained, a GPU System Processor that does not answer.
# Source: https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
_FATAL_XIDS = {64, 79, 95, 119, 120, 140}
_MAY_PASS = re.compile(r"busy|not yet initialized|not ready|\bMPS\b")
# Numbers of the sum: products of small whole numbers, whose sums are exact in float32, TF32 included, in any order.
_SIZE, _TIMES = 1024, 10


@dataclass(frozen=True)
class _Gpu:
    """A GPU as the driver's tool lists it: its uuid, and its place on the bus, as `3b:00`."""

    uuid: str
    bus: str


def main() -> None:
    """Write each finding as soon as it is known; none where the job trains on the CPU."""
    die_with_parent(int(sys.argv[1]))
    if os.environ.get(worker_environment.DEVICE) == "cpu":
        return
    needed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    if needed and os.environ.get(worker_environment.SHARE_DEVICE) == "1":
        needed = 1
    # GPUs that are hidden are none of the job's.
    found = [] if worker_environment.hides_gpus(os.environ) else ask_driver(float(sys.argv[2]))
    devices = visible_devices()
    # Without a limit all devices of the machine are the job's.
    is_limited = "CUDA_VISIBLE_DEVICES" in os.environ or 0 < needed < len(devices)
    if not is_limited:
        _tell(finding for _, finding in found)
    _tell(too_few(devices, needed))
    devices = devices[: needed or None]
    for device in devices:
        _tell([Finding(str(device), is_begun=True)])
        _tell([compute(device)])
    if is_limited:
        _tell(of_own(found, {uuid for device in devices if (uuid := uuid_of(device))}))


def visible_devices() -> list[torch.device]:
    """Return the accelerators that torch sees and a job may train on."""
    import torch

    from elasticflow.runtime.process.devices import accelerators

    kind, count = accelerators()
    return [torch.device(f"{kind}:{number}") for number in range(count)]


def too_few(devices: Sequence[torch.device], needed: int) -> Iterator[Finding]:
    """Yield a fault if torch sees fewer *devices* than *needed*, and the job's workers trained on devices: one is lost.

    They may have trained on the CPU where the machine has no driver, or devices that no job trains on, as Apple's GPU.
    """
    import torch

    wanted = os.environ.get(worker_environment.DEVICE, "auto")
    is_built = torch.accelerator.current_accelerator() is not None
    is_on_devices = bool(devices) or wanted != "auto" or (is_built and Path(_DRIVER).exists())
    if wanted != "cpu" and is_on_devices and len(devices) < needed:
        seen, workers = (
            f"{n} {word}" + "s" * (n != 1) for n, word in ((len(devices), "device"), (needed, "worker"))
        )
        kind = devices[0].type if devices else wanted if wanted != "auto" else "cuda"
        yield Finding(kind, f"torch sees {seen}, and the node has {workers}", is_fault=True)


def of_own(found: Iterable[tuple[_Gpu | None, Finding]], own: Collection[str]) -> Iterator[Finding]:
    """Yield the findings of *found* that may be about GPUs with the uuids *own*, which have computed a sum; all if there are none.

    An error that nothing tells the GPU of may be another job's: the sum has judged the own GPUs.
    """
    for gpu, finding in found:
        if not own or (gpu is not None and gpu.uuid in own):
            yield finding
        elif gpu is None:
            yield replace(finding, is_fault=False)


def _tell(findings: Iterable[Finding]) -> None:
    for finding in findings:
        sys.stdout.write(f"{finding.to_json()}\n")
        sys.stdout.flush()


def ask_driver(since_s: float) -> list[tuple[_Gpu | None, Finding]]:
    """Return the errors that the driver's tool and the kernel's log know of, each with its GPU.

    None stands in place of the GPU where nothing tells which one it is.
    """
    found: list[tuple[_Gpu | None, Finding]] = []
    gpus = []
    try:
        rows = _query("--query-gpu", _GPU_FIELDS)
        remapped = {row[0]: row[1:] for row in _query("--query-remapped-rows", _ROW_FIELDS)}
    except _ToolError as error:
        found.append((None, Finding(nvidia_smi.TOOL, str(error), is_fault=error.is_fault)))
        rows, remapped = [], {}
    for uuid, bus, errors, retired in rows:
        gpus.append(gpu := _Gpu(uuid, _bus(bus)))
        pending, failure = remapped.get(uuid, ("", ""))
        has_errors, has_failed = errors.isdecimal() and int(errors) > 0, failure in {"Yes", "1"}
        for is_so, text, is_fault in (
            (has_errors, f"{errors} uncorrected ECC errors since its last reset", False),
            (retired == "Yes", "pages of its memory are to be retired at its next reset", False),
            (pending in {"Yes", "1"}, "rows of its memory are to be remapped at its next reset", False),
            (has_failed, "a row of its memory could not be remapped: it has to be replaced", True),
        ):
            if is_so:
                found.append((gpu, Finding(uuid, text, is_fault=is_fault)))
    for bus, number, words in xids(since_s):
        gpu_of_bus = next((gpu for gpu in gpus if gpu.bus == bus), None)
        name = f"PCI {bus}" if gpu_of_bus is None else gpu_of_bus.uuid
        text = f"the driver reported Xid {number}: {words}"
        found.append((gpu_of_bus, Finding(name, text, is_fault=number in _FATAL_XIDS)))
    return found


class _ToolError(Exception):
    """The driver's tool tells nothing, which is a fault of a device or not."""

    def __init__(self, text: str, *, is_fault: bool) -> None:
        super().__init__(text)
        self.is_fault = is_fault


def _query(what: str, fields: Sequence[str]) -> list[list[str]]:
    """Return the tool's answer, a row for each GPU; none if there is no tool, or a tool that does not know the fields."""
    if shutil.which(nvidia_smi.TOOL) is None:
        return []
    try:
        return nvidia_smi.query(fields, _TOOL_S, what=what)
    except subprocess.TimeoutExpired:
        raise _ToolError(f"gives no answer within {_TOOL_S:g} s", is_fault=True) from None
    except subprocess.CalledProcessError as error:
        if error.returncode in _TELLS_NOTHING:
            return []
        text = error.stdout.strip()
        is_lost = error.returncode == _LOST_DEVICE or "GPU is lost" in text + error.stderr
        raise _ToolError(" ".join((text or error.stderr).split())[:300], is_fault=is_lost) from None
    except OSError as error:
        raise _ToolError(str(error), is_fault=False) from None


def xids(since_s: float) -> Iterator[tuple[str, int, str]]:
    """Yield the errors that the driver has written to the kernel's log: place on the bus, number, words."""
    for line in kernel_log(since_s):
        if found := _XID.search(line):
            bus, number, words = found.groups()
            yield _bus(bus.decode()), int(number), words.decode("utf-8", "replace").strip()[:200]


def _bus(place: str) -> str:
    """Return bus and device of `00000000:3B:00.0` or `0000:3b:00`, as `3b:00`."""
    return ":".join(place.partition(".")[0].split(":")[-2:]).lower()


def uuid_of(device: torch.device) -> str:
    """Return the device's uuid as the driver's tool writes it; empty if torch does not know it."""
    import torch

    try:
        properties = torch.get_device_module(device).get_device_properties(device)
    except (RuntimeError, AssertionError):  # the driver does not work
        return ""
    return nvidia_smi.uuid_of(properties)


def compute(device: torch.device) -> Finding:
    """Return the finding about a sum on *device*: right, wrong, or an error."""
    import torch

    rows = torch.arange(_SIZE)
    left = ((rows[:, None] + rows[None, :]) % 7 - 3).float()
    right = ((rows[:, None] * rows[None, :]) % 5 - 2).float()
    expected = left @ right
    name = f"{device} {uuid_of(device)}".rstrip() if device.type != "cpu" else str(device)
    try:
        there = left.to(device), right.to(device)
        wrong = max(int((torch.matmul(*there).cpu() != expected).sum()) for _ in range(_TIMES))
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        # Another process, a standby for example, may have the device, or its memory; a driver may be starting.
        is_fault = class_of_device_error(str(error)) in {"device", "crash"} and not _MAY_PASS.search(text)
        return Finding(name, text, is_fault=is_fault)
    text = f"computes a known sum wrong: {wrong} of {expected.numel()} numbers" if wrong else ""
    return Finding(name, text, is_fault=wrong > 0)


if __name__ == "__main__":
    main()
