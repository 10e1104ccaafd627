"""`[torchrun] numa_binding` for workers that torch does not start itself."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.numa import binding

from elasticflow.runtime.process import devices
from elasticflow.runtime.process.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def _affinity() -> Iterator[None]:
    """Give every thread of this process its cores back."""
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    yield
    for thread, cores in before.items():
        with suppress(ProcessLookupError):  # a thread of an earlier test, which has ended
            os.sched_setaffinity(thread, cores)


@pytest.mark.usefixtures("_affinity")
def test_worker_is_bound_to_the_cores_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own rule, asked for the worker's own GPU; torch 2.13 does so only for what it starts itself."""
    core = min(os.sched_getaffinity(0))
    asked: list[tuple[Any, ...]] = []

    def cores_of(*, numa_options: Any, **index: int) -> set[int]:
        asked.append((*index.values(), numa_options.affinity_mode.value))
        return {core}

    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", cores_of)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    variables = {"ELASTICFLOW_GENERATION": "1", "LOCAL_RANK": "3", "ELASTICFLOW_NUMA": "socket"}
    devices.choose_device(Identity.read(variables, tmp_path))

    assert [(3, "socket")] == asked
    assert {core} == os.sched_getaffinity(0)


@pytest.mark.skipif(torch.accelerator.device_count() > 0, reason="there is a GPU to bind to")
def test_binding_without_a_gpu_fails_as_torchs_does(tmp_path: Path) -> None:
    """Asked for and impossible: the worker fails and says so, as under torchrun."""
    variables = {"ELASTICFLOW_GENERATION": "1", "ELASTICFLOW_NUMA": "node"}
    with pytest.raises(Exception, match=r"(?i)cuda|nvidia|gpu|accelerator"):
        devices.choose_device(Identity.read(variables, tmp_path))
