"""What bits depend on besides the job: the kind of machine, the libraries, the threads."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from elasticflow import events
from elasticflow.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.process.context import Worker

_LIBRARIES = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}
_WITHOUT_EFFECT = {"python"}  # on sums
_REMEDIES = {"threads": "set train.threads, the same for every node"}
_REMEDY = 'run on machines of one kind with the same libraries, or use consistency = "batch"'


def of(device: torch.device) -> dict[str, str]:
    """Return the kind of this process: device, libraries, instruction set, threads; the device has been chosen."""
    configuration = torch.__config__.show()
    found = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    for name, pattern in _LIBRARIES.items():
        if match := re.search(pattern, configuration):
            found[name] = match[1]
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["cudnn_tf32"] = str(torch.backends.cudnn.allow_tf32)
    return found


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return what differs and may change bits, by name: "1, was 2". What either does not know is left out."""
    return {
        name: f"{now[name]}, was {was[name]}"
        for name in now
        if name in was and name not in _WITHOUT_EFFECT and str(was[name]) != now[name]
    }


def require_alike(me: Worker) -> None:
    """Return if all ranks are of one kind. Collective: every rank.

    Raises:
        StateError: they are not: a shard would have other bits on another rank. Names the first difference.
    """
    found = difference(me)
    if found is not None:
        name = found.partition(" ")[0]
        raise StateError(
            f'with train.consistency = "exact" all workers must be of one kind: {found}',
            _REMEDIES.get(name, _REMEDY),
        )


def difference(me: Worker) -> str | None:
    """Return the first difference between the ranks' kinds that may change bits; None: all are of one kind.

    Collective: every rank.
    """
    kinds = [json.loads(text) for text in me.gather_text(json.dumps(of(me.device)))]
    for rank, other in enumerate(kinds):
        for name in changes(kinds[0], other):
            return f"{name} is {other[name]} on rank {rank}, {kinds[0][name]} on rank 0"
    return None


def tell_changes(me: Worker, was: Mapping[str, str]) -> None:
    """Warn if bits may differ from what they would be on the kind of machine a snapshot was taken on; rank 0 tells.

    In batch mode nothing is said: bits are not promised there when a run goes on elsewhere.
    """
    if me.is_exact and me.rank == 0 and (changed := changes(was, of(me.device))):
        me.event(events.KIND_CHANGED, changed=changed)


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.machine()
