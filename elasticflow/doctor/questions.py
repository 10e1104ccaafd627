"""All checks, in the order in which they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.doctor.check import Needs
from elasticflow.doctor.machine import machine
from elasticflow.doctor.network import network
from elasticflow.doctor.project import packages, project
from elasticflow.doctor.store import stores
from elasticflow.doctor.torch_probe import TorchProbe
from elasticflow.system.processes import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.doctor.check import CheckResult
    from elasticflow.jobfile.tables.job import Job

_GPUS = Path("/proc/driver/nvidia/gpus")


def examine(needs: Needs, wait: Callable[[str], None]) -> Iterator[CheckResult]:
    """Yield each result as soon as it is known; no process or file is left behind, even if the caller stops early.

    torch comes last: a child imports it meanwhile.

    Args:
        wait: Called with the name of an activity that takes long.
    """
    probe = TorchProbe()
    try:
        yield from packages()
        yield from machine(needs)
        yield from network(needs)
        yield from stores(needs)
        yield from project(needs)
        yield from probe.results(needs, wait)
    finally:
        probe.close()


def needs_of(root: Path, job: Job | None = None, job_file: Path | None = None, gpus: Path = _GPUS) -> Needs:
    """Return the needs of *job*, or of any job if None: a worker for each GPU that the driver has in *gpus*, else for each core."""
    workers = usable_cores()
    if job is None or "cpu" not in {job.nodes.nproc_per_node, job.nodes.device_of_workers}:
        workers = len(list(gpus.glob("*"))) or workers
    if job is None:
        return Needs(root, workers)
    workers = job.nodes.nproc_per_node if isinstance(job.nodes.nproc_per_node, int) else workers
    loaders = 0 if job.script is not None else job.dataset.num_workers
    return Needs(root, workers, loaders, job, job_file)
