"""A real Slurm of several nodes on this machine: own daemons, own ports, own key; nothing of it is left afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.servers import MissingServerError, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAMS = ("sbatch", "srun", "scontrol", "squeue", "slurmctld", "slurmd", "munged")
_LIMIT_S = 60.0
_SBIN = "/usr/sbin:/sbin"

# Nodes come back by themselves once their daemon answers. Two partitions: jobs in `high` take the nodes of those in `low`.
_CONF = """\
ClusterName=fake
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=20
MinJobAge=300
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=30
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm.

    Attributes:
        folder: Of its daemons.
        nodes: Names of the nodes.
    """

    folder: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """What clients need to find it."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str) -> str:
        """Return what one of Slurm's commands prints."""
        done = subprocess.run(
            words,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: int) -> str:
        """Return the states of a job's parts in one word, such as `RUNNING`; `GONE` for one that is forgotten."""
        done = subprocess.run(
            ["squeue", "-h", "-a", "-t", "all", "-j", str(job), "-o", "%T"],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return "+".join(sorted(set(done.stdout.split()))) or "GONE"

    def field(self, job: int | str, name: str) -> str:
        """Return a field of `scontrol show job`."""
        for word in self.call("scontrol", "show", "job", str(job)).split():
            key, _, value = word.partition("=")
            if key == name:
                return value
        raise AssertionError(f"job {job} has no {name}")

    def step_daemons(self, job: int) -> list[psutil.Process]:
        """Return the daemons of this cluster that hold a job's steps, on all its nodes."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ"]):
            environment = process.info["environ"] or {}
            is_of_job = f"slurmstepd: [{job}." in " ".join(process.info["cmdline"] or ())
            if is_of_job and environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                found.append(process)
        return found

    def start_now(self, job: int) -> None:
        """Have a job that is queued again start at once, not after two minutes."""
        self.call("scontrol", "update", f"JobId={job}", "StartTime=now")


def missing() -> str | None:
    """Return what keeps Slurm from running here; None if nothing does."""
    path = f"{os.environ.get('PATH', '')}:{_SBIN}"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons on one machine are started as root"


@contextlib.contextmanager
def cluster(folder: Path, count: int = 4) -> Iterator[Cluster]:
    """Run a cluster of *count* nodes from *folder*.

    Raises:
        MissingServerError: Slurm is not installed here, or may not be started.
    """
    if (why := missing()) is not None:
        raise MissingServerError(why)
    nodes = tuple(f"n{number}" for number in range(1, count + 1))
    made = Cluster(folder, nodes)
    _configure(made)
    try:
        _start(made)
        _await_idle(made)
        yield made
    finally:
        _stop(made)


def _configure(made: Cluster) -> None:
    folder, host = made.folder, socket.gethostname().partition(".")[0]
    (folder / "state").mkdir(parents=True)
    lines = []
    for node in made.nodes:
        (folder / f"spool.{node}").mkdir()
        lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 RealMemory=1000 State=UNKNOWN"
        )
    conf = _CONF.format(host=host, folder=folder, port=free_port(), nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(conf)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _start(made: Cluster) -> None:
    folder = made.folder
    environment = {**os.environ, **made.environment, "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}"}
    commands = [
        ["munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"],
        ["slurmctld", "-c", "-f", str(folder / "slurm.conf")],
        *(["slurmd", "-N", node, "-f", str(folder / "slurm.conf")] for node in made.nodes),
    ]  # fmt: skip
    for command in commands:
        # They go into the background themselves, with a file of their process id each.
        with (folder / "start.log").open("ab") as log:
            subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=60,
                check=True,
            )


def _await_idle(made: Cluster) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(AssertionError):
            if made.call("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == str(len(made.nodes)):
                return
        time.sleep(0.2)
    raise AssertionError(f"the nodes are not idle: {(made.folder / 'slurmctld.log').read_text()[-2000:]}")


def _stop(made: Cluster) -> None:
    """End all jobs, then the daemons: slurmd waits for what it has started."""
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        made.call("scancel", "--user=root")
        deadline = time.monotonic() + _LIMIT_S
        while made.call("squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)
    pids = [int(path.read_text()) for path in made.folder.glob("*.pid")]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.1)
