"""Facts about this machine that a launch records, and its kind: compiled kernels run on all machines of a kind."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.system.kernel_files import text_in
from elasticflow.system.processes import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

_CPU_INFO = Path("/proc/cpuinfo")
# x86 and ARM call the instruction set differently.
_INSTRUCTIONS = re.compile(r"^(?:flags|Features)\s*:\s*(.+)$", re.MULTILINE)


def facts() -> Mapping[str, Any]:
    """Return host, system, kernel, libc, processor, GPUs and driver."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = platform.platform()
    driver = re.search(
        r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text_in(Path("/proc/driver/nvidia/version"))
    )
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    models = [re.search(r"Model:\s*(.+)", text_in(card)) for card in cards]
    return {
        "host": socket.gethostname(),
        "os": system,
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "gpus": [match[1].strip() for match in models if match],
        "driver": driver[1] if driver else None,
    }


def cpu_model() -> str:
    """Return the processor's name from the kernel."""
    match = re.search(r"model name\s*:\s*(.+)", text_in(_CPU_INFO))
    return match[1].strip() if match else platform.machine()


class MachineKind(NamedTuple):
    """The machine as far as compiled kernels depend on it.

    Attributes:
        name: Short, and fit for a file's name; differs where one of the facts does.
    """

    name: str
    facts: dict[str, str]


def this_machine() -> MachineKind:
    """Return the kind of this machine, with the installed torch, which is not imported."""
    here, instructions = facts(), _INSTRUCTIONS.search(text_in(_CPU_INFO))
    of_kind = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "libc": here["libc"] or "",
        **{name: _version(name) for name in ("torch", "triton")},
        "cpu": here["cpu"],
        "instructions": _digest(" ".join(sorted(instructions[1].split()))) if instructions else "",
        "gpus": ", ".join(sorted(set(here["gpus"]))),
    }
    return MachineKind(_digest(json.dumps(of_kind, sort_keys=True))[:12], of_kind)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
