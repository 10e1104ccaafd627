"""Imports torch in a separate process: a broken torch, or a hang, gives a result instead of a traceback."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.doctor.check import CheckResult, Needs, Verdict, ok
from elasticflow.observe.terminal.formats import plural, span
from elasticflow.system import torch_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT_S = 60.0
_TOPIC = "torch"
_INSTALL = "pip install 'elasticflow[torch]'"
# This runs as `python -c`, without imports of elasticflow. A device counts once it has computed something.
_PROGRAM = """
import json, time
began = time.perf_counter()
import torch, torch.distributed as dist
facts = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
         "seconds": time.perf_counter() - began, "distributed": dist.is_available(), "error": None, "devices": []}
for name in ("gloo", "nccl"):
    facts[name] = dist.is_available() and getattr(dist, f"is_{name}_available")()
try:
    for number in range(torch.cuda.device_count() if torch.version.cuda or torch.version.hip else 0):
        torch.ones(1, device=f"cuda:{number}").add_(1).item()
        free, total = torch.cuda.mem_get_info(number)
        facts["devices"].append({"name": torch.cuda.get_device_name(number), "free": free, "total": total})
except Exception as error:
    facts["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
print("\\n" + json.dumps(facts))
"""


@dataclass(frozen=True)
class _TorchFacts:
    """Findings of the child process.

    Attributes:
        version: Version of torch.
        build: Kind of the build, in words.
        seconds: Duration of its import.
        error: Error of a device; None if all devices work.
        devices: Name of each device that works.
        backends: Names of the backends among gloo and nccl that this build has.
    """

    version: str
    build: str
    seconds: float
    error: str | None
    devices: tuple[str, ...]
    backends: tuple[str, ...]

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> _TorchFacts:
        """Return the findings in the child's output."""
        cuda = f"for CUDA {facts['cuda']}" if facts["cuda"] else None
        return cls(
            version=facts["version"],
            build=cuda or ("for ROCm" if facts["hip"] else "for CPU"),
            seconds=facts["seconds"],
            error=facts["error"],
            devices=tuple(device["name"] for device in facts["devices"]),
            backends=tuple(name for name in ("gloo", "nccl") if facts[name]),
        )


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
                command or [sys.executable, "-c", _PROGRAM],
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
            meaning = "nothing can be trained here; validate, plan, compile and snapshots work"
            yield CheckResult(_TOPIC, "torch", "problem", "not installed", meaning, _INSTALL)
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
            yield CheckResult(
                _TOPIC,
                "torch",
                "problem",
                fact,
                meaning,
                'see where: python -X faulthandler -c "import torch"',
            )
            return
        if self._process.returncode != 0:
            last = (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
            yield CheckResult(
                _TOPIC,
                "torch",
                "problem",
                last,
                "torch is installed and cannot be imported",
                f"install it anew: {_INSTALL}",
            )
            return
        facts = _TorchFacts.from_json(json.loads(out.strip().splitlines()[-1]))
        yield _version(facts)
        yield _devices(facts, needs)
        yield _backend(facts)

    def close(self) -> None:
        """End the child if it is still running."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _version(facts: _TorchFacts) -> CheckResult:
    fact = f"{facts.version} {facts.build}, imported in {span(facts.seconds)}"
    if torch_versions.untried(facts.version) is None:
        return ok(_TOPIC, "torch", fact)
    meaning = f"this version of elasticflow was tried with torch {torch_versions.tried()} only"
    return CheckResult(_TOPIC, "torch", "warning", fact, meaning, _INSTALL)


def _devices(facts: _TorchFacts, needs: Needs) -> CheckResult:
    wants_gpu = needs.job is not None and needs.job.nodes.nproc_per_node == "gpu"
    verdict: Verdict = "problem" if wants_gpu else "warning"
    if facts.error is not None:
        meaning = "workers on that device would fail in the same way"
        remedy = "check the driver with nvidia-smi, and that it is new enough for torch's CUDA"
        return CheckResult(_TOPIC, "devices", verdict, facts.error, meaning, remedy)
    if facts.devices:
        names = ", ".join(sorted(set(facts.devices)))
        return ok(_TOPIC, "devices", f"{plural(len(facts.devices), 'GPU')}: {names}")
    if wants_gpu:
        meaning = 'nodes.nproc_per_node = "gpu" starts no worker here'
        return CheckResult(
            _TOPIC, "devices", "problem", "no GPU", meaning, 'use a machine with GPUs, or "auto"'
        )
    if Path("/proc/driver/nvidia/version").exists():
        meaning = "there is an NVIDIA driver, and torch sees no device: workers run on the CPU"
        return CheckResult(
            _TOPIC, "devices", "warning", "no GPU", meaning, "install a build of torch for this driver"
        )
    return ok(_TOPIC, "devices", "no GPU: workers run on the CPU")


def _backend(facts: _TorchFacts) -> CheckResult:
    needed = {"gloo", "nccl"} if facts.devices else {"gloo"}
    if missing := needed - set(facts.backends):
        meaning = "workers cannot exchange gradients"
        fact = f"{', '.join(sorted(missing))} is missing in this build"
        return CheckResult(_TOPIC, "backends", "problem", fact, meaning, "install another build of torch")
    return ok(_TOPIC, "backends", ", ".join(facts.backends))
