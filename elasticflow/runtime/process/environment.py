"""A worker's environment: its machine, and the modules it has imported.

The bits of a run depend on the machine, the libraries and the threads, so snapshots record them; which modules are
loaded, and the digests of the project's own, is recorded with the launch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from elasticflow import events
from elasticflow.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.process.context import Worker

INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the path of whatever is installed."""

_MOST_FILES = 2000
_LIBRARIES = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}
# On sums.
_WITHOUT_EFFECT = {"python"}
_REMEDIES = {"threads": "set train.threads, the same for every node"}
_REMEDY = 'run on machines of one kind with the same libraries, or use consistency = "batch"'


def describe(device: torch.device) -> dict[str, str]:
    """Return what bits depend on in this process, by name: libraries, instruction set, threads and *device*.

    Args:
        device: Where the model lives; it has been chosen before.
    """
    configuration = torch.__config__.show()
    facts = {
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
            facts[name] = match[1]
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        facts["cudnn_tf32"] = str(torch.backends.cudnn.allow_tf32)
    return facts


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return what differs and may change bits, by name: "1, was 2". What either does not know is left out."""
    return {
        name: f"{now[name]}, was {was[name]}"
        for name in now
        if name in was and name not in _WITHOUT_EFFECT and str(was[name]) != now[name]
    }


def require_same(worker: Worker) -> None:
    """Make sure that all ranks' environments give the same bits. Collective: every rank.

    Raises:
        StateError: a virtual shard would have other bits on another rank; names the first difference.
    """
    different = first_difference(worker)
    if different is not None:
        name = different.partition(" ")[0]
        raise StateError(
            f'with train.consistency = "exact" all workers must be of one kind: {different}',
            _REMEDIES.get(name, _REMEDY),
        )


def first_difference(worker: Worker) -> str | None:
    """Return the first difference between the ranks' environments that may change bits; None if there is none.

    Collective: every rank.
    """
    environments = [json.loads(text) for text in worker.gather_text(json.dumps(describe(worker.device)))]
    for rank, other in enumerate(environments):
        for name in changes(environments[0], other):
            return f"{name} is {other[name]} on rank {rank}, {environments[0][name]} on rank 0"
    return None


def log_changes(worker: Worker, was: Mapping[str, str], *, is_exact: bool) -> None:
    """Log a warning on rank 0 if a run that continues here may have other bits than where its snapshot was taken.

    Args:
        worker: This worker.
        was: The environment in which the snapshot was taken, as `describe` gave it.
        is_exact: Bits are promised; else nothing is logged.
    """
    if is_exact and worker.rank == 0 and (changed := changes(was, describe(worker.device))):
        worker.event(events.KIND_CHANGED, changed=changed)


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    match = re.search(r"model name\s*:\s*(.+)", text)
    return match[1].strip() if match else platform.machine()


def log_loaded_modules(worker: Worker) -> None:
    """Log the top-level modules that are loaded, and the digests of those that lie in the project; takes milliseconds.

    Rank 0 under our agent does, after its first step: what is imported late is there then.
    """
    root = worker.run_folder.path.parents[2]  # runs/<job>/<run id>
    names = {name.partition(".")[0] for name in tuple(sys.modules)}
    worker.event(
        events.ENVIRONMENT_FOUND,
        modules=sorted(names - set(sys.stdlib_module_names)),
        files=_digests_of_sources(root),
        device=describe(worker.device),
    )


def digests_of_script() -> dict[str, str]:
    """Return SHA-256 of the script that this process runs, and of every loaded module's source in its folder, by path from there."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not Path(script).is_file():
        return {}
    path = Path(script).resolve()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest(), **_digests_of_sources(path.parent)}


def _digests_of_sources(root: Path) -> dict[str, str]:
    """Return SHA-256 of every loaded module's source under *root*, by its path from there."""
    start = f"{root}{os.sep}"
    digests: dict[str, str] = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.startswith(start) or not file.endswith(".py"):
            continue
        # Packages installed inside the project have versions; so has elasticflow, wherever it lies. train.py is the
        # launch folder's own; what torch's compiler has written in the run folder is loaded as a part of torch.
        if name.partition(".")[0] in {"elasticflow", "__main__", "torch"} or any(
            part in file for part in INSTALLED
        ):
            continue
        source = Path(file)
        try:
            digests[source.relative_to(root).as_posix()] = hashlib.sha256(source.read_bytes()).hexdigest()
        except OSError:  # removed since
            continue
        if len(digests) == _MOST_FILES:
            break
    return digests
