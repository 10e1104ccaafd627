"""What it costs to watch a run: CPU time of a step with everything on, and a report of a million steps.

    python tests/measured/benchmarks/observe.py [--pairs 5] [--steps 1000] [--long 1000000]

jobs/mnist.toml is trained in pairs of launches. With everything on, a line is written of each step, a terminal of 100 columns shows
the live view, and two sinks are sent to (TensorBoard and Prometheus's textfile). With everything off a line is written every 1,000 steps,
nothing is shown, and there are no sinks. CPU time (user and system) of so many steps is read from the processes of each launch:

* **observers**: supervisor, agent and the process of the sinks. The bound is on what they take more with everything on, as a share of
  the workers' CPU time with everything off: medians over the pairs.
* **workers**: what they take more, which writing and flushing a line each step is part of. Two launches differ by more than that costs
  (`overhead.py` measures it inside of one), so it is stated with its range and has no bound.

The report is made of a run whose metrics.jsonl is continued to a million steps: the whole process' time, and the page's size.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# The path comes first.
from elasticflow.run_folder import RunFolder
from tests.end_to_end.harness import project_at, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.end_to_end.harness import Project

MOST_SHARE, MOST_REPORT_S, MOST_REPORT_BYTES = 0.02, 10.0, 3_000_000
LONG = "train.epochs=100000"
ON = (LONG, 'logging.every="1 step"', 'logging.sinks=["tensorboard", "prometheus"]')
OFF = (LONG, 'logging.every="1000 steps"')
_WARM_STEPS, _LIMIT_S = 300, 300.0
_AGENT, _SINKS = "elasticflow.launcher.agent", "elasticflow.sinks"


class Cost(NamedTuple):
    """CPU seconds of a step, by who takes them."""

    supervisor: float
    agent: float
    sinks: float
    workers: float

    @property
    def observers(self) -> float:
        """Of all but the workers."""
        return self.supervisor + self.agent + self.sinks


@contextmanager
def launch(project: Project, settings: tuple[str, ...], *, is_shown: bool) -> Iterator[tuple[int, RunFolder]]:
    """Yield the supervisor's process id and the run's folder; the run is ended afterwards.

    Args:
        project: Where it runs.
        settings: Of `--set`.
        is_shown: On a terminal; else nowhere.
    """
    run_id = secrets.token_hex(4)
    sets = [f"--set={text}" for text in settings]
    command = [sys.executable, "-m", "elasticflow", "run", "jobs/mnist.toml", f"--run-id={run_id}", *sets]
    ours, theirs = pty.openpty() if is_shown else (None, os.open(os.devnull, os.O_RDWR))
    variables = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, cwd=project.root, env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    if ours is not None:
        threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    try:
        yield process.pid, RunFolder(project.root / "runs" / "mnist" / run_id)
    finally:
        process.terminate()
        process.wait(60)


def _drain(descriptor: int) -> None:
    with suppress(OSError):  # the terminal is gone
        while os.read(descriptor, 1 << 16):
            pass


def cost(project: Project, settings: tuple[str, ...], steps: int, *, is_shown: bool) -> Cost:
    """Return what *steps* of a launch took."""
    with launch(project, settings, is_shown=is_shown) as (pid, run):
        first = _step_after(run, _WARM_STEPS)
        before = _seconds(pid, run)
        last = _step_after(run, first + steps)
        after = _seconds(pid, run)
    return Cost(*((b - a) / (last - first) for a, b in zip(before, after, strict=True)))


def _step_after(run: RunFolder, step: int) -> int:
    """Return the step that state.json tells once it is at least *step*."""
    deadline = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            now = int(json.loads(run.state.read_text()).get("step") or 0)
            if now >= step:
                return now
        time.sleep(0.02)
    raise TimeoutError(f"step {step} was not reached")


def _seconds(pid: int, run: RunFolder) -> Cost:
    """Return the CPU seconds so far of the processes of a launch."""
    workers = [psutil.Process(worker["pid"]) for worker in json.loads(run.state.read_text())["workers"]]
    supervisor = psutil.Process(pid)
    below = {process: " ".join(process.cmdline()) for process in supervisor.children(recursive=True)}
    return Cost(
        _cpu([supervisor]),
        _cpu([process for process, command in below.items() if _AGENT in command]),
        _cpu([process for process, command in below.items() if _SINKS in command]),
        _cpu(workers),
    )


def _cpu(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def report(project: Project, steps: int) -> tuple[float, int]:
    """Return the seconds that a report of so many steps takes, and its bytes."""
    with launch(project, (LONG,), is_shown=False) as (_, run):
        _step_after(run, 100)
    rows = [row for row in read_lines(run.metrics) if "loss" in row]
    with run.metrics.open("w", encoding="utf-8") as file:
        for number in range(1, steps + 1):
            file.write(json.dumps(_continued(rows[number % len(rows)], number, rows[0]["time"])) + "\n")
    page = project.root / "report.html"
    began = time.monotonic()
    command = [sys.executable, "-m", "elasticflow", "report", run.run_id, "-o", str(page)]
    subprocess.run(command, cwd=project.root, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began, page.stat().st_size


def _continued(row: Mapping[str, object], step: int, began: float) -> dict[str, object]:
    return {**row, "step": step, "time": round(began + 0.01 * step, 3)}


def main() -> int:
    """Make the pairs and the report, print what came of them, and return 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000, help="that are compared")
    parser.add_argument("--long", type=int, default=1_000_000, help="steps of the report")
    options = parser.parse_args()
    pairs: list[tuple[Cost, Cost]] = []
    with tempfile.TemporaryDirectory() as folder, project_at(Path(folder) / "project") as project:
        for number in range(options.pairs):
            order = (ON, OFF) if number % 2 else (OFF, ON)
            made = {each: cost(project, each, options.steps, is_shown=each is ON) for each in order}
            pairs.append((made[ON], made[OFF]))
            for each, name in ((made[ON], "on"), (made[OFF], "off")):
                parts = ", ".join(f"{part} {seconds * 1e6:.0f}" for part, seconds in each._asdict().items())
                print(f"everything {name}, us a step: {parts}", file=sys.stderr, flush=True)
        seconds, size = report(project, options.long)
    shares = [(on.observers - off.observers) / off.workers for on, off in pairs]
    workers = [on.workers / off.workers - 1 for on, off in pairs]
    share = statistics.median(shares)
    kept = share <= MOST_SHARE and seconds <= MOST_REPORT_S and size <= MOST_REPORT_BYTES
    print(
        f"supervisor, agent and sinks take {share:.2%} of a step's CPU time ({min(shares):.2%} to {max(shares):.2%})"
    )
    print(f"workers take {statistics.median(workers):+.1%} ({min(workers):+.1%} to {max(workers):+.1%})")
    print(f"a report of {options.long:,} steps takes {seconds:.1f} s and {size / 1e6:.2f} MB")
    print(
        f"{'kept' if kept else 'BROKEN'}: at most {MOST_SHARE:.0%}, {MOST_REPORT_S:.0f} s and {MOST_REPORT_BYTES // 10**6} MB"
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
