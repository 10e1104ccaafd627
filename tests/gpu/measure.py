"""Runs the tests for a GPU, measures restarts there, and leaves a folder: `python -m tests.gpu.measure [--out FOLDER] [--dry]`.

`run.sh` makes the environment for it. The folder has the table, the machine, each command with its log, and for each run its
records and the digest of its final weights. The table is written anew after each step, whatever becomes of the step.
Exit code: 0 if all tests passed and every bound is kept, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from elasticflow.run_folder import RunFolder
from tests.end_to_end.harness import tensors
from tests.measured.benchmarks import recovery_figures as figures

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
# The most valuable first, with the seconds that each may take: a machine is lent for half an hour.
TESTS = {
    "tests/gpu/test_device.py": 180,
    "tests/gpu/test_launches.py": 720,
    "tests/runtime/training/test_waits_on_a_gpu.py": 60,
    "tests/runtime/training/test_exact_on_a_gpu.py": 60,
    "tests/runtime/snapshot/test_staging_copy.py": 90,
    "tests/gpu/test_main_job.py": 240,
}
_RECOVERY_S, _BUDGET_S = 300, 1500
# For a step to end by itself once it was interrupted: pytest takes the launches of its tests along.
_ENDING_S = 45
_OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
_KEPT = ("events.jsonl", "metrics.jsonl", "state.json", "*.log")
_MOST_BYTES = 1 << 20  # of a kept file


@dataclass(frozen=True)
class Step:
    """A command that has ended.

    Attributes:
        name: The name of its log, without the ending.
        command: As a shell takes it.
        ended: Exit code, or how it was ended.
        seconds: Time taken.
        must_pass: The results are no good if it fails.
    """

    name: str
    command: str
    ended: str
    seconds: float
    must_pass: bool = True


@dataclass
class Results:
    """The outcome so far.

    Attributes:
        bound_to: Facts that all of it is bound to, by name.
        steps: Commands, in order.
        outcomes: What became of each test, by its id.
        told: What each test has recorded (`record_property`), by its name.
        digests: Of the final weights of each run, by its folder below `runs`.
        tries: Of the restarts that were measured.
    """

    bound_to: dict[str, str]
    steps: list[Step] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    told: dict[str, dict[str, str]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    tries: figures.Tries = field(default_factory=dict)

    def is_good(self) -> bool:
        """Return whether all tests ran and passed, and every bound is kept."""
        return (
            all(step.ended == "0" for step in self.steps if step.must_pass)
            and set(self.outcomes.values()) == {"passed"}
            and bool(self.tries)
            and all(figures.bounds(self.tries).values())
        )

    def table(self) -> str:
        """Return the table as Markdown."""
        passed = sum(outcome == "passed" for outcome in self.outcomes.values())
        lines = [
            "# On a GPU",
            "",
            ", ".join(f"{name}: {value}" for name, value in self.bound_to.items()) + ".",
            "",
        ]
        lines += [f"{passed} of {len(self.outcomes)} tests passed.", ""]
        lines += ["| step | ended | s |", "|---|---|---:|"]
        lines += [f"| `{step.command}` | {step.ended} | {step.seconds:.0f} |" for step in self.steps]
        lines += [
            "",
            "| test | |",
            "|---|---|",
            *(f"| {name} | {outcome} |" for name, outcome in self.outcomes.items()),
        ]
        lines += ["", "| test | recorded |", "|---|---|"]
        for test, properties in self.told.items():
            words = ", ".join(f"{name}: {value}" for name, value in properties.items())
            lines.append(f"| {test} | {words} |")
        lines += ["", "| run | final weights |", "|---|---|"]
        lines += [f"| {run} | {digest} |" for run, digest in self.digests.items()]
        lines += ["", figures.table(self.tries), "", figures.way(self.tries), ""]
        lines += [
            f"- {'kept' if kept else 'BROKEN'}: {words}" for words, kept in figures.bounds(self.tries).items()
        ]
        return "\n".join(lines) + "\n"


class StepRunner:
    """Runs commands one after the other within a time limit, and writes what is known into a folder after each.

    Args:
        out: The folder.
        results: Filled in here.
        seconds: Time for all commands together.
    """

    def __init__(self, out: Path, results: Results, seconds: float) -> None:
        self.out, self.results = out, results
        self._end = time.monotonic() + seconds

    def run(self, name: str, command: list[str], limit_s: float, *, must_pass: bool = True) -> str:
        """Run *command* for at most *limit_s*, and return its output, which is in the folder's `NAME.log`, too."""
        began = time.monotonic()
        log = self.out / f"{name}.log"
        limit_s = min(limit_s, self._end - began)
        ended = "left out: no time was left"
        if limit_s > 0:
            with log.open("w") as stream:
                ended = ended_as(command, stream.fileno(), limit_s)
        shown = shlex.join(["python" if part == sys.executable else part for part in command])
        self.results.steps.append(Step(name, shown, ended, time.monotonic() - began, must_pass))
        return log.read_text(errors="replace") if log.exists() else ""

    def write(self) -> None:
        """Write the table as it is."""
        (self.out / "table.md").write_text(self.results.table(), encoding="utf-8")


def ended_as(
    command: list[str], output: int, limit_s: float, environment: Mapping[str, str] | None = None
) -> str:
    """Return how *command* ended: its exit code, or that it was interrupted at the limit, and killed if that did not end it."""
    try:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=environment,
        )
    except OSError as error:
        return str(error)
    with suppress(subprocess.TimeoutExpired):
        return str(process.wait(limit_s))
    for number, words in ((signal.SIGINT, "interrupted"), (signal.SIGKILL, "killed")):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_S)
            return f"{words} after {limit_s:.0f} s"
    return f"was killed after {limit_s:.0f} s, and is still there"


def pytest_command(files: list[str], *more: str) -> list[str]:
    """Return the command that runs the tests marked `gpu` in *files*."""
    options = ["-m", "gpu", "-v", "-rA", "--color=no", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, *more, *files]


def machine(runner: StepRunner) -> None:
    """Write down the machine: its GPUs and the versions of all packages."""
    runner.run("nvidia-smi", ["nvidia-smi", "-q"], 60, must_pass=False)
    runner.run("packages", [sys.executable, "-m", "pip", "list", "--format=freeze"], 60, must_pass=False)
    runner.run("doctor", [sys.executable, "-m", "elasticflow", "doctor"], 120, must_pass=False)
    runner.write()


def tested(runner: StepRunner, file: str, limit_s: float) -> None:
    """Run the tests of *file*, and keep their outcomes and the records of their runs."""
    name = Path(file).stem
    with tempfile.TemporaryDirectory(prefix="elasticflow-") as folder:
        temporary = Path(folder) / "t"
        report = runner.out / f"{name}.xml"
        command = pytest_command([file], f"--basetemp={temporary}", f"--junitxml={report}")
        said = runner.run(name, command, limit_s)
        runner.results.outcomes |= {test: outcome.lower() for test, outcome in _OUTCOME.findall(said)}
        if report.exists():
            runner.results.told |= recorded(report)
        for run in _runs_in(temporary):
            where = str(run.relative_to(temporary))
            _keep(run, runner.out / "runs" / where)
            with suppress(Exception):  # a run without a snapshot has no final weights
                runner.results.digests[where] = _digest(run)
    runner.write()


def recorded(report: Path) -> dict[str, dict[str, str]]:
    """Return what each test of pytest's *report*, in JUnit's XML, has recorded, by its name."""
    found = {}
    for test in ET.parse(report).iter("testcase"):
        properties = {each.attrib["name"]: each.attrib["value"] for each in test.iter("property")}
        properties.pop("tier", None)  # of each test
        if properties:
            found[test.attrib["name"]] = properties
    return found


def recovered(runner: StepRunner, limit_s: float) -> None:
    """Kill the worker on the GPU ten times, with each model that can be imported."""
    only = [name for name in figures.names(("gpu",)) if not name.endswith(("slow", "thread"))]
    report = runner.out / "recovery.json"
    command = [
        sys.executable,
        "tests/measured/benchmarks/recovery.py",
        "--only",
        *only,
    ]
    runner.run("recovery", [*command, f"--seconds={limit_s:.0f}", f"--json={report}"], limit_s + 60)
    if report.exists():
        runner.results.tries = figures.from_json(json.loads(report.read_text()))
    runner.write()


def _runs_in(folder: Path) -> Iterator[Path]:
    """Yield the run folders below *folder*."""
    for path in sorted(folder.rglob("events.jsonl")):
        yield path.parent


def _keep(run: Path, there: Path) -> None:
    """Copy the records and logs of a run."""
    for pattern in _KEPT:
        for path in run.rglob(pattern):
            if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                copy = there / path.relative_to(run)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def _digest(run: Path) -> str:
    """Return a digest of every tensor of the newest snapshot."""
    digest = blake2b(digest_size=8)
    for key, data in sorted(tensors(RunFolder(run)).items()):
        digest.update(f"{key} {len(data)} ".encode() + data)
    return digest.hexdigest()


def facts() -> dict[str, str]:
    """Return what the results are bound to, by name."""
    import torch  # asked for its version alone: this process opens no device

    gpus = printed_by("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit() + (" and changes" if printed_by("git", "status", "--porcelain") else ""),
        "GPU": "; ".join(gpus) or "none",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "Python": sys.version.split()[0],
    }


def commit() -> str:
    """Return the short name of the checkout's commit."""
    return printed_by("git", "rev-parse", "--short", "HEAD") or "unknown"


def printed_by(
    *command: str, folder: Path = ROOT, environment: Mapping[str, str] | None = None, limit_s: float = 240
) -> str:
    """Return what *command* prints, in any case; nothing if there is no such program."""
    with suppress(OSError):
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            timeout=limit_s,
            check=False,
            text=True,
        ).stdout.strip()
    return ""


def main() -> int:
    """Test, measure, write the folder, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).with_name("results") / f"{datetime.now(UTC).date().isoformat()}-{commit()}"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--dry", action="store_true", help="collect the tests, and do nothing else")
    parser.add_argument("--seconds", type=float, default=_BUDGET_S, help="for all of it")
    options = parser.parse_args()
    if options.dry:
        return subprocess.run(
            pytest_command(list(TESTS), "--collect-only", "-q"), cwd=ROOT, check=False
        ).returncode
    options.out.mkdir(parents=True, exist_ok=True)
    runner = StepRunner(options.out.resolve(), Results(facts()), options.seconds)
    machine(runner)
    for file, limit_s in TESTS.items():
        try:
            tested(runner, file, limit_s)
        except Exception as error:  # noqa: BLE001  the machine is lent: the other steps are worth having
            runner.results.outcomes[file] = f"{type(error).__name__}: {error}"
            runner.write()
    recovered(runner, _RECOVERY_S)
    print(runner.results.table())
    return 0 if runner.results.is_good() else 1


if __name__ == "__main__":
    sys.exit(main())
