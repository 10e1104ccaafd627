"""A project in a temporary folder, and real launches of the command in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

import psutil
import pytest

from elasticflow import events
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.command_line import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from elasticflow.snapshots.format.manifest import Manifest

ROOT = Path(__file__).resolve().parents[2]
LONGEST_LINE = 1 << 14  # bytes of a record of metrics
LIMIT_S = 300  # of one wait: a guard alone, which a busy machine must not reach
# Inherited by all that this process starts: another one may be testing runs of the same ids on this machine.
OWNER = "TESTS_PROCESS"
os.environ[OWNER] = str(os.getpid())
# What was on the path stays there, behind this checkout: the pretended driver of `tests/gpu/`, for instance.
_PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@dataclass
class Running:
    """One started command."""

    process: subprocess.Popen[str]
    run: RunFolder
    output: Path

    def events(self) -> list[dict[str, Any]]:
        """Return the events so far."""
        return read_lines(self.run.events)

    def state(self) -> dict[str, Any]:
        """Return state.json, or an empty one before it exists."""
        with suppress(FileNotFoundError):
            loaded: dict[str, Any] = json.loads(self.run.state.read_text())
            return loaded
        return {}

    def wait_for(self, what: str, is_so: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
        """Return the first true value of *is_so*; fail when the command ends or time runs out before."""
        deadline = time.monotonic() + limit_s
        while (began := time.monotonic()) < deadline:
            value = is_so()
            if value:
                return value
            if self.process.poll() is not None and not is_so():
                pytest.fail(f"ended with {self.process.returncode} before {what}:\n{self.told()}")
            # What is dear to look at is looked at less often: the run needs the machine.
            time.sleep(max(0.01, 2 * (time.monotonic() - began)))
        pytest.fail(f"no {what} within {limit_s} s:\n{self.told()}")

    def wait_for_step(self, step: int, generation: int = 0) -> int:
        """Return the step reached, at least *step*, by a generation after *generation*."""

        def reached() -> int | None:
            steps = [
                r for r in last_line(self.run.metrics) if r["step"] >= step and r["generation"] > generation
            ]
            return int(steps[0]["step"]) if steps else None

        return int(self.wait_for(f"step {step}", reached))

    def wait_for_group(self, size: int, generation: int) -> int:
        """Return the number of a generation after *generation* with *size* workers that has trained a few steps."""

        def formed() -> int | None:
            state = self.state()
            fits = state.get("generation", 0) > generation and len(state.get("workers", ())) == size
            return int(state["generation"]) if fits else None

        found = int(self.wait_for(f"a group of {size}", formed))
        self.wait_for_step(self.state()["step"] + 3, generation=generation)
        return found

    def pid_of(self, rank: int) -> int:
        """Return the process id of a worker."""
        workers = self.wait_for("workers", lambda: self.state().get("workers"))
        return int(next(w["pid"] for w in workers if w["rank"] == rank))

    def halted(self, rank: int, generation: int = 1) -> psutil.Process:
        """Return a worker of *generation* once it has halted: `ELASTICFLOW_FAULTS` has the act `stop` for it."""

        def stopped() -> psutil.Process | None:
            state = self.state()
            if state.get("generation") != generation:
                return None
            pids = [each["pid"] for each in state.get("workers", ()) if each["rank"] == rank]
            with suppress(psutil.NoSuchProcess):
                found = [each for each in map(psutil.Process, pids) if each.status() == psutil.STATUS_STOPPED]
                return found[0] if found else None
            return None

        halted: psutil.Process = self.wait_for(f"rank {rank}'s halt", stopped)
        return halted

    def leave_from_halt(self, rank: int, generation: int) -> None:
        """Ask the launch to leave while a worker of *generation* halts, have that continue, and see the end: exit code 75."""
        worker = self.halted(rank, generation)
        before = len(named(self.events(), events.DRAIN_REQUESTED))
        self.process.send_signal(signal.SIGTERM)
        self.wait_for("the drain", lambda: len(named(self.events(), events.DRAIN_REQUESTED)) > before)
        worker.resume()
        assert self.end() == 75, self.told()

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Return the exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {limit_s} s:\n{self.told()}")

    def told(self) -> str:
        """Return what the command printed, and the agent's log."""
        logs = sorted(self.run.agent_log().parent.glob("agent*.log"))
        agents = "".join(f"\n--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)
        return self.output.read_text() + agents

    def tree(self) -> list[psutil.Process]:
        """Return every living process of this run, found by the mark in its environment."""
        return processes_of(self.run.run_id)


def processes_of(run_id: str, root: Path | None = None) -> list[psutil.Process]:
    """Return the living processes below this one's that bear the run's mark; names are never looked at.

    The run lies in *root*, a project's; None: each process' working folder.
    """
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            marks = process.environ()
            is_ours = marks.get(OWNER) == os.environ[OWNER]
            if (
                is_ours
                and _is_of_run(marks, run_id, root or Path(process.cwd()))
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def _is_of_run(marks: Mapping[str, str], run_id: str, root: Path) -> bool:
    """Return whether a process has the run's mark, or, since it was forked, that of one of the run's launches."""
    if marks.get("ELASTICFLOW_RUN_ID") == run_id:
        return True
    launch = marks.get("ELASTICFLOW_LAUNCH_ID")
    records = root.glob(f"runs/*/{run_id}/*/*/job.json") if launch else ()
    return any(f'"{launch}"' in record.read_text() for record in records)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file; a line being written is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def last_line(path: Path) -> list[dict[str, Any]]:
    """Return the last record of a JSON-lines file, of which there may be many, in a list; an empty one as long as there is none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
        return [json.loads(line) for line in file.read().rpartition(b"\n")[0].splitlines()[-1:]]
    return []


@dataclass
class Project:
    """A project folder with jobs and examples of its own."""

    root: Path
    started: list[Running] = field(default_factory=list)
    prefix: tuple[str, ...] = ()  # of every command: what runs it on another host
    # Each command is an interpreter of its own: for what is measured, and what happens while it imports.
    fresh: bool = "PYTEST_VERSION" not in os.environ

    def start(self, *arguments: str, run_id: str, job: str = "mnist", **environment: str) -> Running:
        """Start `elasticflow ARGUMENTS` in the project; output goes to a file."""
        output = self.root / f"output-{len(self.started)}.txt"
        with output.open("w") as stream:
            process = self._start(arguments, stream, stream, environment)
        running = Running(process, RunFolder.of(self.root, job, run_id), output)
        self.started.append(running)
        return running

    def run(self, job_file: str, run_id: str, *sets: str, job: str = "mnist", **environment: str) -> Running:
        """Start `elasticflow run` under *run_id*."""
        options = [f"--set={text}" for text in sets]
        return self.start(
            "run", job_file, f"--run-id={run_id}", *options, run_id=run_id, job=job, **environment
        )

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `elasticflow ARGUMENTS` in the project to its end."""
        with TemporaryFile("w+", errors="replace") as stdout, TemporaryFile("w+", errors="replace") as stderr:
            process = self._start(arguments, stdout, stderr, {})
            try:
                code = process.wait(LIMIT_S)
            finally:
                process.kill()
            for stream in (stdout, stderr):
                stream.seek(0)
            return subprocess.CompletedProcess(list(arguments), code, stdout.read(), stderr.read())

    def _start(
        self, arguments: Sequence[str], stdout: IO[str], stderr: IO[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        with nullcontext() if self.fresh else forks():
            return subprocess.Popen(
                [*self.prefix, sys.executable, "-m", "elasticflow", *arguments],
                cwd=self.root,
                stdout=stdout,
                stderr=stderr,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": _PATH, **variables},
            )

    def elsewhere(self, root: Path) -> Project:
        """Return the project in another folder, as another machine has it; its launches are looked after here."""
        root.mkdir(exist_ok=True)
        shutil.copy(self.root / "pyproject.toml", root)
        copy_examples(root, self.root)
        return Project(root, self.started)

    def write(self, name: str, text: str) -> Path:
        """Write a file of the project."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


def copy_examples(to: Path, source: Path = ROOT) -> None:
    """Copy the example jobs and their code into the folder *to*, but no bytecode: processes that run in *source* write it meanwhile."""
    for part in ("examples", "jobs"):
        shutil.copytree(source / part, to / part, ignore=shutil.ignore_patterns("__pycache__"))


@contextmanager
def project_at(root: Path) -> Iterator[Project]:
    """Yield a project in *root* with the example job; afterwards nothing of its launches is alive."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").write_text('[project]\nname = "trial"\nversion = "0"\n')
    copy_examples(root)
    made = Project(root)
    try:
        yield made
    finally:
        for running in made.started:
            running.process.kill()
            running.process.wait()
        left = [p for running in made.started for p in wait_gone(running.run.run_id)]
    assert left == [], f"left behind: {left}"


def wait_gone(run_id: str, limit_s: float = 30.0) -> list[psutil.Process]:
    """Return what of the run is still alive when *limit_s* is over; none as soon as there is none."""
    deadline = time.monotonic() + limit_s
    while (left := processes_of(run_id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return left


def tensors(run: RunFolder | Catalog) -> dict[str, bytes]:
    """Return the bytes of every tensor of the newest snapshot, by name."""
    catalog = run if isinstance(run, Catalog) else Catalog(Storage(str(run.path)))
    manifest = catalog.newest()
    assert manifest is not None
    return bytes_of_tensors(catalog, manifest)


def bytes_of_tensors(catalog: Catalog, manifest: Manifest) -> dict[str, bytes]:
    """Return the bytes of every tensor of a snapshot by name, those of pieces put together."""
    files = {place: catalog.storage.read(f"{catalog.folder()}/{place}") for place in manifest.locations()}
    return {
        key: b"".join(
            files[manifest.location(file)][offset : offset + nbytes]
            for file, offset, nbytes in whole.spans(0, whole.nbytes)
        )
        for key, whole in manifest.whole.items()
    }


def steps_of(run: RunFolder) -> list[int]:
    """Return the steps in metrics.jsonl, in file order."""
    return [record["step"] for record in read_lines(run.metrics) if "eval" not in record]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the events of that name."""
    return [event for event in events if event["event"] == name]
