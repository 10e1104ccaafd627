"""Checks processors, memory, handles, processes and the clock."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elasticflow.doctor.check import Topic
from elasticflow.observe.history import RunHistory
from elasticflow.observe.runs import list_runs
from elasticflow.observe.terminal.formats import plural, size, span
from elasticflow.protocol.child_processes import MAY_STAND_BY, MEMORY_FACTOR
from elasticflow.protocol.snapshot_settings import AUTO, HELD_MOST_OF_FREE
from elasticflow.system.free_memory import GROUPS, tightest_group
from elasticflow.system.kernel_files import number_in, text_in
from elasticflow.system.processes import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.doctor.check import CheckResult, Needs
    from elasticflow.jobfile.tables.launching import NodesTable
    from elasticflow.observe.history import SnapshotEvent
    from elasticflow.observe.standbys import NodeStandbys
    from elasticflow.protocol.snapshot_settings import SnapshotSettings

_TOPIC = Topic("machine")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # looked at, not used
_GIB = 1 << 30
# torch alone takes 0.3 GB in each worker.
_PER_WORKER = _GIB // 2
_SHARED = _GIB // 2
_HANDLES, _HANDLES_PER_PROCESS = 256, 32
_PROCESSES, _THREADS_PER_PROCESS = 32, 16
_UNLIMITED = 1 << 62
# 2026-01-01: this version is newer, so a clock before that date is wrong.
_CLOCK_MIN = 1_767_225_600


def machine(needs: Needs, cgroup: Path = GROUPS, shared: Path = _SHARED_MEMORY) -> Iterator[CheckResult]:
    """Yield the resources of this machine; the folders are arguments for tests."""
    if sys.platform != "linux":
        meaning = "several workers, memory limits and orphans are looked after on Linux only"
        yield _TOPIC.warning("system", platform.platform(), meaning, "train on Linux")
        return
    yield _TOPIC.ok("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield _cores(needs, cgroup)
    free, fact = _free_memory(cgroup)
    yield _memory(needs, free, fact)
    yield from _of_newest_run(needs, free)
    yield _shared_memory(needs, shared)
    yield _handles(needs)
    yield _processes(needs, cgroup)
    yield _clock()


def _cores(needs: Needs, cgroup: Path) -> CheckResult:
    cores = usable_cores()
    quota, _, period = text_in(cgroup / "cpu.max").partition(" ")
    limit = int(quota) / int(period) if quota.isdecimal() and period.strip().isdecimal() else cores
    fact, usable = str(cores), min(limit, cores)
    remedy = f"set nodes.nproc_per_node = {max(1, int(usable))}"
    if limit < cores:
        fact += f", but the container may use {limit:g}"
        remedy += ", or raise the container's CPU limit"
    if needs.workers <= usable:
        return _TOPIC.ok("cores", fact)
    meaning = f"{plural(needs.workers, 'worker')} share {usable:g} cores: steps stutter"
    return _TOPIC.warning("cores", fact, meaning, remedy)


def _free_memory(cgroup: Path) -> tuple[int, str]:
    """Return the bytes that processes may still allocate, and words about them."""
    memory = psutil.virtual_memory()
    fact = f"{size(memory.available)} free of {size(memory.total)}"
    group = tightest_group(cgroup)
    if group is None:
        return memory.available, fact
    free = min(memory.available, group.left)
    return free, f"{fact}; the container may use {size(group.limit)}, of which {size(free)} are left"


def _memory(needs: Needs, free: int, fact: str) -> CheckResult:
    if free < needs.workers * _PER_WORKER:
        meaning = f"{plural(needs.workers, 'worker')} with torch need {size(needs.workers * _PER_WORKER)} before any model"
        return _TOPIC.warning("memory", fact, meaning, "fewer workers per node, or more memory")
    return _TOPIC.ok("memory", fact)


def _of_newest_run(needs: Needs, free: int) -> Iterator[CheckResult]:
    if needs.job is None:
        return
    run = next(iter(list_runs(needs.root, needs.job.job.name)), None)
    history = RunHistory() if run is None else RunHistory.read(run)
    of_run = "" if run is None else f" (run {run.run_id})"
    if needs.job.restarts.warm in MAY_STAND_BY and history.standbys_seen is not None:
        yield _standbys(needs, free, history.standbys_seen, of_run)
    if (settings := needs.job.snapshots.settings()) is not None:
        yield _held_states(settings, needs.job.nodes, free, history.snapshot, of_run)


def _standbys(needs: Needs, free: int, standbys: NodeStandbys, of_run: str) -> CheckResult:
    name, needed = "standby workers", needs.workers * standbys.memory_of_one
    cost = f"{size(standbys.memory_of_one)} and {span(standbys.seconds)} to get ready"
    fact = f"one takes {cost}{of_run}"
    if free >= MEMORY_FACTOR * needed:
        return _TOPIC.ok(name, fact)
    meaning = f"{plural(needs.workers, 'worker')} would have none: {size(needed)} of {size(free)} free memory is too much"
    remedy = 'more memory, or restarts.warm = "fork": restarts take longer without'
    return _TOPIC.warning(name, fact, meaning, remedy)


def _held_states(
    settings: SnapshotSettings, nodes: NodesTable, free: int, snapshot: SnapshotEvent | None, of_run: str
) -> CheckResult:
    """Return the cost of holding the job's state in memory, by the size of a snapshot, and of a death without."""
    name, every = "held states", f"every {' or '.join(settings.every)}"
    costs = f"a worker's death costs the steps since the last snapshot, {every}"
    if settings.memory is None or (nodes.min > 1 and settings.is_held_at_interval):
        why = "snapshots.memory is off" if settings.memory is None else "workers are on several nodes"
        return _TOPIC.ok(name, f"none, {why}: {costs}")
    if snapshot is None or not snapshot.num_bytes:
        return _TOPIC.ok(name, f"their size shows with the first run; without them {costs}")
    is_auto = settings.memory == AUTO
    needed = settings.held_states * snapshot.num_bytes
    most = free * HELD_MOST_OF_FREE if is_auto else free
    more = f", {size(snapshot.num_bytes)} more while a snapshot is written" if is_auto else ""
    fact = f"{size(needed)} for {size(snapshot.num_bytes)} of state{of_run}{more}"
    if needed <= most:
        return _TOPIC.ok(
            name, f"{fact}: a worker's death costs the steps since the last; without them {costs}"
        )
    meaning = f"nothing is held, since at most {size(most)} are taken: {costs}"
    if not is_auto:
        meaning = f"the run fails, since {size(free)} are free"
    remedy = "more memory" if is_auto else 'more memory, or snapshots.memory = "auto"'
    return _TOPIC.warning(name, fact, meaning, remedy)


def _shared_memory(needs: Needs, folder: Path) -> CheckResult:
    name, meaning = "shared memory", "NCCL hands data from one GPU of a machine to another there"
    try:
        facts = os.statvfs(folder)
    except OSError:
        return _TOPIC.warning(name, f"there is no {folder}", meaning, "mount a tmpfs there")
    free = facts.f_bavail * facts.f_frsize
    fact = f"{size(free)} free in {folder}"
    if free >= _SHARED or needs.workers == 1:
        return _TOPIC.ok(name, fact)
    meaning += ", and fails where it is full"
    remedy = "docker run --shm-size=2g, or an emptyDir of medium Memory on Kubernetes"
    return _TOPIC.warning(name, fact, meaning, remedy)


def _handles(needs: Needs) -> CheckResult:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _HANDLES + _HANDLES_PER_PROCESS * needs.workers * (1 + (needs.loaders or 0))
    fact = f"{_limit(soft)}, may be raised to {_limit(hard)}"
    if 0 <= soft < needed:
        meaning = f'about {needed} are needed for {plural(needs.workers, "worker")}; "Too many open files" ends a run'
        return _TOPIC.problem("file handles", fact, meaning, f"ulimit -n {max(4096, 2 * needed)}")
    return _TOPIC.ok("file handles", fact)


def _processes(needs: Needs, cgroup: Path) -> CheckResult:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    most, now = (number_in(cgroup / name) for name in ("pids.max", "pids.current"))
    needed = _PROCESSES + _THREADS_PER_PROCESS * needs.workers * (1 + (needs.loaders or 0))
    left = min(soft if soft >= 0 else _UNLIMITED, _UNLIMITED if most is None else most - (now or 0))
    fact = "no limit" if left >= _UNLIMITED else f"{max(0, left):,} more"
    if left < needed:
        meaning = f'workers, loaders and their threads are about {needed}; "Resource temporarily unavailable" ends a run'
        remedy = f"ulimit -u {2 * needed}, or raise the container's limit of processes"
        return _TOPIC.problem("processes", fact, meaning, remedy)
    return _TOPIC.ok("processes", fact)


def _clock() -> CheckResult:
    now = time.time()
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < _CLOCK_MIN:
        meaning = "times in logs are wrong, and S3 and others refuse requests from another time"
        return _TOPIC.problem("clock", shown, meaning, "set the clock: timedatectl set-ntp true")
    return _TOPIC.ok("clock", shown)


def _limit(number: int) -> str:
    return "no limit" if number < 0 or number >= _UNLIMITED else f"{number:,}"
