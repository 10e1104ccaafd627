"""Random kills of the scripts of examples/rungs on `elasticflow.join`: which sample was learned from how often, and in which steps.

    python -m tests.campaign.own_scripts [--kills 51]

The scripts run as they are, on a dataset whose samples are numbers and a model whose weights count them (`counting.py`). A killed
supervisor is followed by `resume`, with another number of workers. The table lies beside this file.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.campaign.counting import SAMPLES, SIZES
from tests.campaign.facts import head
from tests.end_to_end.harness import Project, Running, project_at, steps_of, tensors

JOB = "examples/rungs/rungs.toml"
EPOCHS, PAUSE, SEED = 20, 0.03, 7
VICTIMS = ("worker",) * 14 + ("agent",) * 2 + ("supervisor",)
TOLERANCE = 0.01  # of a sample: sums of single precision; one that is lost or repeated makes 1


@dataclass
class Found:
    """What one script came to."""

    steps: int
    kills: Counter[str] = field(default_factory=Counter)
    worlds: set[int] = field(default_factory=lambda: {2})
    problems: list[str] = field(default_factory=list)
    seen: tuple[float, float] = (0.0, 0.0)


def _steps(name: str) -> int:
    return EPOCHS * SAMPLES // SIZES[name]


def _start(project: Project, name: str, run_id: str, pause: float) -> Running:
    length = _steps(name) if name == "nanogpt" else EPOCHS
    return project.run(
        JOB, run_id, f'script.entry="examples/rungs/{name}_1.py"',
        f'script.args=["{length}", "--pause={pause}"]', 'snapshots.every="5 steps"', "restarts.budget=100",
        job="rungs",
    )  # fmt: skip


def _last_step(running: Running) -> int:
    return max(steps_of(running.run), default=0)


def _agent(running: Running) -> int | None:
    agents = [p.pid for p in running.tree() if "elasticflow.launcher.agent.main" in p.cmdline()]
    return agents[0] if agents else None


def _wait_for_steps(running: Running, beyond: int) -> bool:
    """Wait until training is past step *beyond*; False: the run has ended."""
    deadline = time.monotonic() + 120
    while running.process.poll() is None and time.monotonic() < deadline:
        if _last_step(running) > beyond:
            return True
        time.sleep(0.05)
    return False


def _kill(project: Project, running: Running, draw: random.Random, found: Found) -> Running:
    """Kill something; return the command that goes on."""
    victim = draw.choice(VICTIMS)
    if victim == "supervisor":
        os.kill(running.process.pid, signal.SIGKILL)
        running.process.wait()
        count = draw.choice((1, 2, 3))
        found.worlds.add(count)
        option = f"--set=nodes.nproc_per_node={count}"
        running = project.start("resume", running.run.run_id, option, run_id=running.run.run_id, job="rungs")
    else:
        workers = running.state().get("workers") or []
        pid = _agent(running) if victim == "agent" else draw.choice([w["pid"] for w in workers] or [None])
        if pid is None:
            return running
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it was being restarted
            return running
    found.kills[victim] += 1
    return running


def trial(name: str, kills: int, draw: random.Random) -> Found:
    """Return what a script comes to when it is killed so often."""
    found = Found(_steps(name))
    with tempfile.TemporaryDirectory() as path, project_at(Path(path)) as project:
        shutil.copy(Path(__file__).with_name("counting.py"), project.root / "examples/rungs/small.py")
        alone = _start(project, name, f"{name}-alone", 0)
        assert alone.end() == 0, alone.told()
        running = _start(project, name, f"{name}-killed", PAUSE)
        while sum(found.kills.values()) < kills and _wait_for_steps(
            running, _last_step(running) + draw.randrange(12)
        ):
            time.sleep(draw.random())
            running = _kill(project, running, draw, found)
            print(name, dict(found.kills), "after step", _last_step(running), file=sys.stderr, flush=True)
        if running.end() != 0:
            found.problems.append(f"exit code {running.process.returncode}: {running.told()[-2000:]}")
        _compare(alone, running, found)
    return found


def _compare(alone: Running, killed: Running, found: Found) -> None:
    expected, got = _arrays(alone), _arrays(killed)
    seen = got[next(key for key in got if key.endswith("seen"))]
    found.seen = float(seen.min()), float(seen.max())
    if np.abs(seen - EPOCHS).max() > TOLERANCE:
        found.problems.append(
            f"samples were learned from {seen.min()} to {seen.max()} times in {EPOCHS} epochs"
        )
    order = next(key for key in got if key.endswith("order"))
    if np.abs(got[order] - expected[order]).max() > TOLERANCE * found.steps:
        found.problems.append("samples were learned from in other steps")
    if steps_of(killed.run) != list(range(1, found.steps + 1)):
        found.problems.append("a step is missing in metrics.jsonl, or there twice")


def _arrays(running: Running) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]:
    found = {}
    for key, data in tensors(running.run).items():
        if key.endswith(("seen", "order")):
            found[key] = np.frombuffer(data, dtype=np.float32)
    return found


def main() -> int:
    """Write the table; return 1 if a sample was lost or repeated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=51)
    each = -(-parser.parse_args().kills // len(SIZES))
    facts, began = head(), time.monotonic()
    with ThreadPoolExecutor(len(SIZES)) as pool:  # they mostly wait
        trials = {name: pool.submit(trial, name, each, random.Random(f"{SEED} {name}")) for name in SIZES}
    results = {name: future.result() for name, future in trials.items()}
    total = sum((found.kills for found in results.values()), Counter[str]())
    rows = [
        f"| {name}_1.py | {found.steps} | {found.kills['worker']} | {found.kills['agent']} | {found.kills['supervisor']} "
        f"| {', '.join(map(str, sorted(found.worlds)))} | {found.seen[0]:.4f} to {found.seen[1]:.4f} "
        f"| {'; '.join(found.problems) or 'none lost, none repeated'} |"
        for name, found in results.items()
    ]
    minutes, load = (time.monotonic() - began) / 60, os.getloadavg()[2]
    kills = f"{sum(total.values())} kills by SIGKILL in {minutes:.0f} min, seed {SEED}."
    machine = f"{facts['cores']} cores under other work (load {load:.0f}), commit {facts['commit']}"
    lines = [
        "# Random kills of scripts with a loop of their own",
        "",
        f"{facts['date']}, {facts['facts']}, {machine}; {kills}",
        "",
        f"The scripts of `examples/rungs` on `elasticflow.join` (rung 1), {SAMPLES} samples, {EPOCHS} epochs, a snapshot every 5 steps. A weight",
        f"of the model counts how often its sample was learned from ({EPOCHS} times, to {TOLERANCE}), a state of the optimizer adds up the numbers of",
        "the steps that had it (those of an undisturbed run), and metrics.jsonl has each step once. A killed supervisor is followed by",
        "`resume` with 1, 2 or 3 workers.",
        "",
        "| script | steps | workers killed | agents | supervisors | numbers of workers | times a sample was learned from | samples |",
        "|---|---:|---:|---:|---:|---|---|---|",
        *rows,
        "",
        "Again: `python -m tests.campaign.own_scripts`",
    ]
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(any(found.problems for found in results.values()) or sum(total.values()) < 50)


if __name__ == "__main__":
    sys.exit(main())
