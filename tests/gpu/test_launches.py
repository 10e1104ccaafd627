"""Launches on a GPU: kills, two workers on one device, bits, another device at a resume, errors of the device.

Each also runs on the CPU, with a smaller model, where it says less.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow import events
from tests.end_to_end.harness import named, steps_of, tensors
from tests.gpu import small_job
from tests.gpu.marks import LAUNCHED_ON

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.harness import Project, Running

# Ranks that share a device form their group by gloo: nccl refuses two ranks on one.
_SHARED = {"ELASTICFLOW_SHARE_DEVICE": "1"}
_ON_CPU, _ON_GPU = LAUNCHED_ON
_STEPS = list(range(1, small_job.STEPS + 1))
_WIDTH = {"cpu": 32, "cuda": 1024}
on_both = pytest.mark.parametrize("device", LAUNCHED_ON, indirect=True)


@on_both
def test_compiled_job_starts_and_survives_a_kill(project: Project, device: str) -> None:
    """With `train.compile = true` the process that forks workers opens no device, before and after the kill."""
    small_job.write(project, is_slow=True)
    running = _run(project, "compiled", device, "train.compile=true")
    _kill(running, 0)
    running.wait_for("another generation", lambda: len(named(running.events(), events.TRAINING_STARTED)) == 2)
    assert _open_in_fork_servers(running) == set()
    _finish(project, running, device, generations=2)


@on_both
@pytest.mark.parametrize("more", [(), small_job.OFFLOADED], ids=["on the device", "offloaded"])
def test_exact_bits_are_those_of_an_undisturbed_run(
    project: Project, device: str, more: tuple[str, ...]
) -> None:
    """One worker twice: undisturbed, and killed while another process holds most of the device's memory."""
    small_job.write(project)
    sets = (*small_job.EXACT, *more)
    undisturbed = _run(project, "undisturbed", device, *sets)
    _finish(project, undisturbed, device)
    with _memory_in_use(device):
        project.write("slow", "")
        killed = _run(project, "killed", device, *sets)
        _kill(killed, 0)
        _finish(project, killed, device, generations=2)
    assert tensors(undisturbed.run) == tensors(killed.run)


@on_both
def test_standby_with_a_context_takes_the_place_of_a_killed_worker(project: Project, device: str) -> None:
    """It is ready before the kill, and it is the process that goes on."""
    small_job.write(project, is_slow=True)
    running = _run(project, "standby", device, "restarts.warm=standby")
    running.wait_for("a standby", lambda: named(running.events(), events.STANDBYS_READY))
    standby = named(running.events(), events.STANDBYS_READY)[0]["pids"][0]
    _kill(running, 0)
    running.wait_for_group(1, 1)
    assert standby == running.pid_of(0)
    _finish(project, running, device, generations=2)


@on_both
@pytest.mark.parametrize("mode", ["batch", "exact"])
def test_two_workers_on_one_device(project: Project, device: str, mode: str) -> None:
    """Votes, gradients and sums of replicas cross two contexts on a device, of which one is killed: no step is lost."""
    small_job.write(project, is_slow=True)
    sets = ("nodes.nproc_per_node=2", *(small_job.EXACT if mode == "exact" else ()))
    running = _run(project, mode, device, *sets, **_SHARED)
    _kill(running, 1)
    _finish(project, running, device, generations=2)
    assert [] == named(running.events(), events.REPLICAS_NOT_COMPARED)
    assert [] == named(running.events(), events.SNAPSHOT_REJECTED)
    if mode == "exact":
        alone = _run(project, "alone", device, *small_job.EXACT)
        _finish(project, alone, device)
        assert tensors(alone.run) == tensors(running.run)


@pytest.mark.parametrize(
    ("device", "fused"),
    [
        pytest.param(*_ON_CPU.values, "true", marks=_ON_CPU.marks),
        *(pytest.param(*_ON_GPU.values, fused, marks=_ON_GPU.marks) for fused in ("false", "true")),
    ],
    indirect=["device"],
)
def test_snapshot_of_the_device_goes_on_on_the_cpu_and_back(
    project: Project, device: str, fused: str
) -> None:
    """The fused AdamW counts its steps on the device. The optimizer's own tensors and the random numbers of either device are put back on the other: all steps once."""
    small_job.write(project, is_slow=True)
    _drain(_run(project, "moved", device, f"optimizer.args={{ lr = 1e-2, fused = {fused} }}"))
    on_cpu = _resume(project, "cpu")
    on_cpu.wait_for_step(small_job.EVERY + 5)
    _drain(on_cpu)
    small_job.hurry(project)
    back = _resume(project, device)
    assert back.end() == 0, back.told()
    assert [device, "cpu", device] == _devices(back)
    assert _STEPS == steps_of(back.run)


@on_both
@pytest.mark.parametrize("fault", small_job.FAULTS)
def test_errors_of_a_device_have_their_class(project: Project, device: str, fault: str) -> None:
    """Out of memory is `oom`; an index out of range, which a GPU reports late and by a broken context, is the job's own."""
    small_job.write(project, in_loss=small_job.FAULTS[fault])
    running = _run(project, "fault", device, "restarts.budget=1")
    assert running.end() not in {0, 75}, running.told()
    assert {fault} == {event["class"] for event in named(running.events(), events.GENERATION_ENDED)}


@on_both
def test_job_with_an_id_of_mig_that_is_not_there(project: Project, device: str) -> None:
    """NVML does not count such ids, so the driver is asked, though not in the process that forks: the run trains on the CPU."""
    small_job.write(project)
    running = _run(project, "mig", device, CUDA_VISIBLE_DEVICES="MIG-00000000-0000-0000-0000-000000000000")
    _finish(project, running, "cpu")


@pytest.mark.parametrize("device", [_ON_GPU], indirect=True)
def test_fewer_devices_than_workers_are_refused(project: Project, device: str) -> None:
    """The CPU does not stand in for a device that is missing: nothing is trained."""
    import torch

    small_job.write(project)
    running = _run(project, "fewer", device, f"nodes.nproc_per_node={torch.cuda.device_count() + 1}")
    assert running.end() not in {0, 75}, running.told()
    assert [] == _devices(running)
    assert "of type" in running.told()


def _run(project: Project, run_id: str, device: str, *sets: str, **environment: str) -> Running:
    width = f"model.args={{ width = {_WIDTH[device]} }}"
    return project.run(small_job.FILE, run_id, width, *sets, job=small_job.NAME, **environment)


def _resume(project: Project, device: str) -> Running:
    """Resume the run `moved` on another device, which is asked for by name."""
    return project.start("resume", "moved", run_id="moved", job=small_job.NAME, ELASTICFLOW_DEVICE=device)


def _kill(running: Running, rank: int) -> None:
    """Kill a worker between two snapshots; until then no fork server may have a device open."""
    running.wait_for_step(small_job.EVERY + 2)
    assert _open_in_fork_servers(running) == set()
    os.kill(running.pid_of(rank), signal.SIGKILL)


def _finish(project: Project, running: Running, device: str, generations: int = 1) -> None:
    """Let the run come to its end, and check that each step was taken, on the device, by so many generations."""
    small_job.hurry(project)
    assert running.end() == 0, running.told()
    assert [device] * generations == _devices(running)
    assert _STEPS == steps_of(running.run)


def _drain(running: Running) -> None:
    """Have the run leave after a snapshot and some steps."""
    running.wait_for_step(small_job.EVERY + 2)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 75, running.told()


def _devices(running: Running) -> list[str]:
    """Return the type of device of each generation that has trained."""
    return [event["device"].partition(":")[0] for event in named(running.events(), events.TRAINING_STARTED)]


def _open_in_fork_servers(running: Running) -> set[str]:
    """Return the files that only CUDA opens, as far as known, and that the processes above rank 0 have open."""
    found = set()
    for process in psutil.Process(running.pid_of(0)).parents():
        if "elasticflow.launcher.fork_server.server" in process.cmdline():
            folder = Path(f"/proc/{process.pid}/fd")
            found |= {str(descriptor.readlink()) for descriptor in folder.iterdir()}
    return found & {"/dev/nvidia-uvm", "/dev/kfd"}


_HOLDS_MEMORY = """
import sys
import torch
if sys.argv[1] == "cuda":
    torch.cuda.init()
free = torch.cuda.mem_get_info()[0] if sys.argv[1] == "cuda" else 80 << 20
held = torch.zeros(int(0.8 * free), dtype=torch.uint8, device=sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def _memory_in_use(device: str) -> Iterator[None]:
    """Have another process hold most of the device's memory within the context; on the CPU a little."""
    command = [sys.executable, "-c", _HOLDS_MEMORY, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "held\n"
            yield
        finally:
            process.stdin.close()
            process.wait(60)
