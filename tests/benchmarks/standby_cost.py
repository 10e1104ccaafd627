"""What standbys cost a job that trains: the time of its steps with and without them.

    python tests/benchmarks/standby_cost.py [--pairs 5]

Two workers train on the digits; in each pair one launch has a standby for each worker, the other has none. The steps
that are compared begin once the standbys are ready. Their memory is what they told.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# The path comes first.
from elasticflow import events
from tests.benchmarks.recovery_ours import JOB, job_text
from tests.end_to_end.harness import named, project_at, read_lines

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

_WORKERS, _STEPS, _BOUND = 2, 1000, 1.01


def step_time(project: Project, warm: str) -> tuple[float, list[int]]:
    """Return the median seconds of a step, and the bytes that standbys hold, if there are any."""
    project.write("jobs/recovery.toml", job_text("examples.mnist", _WORKERS, warm=warm))
    running = project.run("jobs/recovery.toml", secrets.token_hex(4), job=JOB)
    try:
        memory: list[int] = []
        first = running.wait_for_step(200)
        if warm == "standby":
            memory = running.wait_for("standbys", lambda: _ready(running))
            first = running.wait_for_step(first)
        running.wait_for_step(first + _STEPS)
    finally:
        running.process.kill()
        running.process.wait()
    steps = [row for row in read_lines(running.run.metrics) if first <= row["step"] <= first + _STEPS]
    seconds = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    return statistics.median(seconds), memory


def _ready(running: Running) -> list[int]:
    ready = named(running.events(), events.STANDBYS_READY)
    return [ready[-1]["memory"]] if ready else []


def main() -> int:
    """Make the pairs, print the table, and return 1 if steps take over 1 % longer beside standbys."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    ratios, sizes = [], []
    with tempfile.TemporaryDirectory() as folder, project_at(Path(folder) / "project") as project:
        for number in range(options.pairs):
            order = ("standby", "fork") if number % 2 else ("fork", "standby")
            found = {warm: step_time(project, warm) for warm in order}
            ratios.append(found["standby"][0] / found["fork"][0])
            sizes += found["standby"][1]
            milliseconds = ", ".join(f"{warm} {found[warm][0] * 1000:.2f} ms" for warm in order)
            print(f"{milliseconds}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    ratio = statistics.median(ratios)
    print(f"a step beside standbys takes {ratio:.3f} times as long ({min(ratios):.3f} to {max(ratios):.3f})")
    print(f"standbys hold {statistics.median(sizes) / 1e6:.0f} MB of their own")
    print(f"{'kept' if ratio <= _BOUND else 'BROKEN'}: at most {_BOUND} times")
    return 0 if ratio <= _BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
