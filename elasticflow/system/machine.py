"""Facts about this machine that a launch records and compiled kernels depend on; loads no library."""

from __future__ import annotations

import platform
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.system.kernel_files import text_in
from elasticflow.system.processes import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    match = re.search(r"model name\s*:\s*(.+)", text_in(Path("/proc/cpuinfo")))
    return match[1].strip() if match else platform.machine()
