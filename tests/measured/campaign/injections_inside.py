"""Failures inside a run: of the job's own code, its workers, its samples and what they need."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elasticflow import events
from elasticflow.protocol import control_store
from elasticflow.protocol.messages import StartedWorker, WorkersEnded, WorkersStarted
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.system import fault_injection
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import Project
from tests.measured.campaign import scarcity
from tests.system.memory_groups import memory_group

if TYPE_CHECKING:
    from tests.end_to_end.disturbed import Series
    from tests.measured.campaign.trial import Trial


def exception(trial: Trial) -> str:
    """Raise in the training step of one rank."""
    trial.survives("raise")
    return "ValueError in rank 1's training step"


def hang(trial: Trial) -> str:
    """Sleep for ever in the training step of one rank."""
    trial.survives("sleep", 'restarts.hang_timeout="3 s"')
    return "rank 1's training step sleeps for ever"


def termination(trial: Trial) -> str:
    """End a worker by SIGKILL, SIGSEGV and `os._exit`, one after the other."""
    trial.start()
    psutil.Process(trial.running.pid_of(0)).kill()
    second = trial.goes_on()
    trial.cue("segfault")
    third = trial.goes_on(second)
    trial.cue("exit")
    trial.goes_on(third)
    trial.finish()
    return "kill -9 of rank 0; then a segmentation fault, then `os._exit(7)` in rank 1"


def tensor_corruption(trial: Trial) -> str:
    """Flip a bit of one rank's parameters."""
    trial.survives("flip", 'train.compare_replicas="5 steps"')
    return "a bit of a parameter flipped on rank 1"


def desync(trial: Trial) -> str:
    """Let one rank take part in a collective that no other knows of."""
    trial.survives("collective", 'restarts.hang_timeout="3 s"')
    return "rank 1 starts an all-reduce that rank 0 knows nothing of"


def delay(trial: Trial) -> str:
    """Stop one rank for a second, and delay each write of a snapshot."""
    trial.start(**{fault_injection.VARIABLE: "storage.write=stall:0.3"})
    worker = psutil.Process(trial.running.pid_of(1))
    worker.suspend()
    time.sleep(1.0)
    worker.resume()
    trial.finish()
    return "rank 1 stopped for 1 s, each write to the store 0.3 s late"


def timeout(trial: Trial) -> str:
    """Stop a worker for good: all the others wait in a collective."""
    trial.start('restarts.hang_timeout="3 s"')
    psutil.Process(trial.running.pid_of(1)).suspend()
    trial.goes_on()
    trial.finish()
    return "SIGSTOP of rank 1; rank 0 waits for it in a collective"


# --- samples and messages --------------------------------------------------------------------------------


def dropped(trial: Trial) -> str:
    """Kill a loader process, and with it the samples it had read and not handed over."""
    trial.start("dataset.num_workers=2")
    loaders = psutil.Process(trial.running.pid_of(1)).children()
    loaders[-1].kill()
    trial.goes_on()
    trial.finish()
    return "kill -9 of a loader process with samples in hand"


def duplicated(trial: Trial) -> str:
    """Kill all processes, so that steps are done again; and send messages of the agent twice."""
    series = trial.start(options=("--simulate-nodes=2", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1"))
    _send_twice(series)
    series.reach(series.step() + 12)
    series.kill("everything")
    series.resume()
    trial.finish()
    return "an agent's messages about the group sent twice; then kill -9 of all, so that samples come again"


def _send_twice(series: Series) -> None:
    """Post what the agents have said about the group once more, and what they said of an earlier one."""
    from elasticflow.launcher.rendezvous.supervisor_channel import Outbox

    host, _, port = series.look()[0]["endpoint"].rpartition(":")
    address = StoreAddress(host, int(port)).under("tiny").under("1")
    outbox, state = Outbox(control_store.connect(address)), series.running.state()
    workers = tuple(StartedWorker(**worker) for worker in state["workers"] if worker["node"] == "n1")
    outbox.post(WorkersStarted(state["generation"], "n1", workers))
    outbox.post(WorkersEnded(0, "n1", failed=True, workers=()))


def reordered(trial: Trial) -> str:
    """Let loader processes overtake each other; then give the samples another order while the run rests."""
    series = trial.start("dataset.num_workers=2")
    tiny_job.dawdle(trial.project)
    series.reach(series.step() + 6)
    os.kill(series.running.process.pid, signal.SIGTERM)
    assert series.running.end(60) == 75
    with tiny_job.other_order(trial.project):
        series.resume()
        trial.is_refused(1, "is not what the snapshot was trained on")
    trial.resume()
    trial.finish()
    return "one loader process slower than the other; then, at rest, the data set in another order"


# --- resources -------------------------------------------------------------------------------------------


def memory(trial: Trial) -> str:
    """Let one rank take more memory than its group may have."""
    with memory_group() as group:
        trial.project = Project(trial.project.root, trial.project.started, prefix=group.prefix)
        trial.start()
        group.leave_room(200 << 20)
        trial.cue("memory")
        trial.goes_on()
        trial.finish()
    return "rank 1 takes memory until the kernel kills it, in a memory cgroup"


def disk(trial: Trial) -> str:
    """Fill the disk that snapshots lie on, and make room again."""
    with scarcity.small_disk(trial.project.root / "small", "2m") as disk_:
        series = trial.start(f"snapshots.uri={disk_}")
        trial.look_in(str(disk_))
        scarcity.fill(disk_ / "filler")
        series.wait("a failed snapshot", lambda: series.named(events.SNAPSHOT_FAILED))
        (disk_ / "filler").unlink()
        psutil.Process(trial.running.pid_of(1)).kill()
        trial.goes_on()
        trial.finish()
    return "the snapshots' disk full, then a worker killed"


def file_handles(trial: Trial) -> str:
    """Let one rank have no more file descriptors."""
    trial.survives("files", "dataset.num_workers=0")
    return "rank 1 opens files until it may open no more"


def device_memory(trial: Trial) -> str:
    """Ask for more memory than there is address space."""
    trial.survives("allocate")
    return "rank 1 asks torch for more memory than there can be"


def shared_memory(trial: Trial) -> str:
    """Fill /dev/shm, in which others than elasticflow hand samples over."""
    small = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=256k tmpfs /dev/shm && exec "$@"', "sh")
    trial.project = Project(trial.project.root, trial.project.started, prefix=small)
    series = trial.start("dataset.num_workers=2")
    filler = Path(f"/proc/{series.running.pid_of(0)}/root/dev/shm/filler")
    with suppress(OSError), filler.open("wb") as file:
        file.write(bytes(1 << 18))
    trial.finish()
    return "/dev/shm full while loader processes hand over samples"


def dataset_gone(trial: Trial) -> str:
    """Take the data set's file away; refused once it comes again; put it back."""
    series = trial.start()
    with tiny_job.without_samples(trial.project):
        trial.is_refused(1, "No such file or directory")
    series.resume()
    trial.ended.append("resumed with the file back")
    trial.finish()
    return "the file of the samples removed"
