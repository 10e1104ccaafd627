"""A worker's environment: its machine, and the modules it has imported.

The bits of a run depend on the machine, the libraries and the threads, so snapshots record all three. The launch records
the loaded modules and the digests of the project's own modules.
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
from elasticflow.runtime.measuring.speed import device_name
from elasticflow.runtime.process import float32
from elasticflow.system.installation import is_of_installed_package
from elasticflow.system.machine import cpu_model

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.process.context import Worker

_MOST_FILES = 2000
_LIBRARIES = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}
# Facts that change no bits.
_WITHOUT_EFFECT = {"python"}
_REMEDIES = {"threads": "set train.threads, the same for every node"}
_REMEDY = 'run on machines of one kind with the same libraries, or use consistency = "batch"'


def describe(device: torch.device) -> dict[str, str]:
    """Return the facts that a run's bits depend on, by name: libraries, instruction set, threads and *device*.

    Args:
        device: Device that the model is on; torch has selected it already.
    """
    configuration = torch.__config__.show()
    facts = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **float32.precision_facts(device),
    }
    for name, pattern in _LIBRARIES.items():
        if match := re.search(pattern, configuration):
            facts[name] = match[1]
    if device.type != "cpu":
        facts["device"] = device.type
        facts["gpu"] = device_name(device)
    if device.type == "cuda":
        # A fact that a snapshot lacks, or that is no longer recorded, is no difference: old snapshots on ROCm have "cuda": "None".
        facts |= (
            {"cuda": str(torch.version.cuda)} if torch.version.hip is None else {"hip": torch.version.hip}
        )
        facts["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return facts


def changes(was: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the differences that may change bits, by name: "1, was 2". Facts that either side lacks are left out."""
    return {
        name: f"{now[name]}, was {was[name]}"
        for name in now
        if name in was and name not in _WITHOUT_EFFECT and str(was[name]) != now[name]
    }


def require_same(worker: Worker) -> None:
    """Make sure that all ranks' environments give the same bits. Collective: every rank.

    Raises:
        StateError: a virtual shard would have other bits on another rank; the message names the first difference.
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
    """Log a warning on rank 0 if this environment may give other bits than the environment of the snapshot.

    Args:
        was: The environment in which the snapshot was taken, as `describe` gave it.
    """
    if is_exact and worker.rank == 0 and (changed := changes(was, describe(worker.device))):
        worker.event(events.KIND_CHANGED, changed=changed)


def log_loaded_modules(worker: Worker) -> None:
    """Log the loaded top-level modules and the digests of the project's own modules; takes milliseconds.

    Our agent's workers call it after their first step, when late imports are done.
    """
    root = worker.run_folder.project_root
    names = {name.partition(".")[0] for name in tuple(sys.modules)}
    worker.event(
        events.ENVIRONMENT_FOUND,
        modules=sorted(names - set(sys.stdlib_module_names)),
        files=_digests_of_sources(root),
        device=describe(worker.device),
    )


def digests_of_script() -> dict[str, str]:
    """Return the SHA-256 of this process's script and of every loaded module's source in the script's folder, by relative path."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not Path(script).is_file():
        return {}
    path = Path(script).resolve()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest(), **_digests_of_sources(path.parent)}


def _digests_of_sources(root: Path) -> dict[str, str]:
    """Return the SHA-256 of every loaded module's source under *root*, by relative path."""
    start = f"{root}{os.sep}"
    digests: dict[str, str] = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.startswith(start) or not file.endswith(".py"):
            continue
        # Packages installed inside the project have versions; so has elasticflow, wherever it lies. train.py belongs to
        # the launch folder; modules that torch's compiler wrote in the run folder are loaded as parts of torch.
        if name.partition(".")[0] in {"elasticflow", "__main__", "torch"} or is_of_installed_package(file):
            continue
        source = Path(file)
        try:
            digests[source.relative_to(root).as_posix()] = hashlib.sha256(source.read_bytes()).hexdigest()
        except OSError:  # removed since
            continue
        if len(digests) == _MOST_FILES:
            break
    return digests
