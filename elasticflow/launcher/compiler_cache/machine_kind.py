"""Kinds of machines: the same compiled kernels run on all machines of a kind."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

_CPU_INFO = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
# x86 and ARM call the instruction set differently.
_FACTS = {"cpu": r"^model name\s*:\s*(.+)$", "instructions": r"^(?:flags|Features)\s*:\s*(.+)$"}


class MachineKind(NamedTuple):
    """The machine as far as compiled kernels depend on it.

    Attributes:
        name: Short, and fit for a file's name; differs where one of the facts does.
    """

    name: str
    facts: dict[str, str]


def this_machine(cpu_info: Path = _CPU_INFO, gpus: Path = _GPUS) -> MachineKind:
    """Return the kind of this machine, with the torch that is installed; torch is not imported.

    Args:
        cpu_info: Where the kernel describes the processor.
        gpus: Where NVIDIA's driver describes the GPUs.
    """
    facts = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "libc": "-".join(platform.libc_ver()),
        **{name: _version(name) for name in ("torch", "triton")},
        **_of_processor(cpu_info),
        "gpus": ", ".join(_models_of_gpus(gpus)),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return MachineKind(digest[:12], facts)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _of_processor(cpu_info: Path) -> dict[str, str]:
    try:
        text = cpu_info.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return {"cpu": platform.processor(), "instructions": ""}
    matches = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in _FACTS.items()}
    facts = {name: match[1].strip() if match else "" for name, match in matches.items()}
    return {
        **facts,
        "instructions": hashlib.sha256(" ".join(sorted(facts["instructions"].split())).encode()).hexdigest(),
    }


def _models_of_gpus(gpus: Path) -> list[str]:
    """Return the models of the machine's GPUs, each once, without opening one of them."""
    models = set()
    for information in sorted(gpus.glob("*/information")):
        try:
            text = information.read_text(encoding="utf-8", errors="replace")
        except OSError:  # a container may hide it
            text = ""
        match = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        models.add(match[1].strip() if match else "")
    return sorted(models)
