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
    from collections.abc import Callable, Iterator

_ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "sacctmgr")
_PROGRAMS = ("sbatch", "srun", "scontrol", "squeue", "slurmctld", "slurmd", "munged")
_LIMIT_S = 60.0
_SBIN = "/usr/sbin:/sbin"

# Nodes come back by themselves once their daemon answers. Jobs in the partition `high` take the nodes of those in `low`; `short`
# has limits, which Slurm does not look at when a job is submitted (EnforcePartLimits=NO, its default).
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
EnforcePartLimits=NO
{accounting}
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=short Nodes=ALL MaxTime=10 MaxNodes=2 State=UP PriorityTier=1
"""
# A job without an association is refused.
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits
"""
_DBD_CONF = """\
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage}
StorageUser=root
StorageLoc=slurm_acct_db
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
PluginDir={plugins}
"""


@dataclass(frozen=True)
class Cluster:
    """A running Slurm.

    Attributes:
        folder: Of its daemons.
        nodes: Names of the nodes.
        has_accounting: Jobs are charged to an account, which slurmdbd keeps.
    """

    folder: Path
    nodes: tuple[str, ...]
    has_accounting: bool = False

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


def missing(*, has_accounting: bool = False) -> str | None:
    """Return what keeps Slurm from running here; None if nothing does."""
    needed = (*_PROGRAMS, *(_ACCOUNTING_PROGRAMS if has_accounting else ()))
    absent = [name for name in needed if _program(name) is None]
    if absent:
        return (
            f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge slurmdbd mariadb-server-core"
        )
    return None if os.geteuid() == 0 else "Slurm's daemons on one machine are started as root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


@contextlib.contextmanager
def cluster(folder: Path, count: int = 4, *, has_accounting: bool = False) -> Iterator[Cluster]:
    """Run a cluster of *count* nodes from *folder*.

    Raises:
        MissingServerError: Slurm is not installed here, or may not be started.
    """
    if (why := missing(has_accounting=has_accounting)) is not None:
        raise MissingServerError(why)
    nodes = tuple(f"n{number}" for number in range(1, count + 1))
    made = Cluster(folder, nodes, has_accounting)
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
    accounting = ""
    if made.has_accounting:
        port, storage = free_port(), free_port()
        accounting = _ACCOUNTING.format(port=port, folder=folder)
        plugins = [
            *Path("/usr/lib").glob("*/slurm-wlm"),
            *_near(_program("slurmdbd") or "").glob("lib/*/slurm-wlm"),
        ]
        text = _DBD_CONF.format(
            host=host, folder=folder, port=port, storage=storage, plugins=":".join(map(str, plugins))
        )
        (folder / "slurmdbd.conf").write_text(text)
        (folder / "slurmdbd.conf").chmod(0o600)
        (folder / "storage.port").write_text(str(storage))
    conf = _CONF.format(
        host=host, folder=folder, port=free_port(), nodes="\n".join(lines), accounting=accounting
    )
    (folder / "slurm.conf").write_text(conf)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)


def _near(program: str) -> Path:
    """Return the folder, such as /usr, in which a program and its libraries are installed."""
    return Path(program).resolve().parent.parent


def _start(made: Cluster) -> None:
    folder = made.folder
    munged = [
        "munged", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
    ]  # fmt: skip
    _begin(made, munged)
    if made.has_accounting:
        _start_accounting(made)
    _begin(made, ["slurmctld", "-c", "-f", str(folder / "slurm.conf")])
    for node in made.nodes:
        _begin(made, ["slurmd", "-N", node, "-f", str(folder / "slurm.conf")])


def _start_accounting(made: Cluster) -> None:
    """Start the database, and slurmdbd with an account for the cluster's user."""
    folder = made.folder
    (folder / "db").mkdir()
    server = _program("mariadbd") or ""
    share = _near(server) / "share" / "mysql"
    words = [
        server, "--no-defaults", "--user=root", f"--datadir={folder}/db", f"--lc-messages-dir={share}",
    ]  # fmt: skip
    tables = "create database mysql;\nuse mysql;\n" + (share / "mysql_system_tables.sql").read_text()
    listens = [
        "--skip-grant-tables", "--bind-address=127.0.0.1", f"--port={(folder / 'storage.port').read_text()}",
        f"--socket={folder}/db.socket", f"--pid-file={folder}/db.pid",
    ]  # fmt: skip
    with (folder / "start.log").open("ab") as log:
        subprocess.run(
            [*words, "--bootstrap"], input=tables.encode(), stdout=log, stderr=log, timeout=60, check=True
        )
        subprocess.Popen(
            [*words, *listens], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    _await((folder / "db.pid").exists, "the database has not started")
    _begin(made, ["slurmdbd"])  # its configuration lies beside slurm.conf
    _await(lambda: made.call("sacctmgr", "-nP", "list", "qos") != "", "slurmdbd does not answer")
    for words in (
        ["cluster", "fake"],
        ["account", "lab", "cluster=fake"],
        ["user", "root", "account=lab", "defaultaccount=lab"],
    ):
        made.call("sacctmgr", "-i", "add", *words)


def _begin(made: Cluster, *commands: list[str]) -> None:
    folder = made.folder
    environment = {**os.environ, **made.environment, "PATH": f"{os.environ.get('PATH', '')}:{_SBIN}"}
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
    def is_idle() -> bool:
        return made.call("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == str(len(made.nodes))

    _await(is_idle, lambda: f"the nodes are not idle: {(made.folder / 'slurmctld.log').read_text()[-2000:]}")


def _await(is_so: Callable[[], bool], what: str | Callable[[], str]) -> None:
    deadline, last = time.monotonic() + _LIMIT_S, ""
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except AssertionError as error:
            last = f": {error}"
        time.sleep(0.2)
    raise AssertionError(f"{what if isinstance(what, str) else what()}{last}")


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
