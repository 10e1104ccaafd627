"""What standbys cost a job that trains: the time of its steps with and without them.

    python tests/measured/benchmarks/standby_cost.py [--pairs 5]

Two workers train on the digits; in each pair one launch has a standby for each worker, the other has none. The steps
that are compared begin once the standbys are ready. Two launches differ by more than standbys cost, so the bound is on the CPU
time that standbys take meanwhile. Their memory is what they told.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# The path comes first.
from elasticflow import events
from tests.end_to_end.harness import named, project_at, read_lines
from tests.measured.benchmarks.recovery_ours import JOB, job_text

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

_WORKERS, _STEPS, _BOUND = 2, 1000, 0.01


class Cost(NamedTuple):
    """What a launch's steps took.

    Attributes:
        step_s: Mean seconds of a step.
        cpu_share: CPU time of the standbys in that time, as a share of one core's; None without standbys.
        memory: Bytes that one standby holds for itself.
    """

    step_s: float
    cpu_share: float | None = None
    memory: int = 0


def cost(project: Project, warm: str) -> Cost:
    """Return what the steps of a launch took, beside standbys or not."""
    project.write("jobs/recovery.toml", job_text("examples.mnist", _WORKERS, warm=warm))
    running = project.run("jobs/recovery.toml", secrets.token_hex(4), job=JOB)
    try:
        running.wait_for_step(200)
        ready = running.wait_for("standbys", lambda: _ready(running)) if warm == "standby" else {}
        standbys = [psutil.Process(pid) for pid in ready.get("pids", ())]
        first = running.wait_for_step(int(running.state()["step"]) + 1)
        before = _cpu(standbys), time.monotonic()
        running.wait_for_step(first + _STEPS)
        share = (_cpu(standbys) - before[0]) / (time.monotonic() - before[1])
        rows = {row["step"]: row["time"] for row in read_lines(running.run.metrics)}
    finally:
        running.process.kill()
        running.process.wait()
    step_s = (rows[first + _STEPS] - rows[first]) / _STEPS
    return Cost(step_s, share, int(ready["memory"])) if standbys else Cost(step_s)


def _cpu(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _ready(running: Running) -> dict[str, Any]:
    ready = named(running.events(), events.STANDBYS_READY)
    return ready[-1] if ready else {}


def main() -> int:
    """Make the pairs, print what came of them, and return 1 if standbys take over 1 % of a core."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    ratios, beside = [], []
    with tempfile.TemporaryDirectory() as folder, project_at(Path(folder) / "project") as project:
        for number in range(options.pairs):
            order = ("standby", "fork") if number % 2 else ("fork", "standby")
            found = {warm: cost(project, warm) for warm in order}
            beside.append(found["standby"])
            ratios.append(found["standby"].step_s / found["fork"].step_s)
            milliseconds = ", ".join(f"{warm} {found[warm].step_s * 1000:.2f} ms" for warm in order)
            print(f"{milliseconds}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    share = statistics.median(each.cpu_share or 0.0 for each in beside)
    ratio = statistics.median(ratios)
    print(f"a step beside standbys takes {ratio:.3f} times as long ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"standbys take {share:.3%} of a core, and {beside[0].memory / 1e6:.0f} MB each of their own")
    print(f"{'kept' if share <= _BOUND else 'BROKEN'}: at most {_BOUND:.0%} of a core")
    return 0 if share <= _BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
