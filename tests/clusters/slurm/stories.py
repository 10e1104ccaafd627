"""The tiny job under a real Slurm: started as a newcomer would, disturbed, compared with what it comes to undisturbed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from elasticflow.errors import NOT_STARTED
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import ROOT, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.clusters.slurm.cluster import Cluster
    from tests.end_to_end.harness import Project

LIMIT_S = 300.0
_BIN = Path(sys.executable).parent
_GRACE = "10 s"


@dataclass
class SlurmJob:
    """A job of Slurm and its run.

    Attributes:
        number: Slurm's.
        run: The run's folder.
    """

    number: int
    run: RunFolder


class Login:
    """A login node: commands are typed in a project whose folder all nodes see.

    Args:
        cluster: The running cluster.
        project: With the tiny job.
        pause_s: Of each forward: time for disturbances.
        hands_on: Jobs have the environment of the login node; else each makes its own, as at sites with SBATCH_EXPORT=NONE.
    """

    def __init__(
        self, cluster: Cluster, project: Project, pause_s: float = 0.02, *, hands_on: bool = True
    ) -> None:
        self.cluster, self.root = cluster, project.root
        tiny_job.write_standard(project)
        self.environment = {
            **os.environ,
            **cluster.environment,
            "PATH": f"{_BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TINY_PAUSE_S": str(pause_s),
        }
        self._hands_on = hands_on
        if not hands_on:
            self.environment["SBATCH_EXPORT"] = "NONE"

    def write_job(self, name: str, lowest: int, highest: int, slurm: str, more: str = "") -> None:
        """Write a job file: the tiny job on so many nodes of one worker each, with these lines under [slurm]."""
        if not self._hands_on:
            names = ("SLURM_CONF", "PATH", "PYTHONPATH", "TINY_PAUSE_S")
            setup = [f"export {name}={shlex.quote(self.environment[name])}" for name in names]
            slurm += f"\nsetup = {json.dumps(setup)}"
        text = (
            f'extends = "tiny.toml"\n[nodes]\nnproc_per_node = 1\nmin = {lowest}\nmax = {highest}\n{more}\n'
            f'[snapshots]\ngrace = "{_GRACE}"\n[slurm]\nexclusive = true\n{slurm}\n'
        )
        (self.root / "jobs" / f"{name}.toml").write_text(text)

    def call(self, *words: str) -> str:
        """Return what a command prints on standard output, once it has ended well."""
        return self._call(words, 0).stdout

    def refused(self, *words: str) -> str:
        """Return what a command says on standard error, which has started nothing."""
        return self._call(words, NOT_STARTED).stderr

    def _call(self, words: tuple[str, ...], expects: int) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["elasticflow", *words],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == expects, f"{words} ended with {done.returncode}: {done.stderr}"
        return done

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Return a command that continues."""
        return subprocess.Popen(
            ["elasticflow", *words],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def submit(self, job: str, *options: str) -> SlurmJob:
        """Submit a job file and return what it became."""
        said = self.call("submit", "slurm", f"jobs/{job}.toml", *options)
        number, run_id = said.split()[2], said.splitlines()[0].split()[-1]
        return SlurmJob(int(number), RunFolder.of(self.root, "tiny", run_id))

    def occupy(self, *options: str) -> int:
        """Submit a job that sleeps on other nodes, or on those of others, and return its number."""
        said = self.cluster.call(
            "sbatch",
            "--parsable",
            "--exclusive",
            f"--chdir={self.root}",
            "--output=/dev/null",
            *options,
            "--wrap=sleep 600",
        )
        return int(said)


def wait(what: str, is_so: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Return the first true value of *is_so*."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if value := is_so():
            return value
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {limit_s:g} s")


def state(job: SlurmJob) -> dict[str, Any]:
    """Return state.json of a job's run; empty before it is there."""
    with suppress(FileNotFoundError):
        found: dict[str, Any] = json.loads(job.run.state.read_text())
        return found
    return {}


def events(job: SlurmJob, name: str) -> list[dict[str, Any]]:
    """Return the events of that name."""
    return [event for event in read_lines(job.run.events) if event["event"] == name]


def step(job: SlurmJob) -> int:
    """Return the newest step of a job's run."""
    return int(state(job).get("step", 0))


def reach(job: SlurmJob, number: int) -> None:
    """Return once the run has done that step."""
    wait(f"step {number} of {job.run.run_id}", lambda: step(job) >= number)


def workers(job: SlurmJob) -> list[dict[str, Any]]:
    """Return the workers that run."""
    return list(state(job).get("workers", ()))


def kill_worker(job: SlurmJob, rank: int) -> None:
    """Kill one worker, as an OOM killer does, once there are so many: a group may begin with fewer nodes."""
    pids = wait(f"rank {rank}", lambda: [each["pid"] for each in workers(job) if each["rank"] == rank])
    os.kill(pids[0], signal.SIGKILL)


def lose_node(login: Login, job: SlurmJob, node: str) -> None:
    """Kill all that runs on a node, its daemon first, as a power cut does; and Slurm finds it DOWN."""
    daemon = psutil.Process(int((login.cluster.folder / f"slurmd.{node}.pid").read_text()))
    lost = [daemon, *(process for process in psutil.process_iter() if _is_on(process, job, node))]
    # All at once, as without power: srun has a process that ends the step on all nodes once srun is gone. Children first: the
    # kernel continues stopped processes that lose their parent.
    for process in lost:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    for process in reversed(lost):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    login.cluster.call("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=test")


def _is_on(process: psutil.Process, job: SlurmJob, node: str) -> bool:
    """Whether a process belongs to a job's part on a node: Slurm's own for it, or one of its environment."""
    with suppress(psutil.Error):
        if process.name() == "slurmstepd":
            children = (child for child in process.children() if child.name() != "slurmstepd")
            return any(_is_on(child, job, node) for child in children)
        variables = process.environ()
        return variables.get("SLURM_JOB_ID") == str(job.number) and variables.get("SLURMD_NODENAME") == node
    return False


def output(login: Login, job: SlurmJob) -> str:
    """Return what the batch script has printed."""
    return "\n".join(path.read_text() for path in sorted(login.root.glob(f"slurm-*-{job.number}*.out")))


def is_over(login: Login, job: SlurmJob) -> bool:
    """Return whether no part of the job waits or runs."""
    ended = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "GONE"}
    return set(login.cluster.state(job.number).split("+")) <= ended


def requeued(login: Login, job: SlurmJob, times: int = 1) -> None:
    """Return once the job waits to be started again, for that often; it is started at once."""
    wait(
        f"job {job.number} is queued again",
        lambda: (
            login.cluster.state(job.number) == "PENDING"
            and int(login.cluster.field(job.number, "Restarts")) >= times
        ),
    )
    # A step daemon that ends takes with it the socket of the next one of its job: Slurm misses that job's script later.
    wait(
        f"the step daemons of job {job.number} have ended", lambda: not login.cluster.step_daemons(job.number)
    )
    # Slurm's record that the job was killed counts in seconds: one that is started in the same second is killed again.
    soonest = time.monotonic() + 3
    wait("a second later", lambda: time.monotonic() > soonest)
    login.cluster.start_now(job.number)


def finish(login: Login, job: SlurmJob, reference: tiny_job.Reference) -> dict[str, Any]:
    """Return the run's figures once the job is over; it must have finished, with the bits of the undisturbed run.

    Raises:
        AssertionError: it did not finish, or in another state, or with other weights or losses.
    """
    wait(f"the end of job {job.number}", lambda: is_over(login, job))
    said = output(login, job)
    assert "finished" == state(job).get("status"), said[-3000:]
    shown = json.loads(login.call("status", job.run.run_id, "--exit-code", "--format=json"))
    assert shown["resume_command"].startswith("elasticflow submit slurm jobs/")
    assert shown["resume_command"].endswith(f" --run-id {job.run.run_id}")
    catalog = Catalog(Storage(str(job.run.path)))
    newest = catalog.newest()
    assert newest is not None
    bits = {
        key: catalog.storage.read(f"{catalog.folder()}/{newest.location(at.file)}")[
            at.offset : at.offset + at.nbytes
        ]
        for key, at in newest.tensors.items()
    }
    losses = {line["step"]: line["loss"] for line in read_lines(job.run.metrics) if "loss" in line}
    assert reference.found["losses"] == losses
    assert reference.found["bits"] == bits
    return {name: shown[name] for name in ("launch", "generation", "durations")}
