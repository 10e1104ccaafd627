"""Kill workers a hundred times in one exact job whose imports people have, and write down what came of it.

By hand, with the packages that its model imports: `python -m tests.measured.campaign.standbys [--model transformers] [--kills 100]`.
The table lies beside this file.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import psutil

from elasticflow import events
from tests.end_to_end.harness import named, project_at, steps_of, tensors
from tests.measured.benchmarks.recovery_models import MODELS, module_of
from tests.measured.benchmarks.recovery_ours import JOB, first_step, job_text
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

TABLE = Path(__file__).with_name("standbys.md")
SEED = 20261122
WORKERS, END_S = 2, 1800.0
# Seconds that training continues before a kill; now and then a standby is killed, too.
LONGEST_S, STANDBY_SHARE = 2.0, 0.2


@dataclass(frozen=True)
class Look:
    """What there was of the run before a kill, but for its workers and their standbys.

    Attributes:
        kills: Kills before.
        processes: Supervisor, agent, fork server, snapshot writer.
        memory: Bytes that these hold for themselves.
        handles: Files that they have open.
    """

    kills: int
    processes: int
    memory: int
    handles: int


@dataclass(frozen=True)
class Disturbed:
    """What came of the kills.

    Attributes:
        seconds: From each kill to the first step after it.
        standbys_killed: How many.
        looks: On the way.
        problems: What should not have happened.
    """

    seconds: list[float]
    standbys_killed: int
    looks: list[Look]
    problems: list[str]


def write_job(project: Project, model: str, steps: int, warm: str) -> None:
    """Write the job: exact, so that its bits can be compared; *warm* is its `restarts.warm`."""
    source = MODELS[model].text
    if source is not None:
        project.write(f"{module_of(model).replace('.', '/')}.py", source)
    exact = f'consistency = "exact"\nvirtual_shards = {WORKERS}'
    text = job_text(module_of(model), WORKERS, train=exact, warm=warm, steps=steps)
    project.write("jobs/recovery.toml", text)


def disturb(running: Running, kills: int) -> Disturbed:
    """Kill workers of a run that lasts long enough, one after the other, each after the first step since the last kill."""
    draw = random.Random(SEED)
    seconds, looks, standbys_killed = list[float](), list[Look](), 0
    generation = running.wait_for_group(WORKERS, 0)
    while len(seconds) < kills:
        time.sleep(draw.uniform(0.0, LONGEST_S))
        if len(seconds) % 10 == 0:
            looks.append(_look(running, len(seconds)))
        standbys = _standbys(running)
        if standbys and draw.random() < STANDBY_SHARE:
            with suppress(ProcessLookupError):  # it has become a worker
                os.kill(draw.choice(standbys), signal.SIGKILL)
                standbys_killed += 1
        killed = time.time()
        os.kill(running.pid_of(draw.randrange(WORKERS)), signal.SIGKILL)
        at = running.wait_for("a step", partial(first_step, running, generation))
        seconds.append(at - killed)
        generation = running.state()["generation"]
    looks.append(_look(running, kills))
    return Disturbed(seconds, standbys_killed, looks, [])


def _look(running: Running, kills: int) -> Look:
    apart = {worker["pid"] for worker in running.state().get("workers", ())} | set(_standbys(running))
    processes = [process for process in running.tree() if process.pid not in apart]
    memory = handles = 0
    for process in processes:
        with suppress(psutil.Error):
            memory += process.memory_full_info().uss
            handles += process.num_fds()
    return Look(kills, len(processes), memory, handles)


def _standbys(running: Running) -> list[int]:
    """Return the newest standbys; some may have become workers."""
    ready = named(running.events(), events.STANDBYS_READY)
    return list(ready[-1]["pids"]) if ready else []


def table(model: str, warm: str, came: Disturbed, *, is_same: bool, took_s: float) -> str:
    """Return the table as Markdown."""
    found = head()
    seconds = sorted(came.seconds)
    ran = f'one exact run of {WORKERS} workers, restarts.warm = "{warm}", {took_s:.0f} s'
    lines = [
        f"# A job with {MODELS[model].words}, its workers killed {len(seconds)} times",
        "",
        f"{found['date']}, {found['facts']}, {found['cores']} cores, commit {found['commit']}; {ran}.",
        f"{came.standbys_killed} standbys were killed as well.",
        "",
        f"- the weights, bit for bit those of an undisturbed run: {'yes' if is_same else 'NO'}",
        f"- kill to first step: {median(seconds):.2f} s, {seconds[0]:.2f} to {seconds[-1]:.2f}",
        *(f"- {problem}" for problem in came.problems),
        "",
        "What there was besides workers and standbys:",
        "",
        "| kills | processes | memory of their own | open files |",
        "|---:|---:|---:|---:|",
        *(
            f"| {each.kills} | {each.processes} | {each.memory / 1e6:.0f} MB | {each.handles} |"
            for each in came.looks
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Train undisturbed, then disturbed; write the table; return 1 if the bits differ or something is left behind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", choices=[name for name, model in MODELS.items() if not model.missing], required=True
    )
    parser.add_argument("--warm", choices=("auto", "fork", "standby", "off"), default="auto")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=6000, help="of the job: enough for all kills")
    parser.add_argument("--add", action="store_true", help="below the tables that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, project_at(Path(folder) / "project") as project:
        write_job(project, options.model, options.steps, options.warm)
        undisturbed = project.run("jobs/recovery.toml", "undisturbed", job=JOB)
        assert undisturbed.end(END_S) == 0, undisturbed.told()
        began = time.monotonic()
        running = project.run("jobs/recovery.toml", "disturbed", job=JOB)
        came = disturb(running, options.kills)
        assert running.end(END_S) == 0, running.told()
        is_same = tensors(undisturbed.run) == tensors(running.run)
        if steps_of(undisturbed.run) != steps_of(running.run):
            came.problems.append("STEPS are missing, or there twice")
        text = table(options.model, options.warm, came, is_same=is_same, took_s=time.monotonic() - began)
    # Leaving the project has looked whether anything was left behind.
    before = TABLE.read_text(encoding="utf-8") if options.add and TABLE.exists() else ""
    TABLE.write_text(f"{before}\n{text}" if before else text, encoding="utf-8")
    print(text)
    return 0 if is_same and not came.problems else 1


if __name__ == "__main__":
    sys.exit(main())
