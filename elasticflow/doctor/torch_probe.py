"""Imports torch in a separate process: a broken torch, or a hang, gives a result instead of a traceback."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.doctor.check import Topic
from elasticflow.observe.terminal.formats import plural, span
from elasticflow.system.installation import torch_tried, untried_torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.doctor.check import CheckResult, Needs

LIMIT_S = 60.0
_GONE_S = 2.0
_TOPIC = Topic("torch")
_INSTALL = "pip install 'elasticflow[torch]'"
# This runs as `python -c`. A device counts once it has computed something. That makes a context: half a gigabyte of a GPU
# that someone else may be using. So only devices that are idle by their driver are tried.
_PROGRAM = """
import json, time
began = time.perf_counter()
import torch, torch.distributed as dist
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
         "seconds": time.perf_counter() - began, "error": None, "kind": None,
         "devices": [], "untried": []}
for name in ("gloo", "nccl", "xccl"):
    facts[name] = dist.is_available() and getattr(dist, f"is_{name}_available", bool)()

def idle_by_nvidia_smi():
    rows = nvidia_smi.query(("uuid", "memory.used", "utilization.gpu"), 10)
    return {uuid for uuid, used, busy in rows
            if used.isdigit() and busy.isdigit() and int(used) < 1024 and int(busy) == 0}

def is_idle(module, number, idle):
    if facts["cuda"]:
        return nvidia_smi.uuid_of(module.get_device_properties(number)) in idle
    return facts["hip"] and module.device_memory_used(number) < 2**30 and module.utilization(number) == 0

try:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    module = None if accelerator is None else torch.get_device_module(accelerator)
    if hasattr(module, "default_generators"):  # as in runtime/process/devices.py
        from elasticflow.system import nvidia_smi

        facts["kind"] = accelerator.type
        try:
            idle = idle_by_nvidia_smi() if facts["cuda"] else set()
        except Exception:  # no nvidia-smi here, or a driver that does not answer it
            idle = set()
        for number in range(torch.accelerator.device_count()):
            try:
                is_tried = is_idle(module, number, idle)
            except Exception:  # AMD's library is not installed
                is_tried = False
            if is_tried:
                torch.ones(1, device=f"{accelerator.type}:{number}").add_(1).item()
            facts["devices" if is_tried else "untried"].append(module.get_device_name(number))
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(facts))
"""
_AUTO, _CPU = "auto", "cpu"  # nodes.device
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True)
class _TorchFacts:
    """Findings of the child process, as it prints them.

    Attributes:
        cuda: Version of CUDA that the build is for; None: it is for another kind of devices.
        hip: The same of HIP.
        error: Error of a device; None if all devices work.
        kind: Type of the devices; None if there are none.
        untried: Names of the devices that were left alone, since they are or may be in use.
        gloo: True if this build has that backend of torch.distributed; the next fields likewise.
    """

    version: str
    cuda: str | None
    hip: str | None
    seconds: float
    error: str | None
    kind: str | None
    devices: list[str]
    untried: list[str]
    gloo: bool
    nccl: bool
    xccl: bool


class TorchProbe:
    """The child that imports torch; it starts at once, so that other checks run meanwhile.

    Args:
        command: Command to run instead, for tests.
    """

    def __init__(self, command: list[str] | None = None) -> None:
        self._began = time.monotonic()
        self._process: subprocess.Popen[str] | None = None
        if command is not None or importlib.util.find_spec("torch") is not None:
            self._process = subprocess.Popen(
                command or [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def results(
        self, needs: Needs, wait: Callable[[str], None], limit_s: float = LIMIT_S
    ) -> Iterator[CheckResult]:
        """Yield the child's findings; *wait* is called with words if the child is still busy."""
        if self._process is None:
            meaning = "nothing can be trained here; validate, plan and snapshots work"
            yield _TOPIC.problem("torch", "not installed", meaning, _INSTALL)
            return
        if self._process.poll() is None:
            wait(f"waiting for torch to be imported, {limit_s:g} s at most")
        try:
            out, errors = self._process.communicate(
                timeout=max(0.1, limit_s - (time.monotonic() - self._began))
            )
        except subprocess.TimeoutExpired:
            self.close()
            meaning = "its import hangs, and so would every run"
            fact = f"not imported within {limit_s:g} s"
            yield _TOPIC.problem(
                "torch", fact, meaning, 'see where: python -X faulthandler -c "import torch"'
            )
            return
        if self._process.returncode != 0:
            last = (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
            yield _TOPIC.problem(
                "torch", last, "torch is installed and cannot be imported", f"install it anew: {_INSTALL}"
            )
            return
        facts = _TorchFacts(**json.loads(out.strip().splitlines()[-1]))
        yield _version(facts)
        yield _devices(facts, needs)
        yield _backend(facts, needs)

    def close(self) -> None:
        """End the child if it is still running; one in a call of a driver may not end, and is not waited for."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_GONE_S)


def _version(facts: _TorchFacts) -> CheckResult:
    build = f"for CUDA {facts.cuda}" if facts.cuda else "for ROCm" if facts.hip else "for CPU"
    fact = f"{facts.version} {build}, imported in {span(facts.seconds)}"
    if untried_torch(facts.version) is None:
        return _TOPIC.ok("torch", fact)
    meaning = f"this version of elasticflow was tried with torch {torch_tried()} only"
    return _TOPIC.warning("torch", fact, meaning, _INSTALL)


def _wanted(needs: Needs) -> str:
    return _AUTO if needs.job is None else needs.job.nodes.device


def _devices(facts: _TorchFacts, needs: Needs) -> CheckResult:
    wanted = _wanted(needs)
    seen = _counted([*facts.devices, *facts.untried])
    if wanted == _CPU:
        hidden = f"{seen}, hidden: " if facts.kind is not None else ""
        return _TOPIC.ok("devices", f'{hidden}workers run on the CPU, as nodes.device = "cpu" says')
    wants_gpu = needs.job is not None and needs.job.nodes.nproc_per_node == "gpu"
    found = _TOPIC.problem if wants_gpu or wanted != _AUTO else _TOPIC.warning
    if facts.error is not None:
        meaning = "workers on that device would fail in the same way"
        remedy = "check the driver with nvidia-smi, and that it is new enough for torch's CUDA"
        return found("devices", facts.error, meaning, remedy)
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if wanted not in {_AUTO, facts.kind}:
        fact = f'no "{wanted}" device'
        if facts.kind is not None:
            fact += f', but {seen} ("{facts.kind}")'
        elif has_driver:
            fact += ", and there is an NVIDIA driver"
        meaning = f'nodes.device = "{wanted}" starts no worker here'
        remedy = "use a machine with such a device, and a build of torch for its driver"
        return _TOPIC.problem("devices", fact, meaning, remedy)
    untried = f"{_counted(facts.untried)} not tried: in use, or not known to be idle" if facts.untried else ""
    if facts.devices:
        return _TOPIC.ok("devices", "; ".join(filter(None, (_counted(facts.devices), untried))))
    if facts.untried:
        meaning = "torch finds them, and whether it can compute there is not known: a try takes memory there"
        return _TOPIC.warning("devices", untried, meaning, "run it again when nvidia-smi shows them idle")
    if wants_gpu:
        meaning = 'nodes.nproc_per_node = "gpu" starts no worker here'
        return _TOPIC.problem("devices", "no GPU", meaning, 'use a machine with GPUs, or "auto"')
    if has_driver:
        meaning = "there is an NVIDIA driver, and torch sees no device: workers run on the CPU"
        return _TOPIC.warning("devices", "no GPU", meaning, "install a build of torch for this driver")
    return _TOPIC.ok("devices", "no GPU: workers run on the CPU")


def _counted(names: list[str]) -> str:
    return f"{plural(len(names), 'GPU')}: {', '.join(sorted(set(names)))}"


def _backend(facts: _TorchFacts, needs: Needs) -> CheckResult:
    of_devices = _BACKENDS.get(facts.kind or "")
    needed = ["gloo"] if _wanted(needs) == _CPU or of_devices is None else ["gloo", of_devices]
    if missing := [name for name in needed if not getattr(facts, name)]:
        meaning = "workers cannot exchange gradients"
        fact = f"{', '.join(missing)} is missing in this build"
        return _TOPIC.problem("backends", fact, meaning, "install another build of torch")
    return _TOPIC.ok("backends", ", ".join(needed))
