"""Kinds of machines: the same compiled kernels run on all machines of a kind."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from elasticflow.system import machine
from elasticflow.system.kernel_files import text_in

_CPU_INFO = Path("/proc/cpuinfo")
# x86 and ARM call the instruction set differently.
_INSTRUCTIONS = re.compile(r"^(?:flags|Features)\s*:\s*(.+)$", re.MULTILINE)


class MachineKind(NamedTuple):
    """The machine as far as compiled kernels depend on it.

    Attributes:
        name: Short, and fit for a file's name; differs where one of the facts does.
    """

    name: str
    facts: dict[str, str]


def this_machine() -> MachineKind:
    """Return the kind of this machine, with the torch that is installed; torch is not imported."""
    here, instructions = machine.facts(), _INSTRUCTIONS.search(text_in(_CPU_INFO))
    facts = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "libc": here["libc"] or "",
        **{name: _version(name) for name in ("torch", "triton")},
        "cpu": here["cpu"],
        "instructions": _digest(" ".join(sorted(instructions[1].split()))) if instructions else "",
        "gpus": ", ".join(sorted(set(here["gpus"]))),
    }
    return MachineKind(_digest(json.dumps(facts, sort_keys=True))[:12], facts)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
