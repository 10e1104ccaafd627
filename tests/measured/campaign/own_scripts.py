"""Random kills of eight forms of loop on `elasticflow.join`: which sample was learned from how often, and which bits are left.

    python -m tests.measured.campaign.own_scripts [--kills 100] [--seed 29]

Each form of `tests/runtime/programs/loop_forms.py` runs under `elasticflow run`, under torchrun and by plain python, on 1 to 4
ranks; every process of it is killed at random moments, its start included, and what has ended is started again, with another
number of ranks in half of the trials. The table lies beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from elasticflow.run_folder import RunFolder
from tests.end_to_end.harness import steps_of
from tests.forked import ROOT, ForkedPrograms
from tests.measured.campaign.facts import head
from tests.runtime.conftest import Group

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = ROOT / "tests/runtime/programs/loop_forms.py"
# Steps, and how often each sample is learned from: in all, as the form's steps say.
FORMS = {
    "epochs": (75, 150 * 8),
    "phases": (67, 100 * 4 + 100 * 6),
    "trainer": (75, 150 * 8),
    "accumulation": (75, 150 * 8),
    "gan": (75, 150 * 8),
    "scaler": (75, 150 * 8 - 3 * 16),
    "own_data": (96, 144 * 8),
    "early_stopping": (40, 150 * 4),
}
PAUSE_S, LIMIT_S = 0.05, 300.0
# A step later; of which another order than in a quiet run would make at least 1.
TOLERANCE = 0.01
MARK = "OWN_SCRIPTS_TRIAL"
VICTIMS = {
    "elasticflow run": ("worker",) * 6 + ("agent", "supervisor", "supervisor", "helper"),
    "torchrun": ("worker",) * 4 + ("launcher", "node", "helper"),
    "python": ("worker",) * 5 + ("helper",),
}
# What is certain to be killed where the number of ranks is to change: all that runs ends with it.
ENDS_ALL = {"elasticflow run": "supervisor", "torchrun": "node", "python": "worker"}
JOB = """
[job]
name = "forms"
seed = 11
[script]
entry = "loop_forms.py"
args = ["{form}", "--pause={pause}", "--told=told"]
[nodes]
nproc_per_node = {ranks}
[snapshots]
every = "7 steps"
[restarts]
budget = 100
"""


@dataclass
class Trial:
    """A form of loop under a launcher, killed a few times.

    Attributes:
        kills: By what was killed.
        ranks: Numbers of ranks that it ran with.
        starts: Commands that were started.
        problems: Sentences; none: the run came out right.
    """

    form: str
    launcher: str
    first: int
    resizes: bool
    kills_planned: int
    draw: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    ranks: list[int] = field(default_factory=list)
    starts: int = 0
    problems: list[str] = field(default_factory=list)


class Started:
    """A trial's run, and the command that runs it now."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.folder = trial, folder
        (folder / "told").mkdir(parents=True)
        shutil.copy(PROGRAM, folder)
        (folder / "pyproject.toml").write_text('[project]\nname = "forms"\nversion = "0"\n')
        self.is_job = trial.launcher == "elasticflow run"
        self.run = RunFolder(folder / "runs/forms" / ("killed" if self.is_job else "by-hand"))
        self.process: subprocess.Popen[bytes]
        self.start(trial.first)

    def start(self, ranks: int) -> None:
        """Start the run, or continue with it."""
        trial = self.trial
        trial.ranks.append(ranks)
        trial.starts += 1
        program = ["loop_forms.py", trial.form, f"--pause={PAUSE_S}", "--told=told"]
        if trial.launcher == "python":
            command = program
        elif trial.launcher == "torchrun":
            options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=100"]
            command = ["-m", "torch.distributed.run", *options, *program]
        elif self.run.state.exists():
            command = ["-m", "elasticflow", "resume", "killed", f"--set=nodes.nproc_per_node={ranks}"]
        else:
            (self.folder / "job.toml").write_text(
                JOB.format(form=trial.form, pause=PAUSE_S, ranks=ranks), encoding="utf-8"
            )
            command = ["-m", "elasticflow", "run", "job.toml", "--run-id=killed"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", MARK: str(self.folder)}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command], cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> Path:
        """What all commands of the run printed."""
        return self.folder / "output.txt"

    @property
    def last_step(self) -> int:
        """The step that was begun last."""
        with suppress(FileNotFoundError):
            return int((self.folder / "told/steps").read_text().rpartition("\n")[0].rpartition("\n")[2] or 0)
        return 0

    def processes(self) -> Iterator[tuple[psutil.Process, str]]:
        """Yield each living process of the run, and what it is."""
        workers = {worker["pid"] for worker in self._state().get("workers") or ()} if self.is_job else set()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == str(self.folder) and process.status() != "zombie":
                    yield process, self._kind(process, workers)

    def kill(self, victim: str) -> bool:
        """Kill a process of that kind, or all of them; return False if there is none now."""
        found = [(process, kind) for process, kind in self.processes()]
        chosen = [process for process, kind in found if victim in (kind, "node")]
        if victim == "node":
            # The launcher first: it would start workers again.
            chosen.sort(key=lambda process: process.pid != self.process.pid)
        elif chosen:
            chosen = [self.trial.draw.choice(chosen)]
        killed = False
        for process in chosen:
            with suppress(psutil.Error):
                process.kill()
                killed = True
        return killed

    def _kind(self, process: psutil.Process, workers: set[int]) -> str:
        words = process.cmdline()
        if process.pid == self.process.pid:
            return {"elasticflow run": "supervisor", "torchrun": "launcher", "python": "worker"}[
                self.trial.launcher
            ]
        if "elasticflow.launcher.agent.main" in words:
            return "agent"
        return "worker" if process.pid in workers or "loop_forms.py" in words else "helper"

    def _state(self) -> dict[str, Any]:
        with suppress(FileNotFoundError, ValueError):
            found: dict[str, Any] = json.loads(self.run.state.read_text())
            return found
        return {}


def disturb(run: Started) -> None:
    """Kill what the trial plans, and start again what has ended, until the run has finished."""
    trial, draw = run.trial, run.trial.draw
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        is_over = run.process.poll() is not None
        if is_over and run.process.returncode == 0:
            return
        if is_over:
            if trial.starts > 3 * trial.kills_planned + 3:
                trial.problems.append(f"does not continue: exit code {run.process.returncode}")
                return
            changes = trial.resizes and trial.launcher != "python"
            others = [number for number in (1, 2, 3, 4) if number != trial.ranks[-1]]
            run.start(draw.choice(others) if changes else trial.first)
        if trial.kills.total() >= trial.kills_planned:
            time.sleep(0.1)
            continue
        wait(run, draw, deadline)
        victim = draw.choice(VICTIMS[trial.launcher])
        if trial.resizes and not trial.kills:
            victim = ENDS_ALL[trial.launcher]
        if run.process.poll() is None and run.kill(victim):
            trial.kills[victim] += 1
            print(trial.form, trial.launcher, victim, "in step", run.last_step, file=sys.stderr, flush=True)
            if victim in ("supervisor", "launcher", "node") or trial.launcher == "python":
                with suppress(subprocess.TimeoutExpired):
                    run.process.wait(10)
    trial.problems.append(f"not finished after {LIMIT_S:.0f} s")


def wait(run: Started, draw: random.Random, deadline: float) -> None:
    """Wait until some steps were made, or, in three cases of ten, for a time that may end before training begins."""
    if draw.random() < 0.3:
        time.sleep(draw.uniform(0.2, 6.0))
        return
    beyond = run.last_step + draw.randrange(1, 25)
    lowest = run.last_step
    while run.process.poll() is None and time.monotonic() < deadline:
        # A run that has gone back to a snapshot makes steps again.
        step = run.last_step
        if step < lowest:
            beyond, lowest = beyond - lowest + step, step
        if step >= beyond:
            break
        time.sleep(0.05)
    time.sleep(draw.uniform(0.0, 0.3))


def arrays(run: RunFolder, folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the newest snapshot, verified."""
    group = Group(folder, None)  # type: ignore[arg-type]  # which starts nothing
    group.folder = run
    tensors = group.newest().tensors
    return {key: tensors[key].clone() for key in tensors}


def compare(run: Started, quiet: dict[int, tuple[dict[str, torch.Tensor], str]]) -> None:
    """Compare what the run came to with quiet runs, by number of ranks."""
    trial = run.trial
    steps, samples = FORMS[trial.form]
    ends = {path.name: path.read_text() for path in sorted((run.folder / "told").glob("rank-*"))}
    if len(set(ends.values())) != 1:
        trial.problems.append(f"ranks ended with different states: {ends}")
    got = arrays(run.run, run.folder)
    is_same = not trial.resizes
    expected, end = quiet[trial.first if is_same else 1]
    for key, tensor in got.items():
        if key.endswith(("seen", "order")) and (tensor - expected[key]).abs().max() > TOLERANCE:
            trial.problems.append(f"{key} differs by up to {float((tensor - expected[key]).abs().max()):.2f}")
        if key.endswith("/seen") and abs(float(tensor.sum()) - samples) > TOLERANCE:
            trial.problems.append(f"{key} counts {float(tensor.sum()):.2f} samples, and not {samples}")
    if is_same:
        others = [key for key in expected if not torch.equal(expected[key], got[key])]
        if others or {*ends.values()} != {end}:
            trial.problems.append(f"other bits than a quiet run on {trial.first} ranks: {others[:3]}")
    if run.is_job and steps_of(run.run) != list(range(1, steps + 1)):
        trial.problems.append("a step is missing in metrics.jsonl, or there twice")
    if next(iter(ends.values()), "").split()[:1] != [str(steps)]:
        trial.problems.append(f"ended after step {ends}, and not {steps}")


def conduct(trial: Trial, quiet: dict[int, tuple[dict[str, torch.Tensor], str]], root: Path) -> Trial:
    """Run a trial; its folder stays if it has problems."""
    name = f"{trial.form}-{trial.launcher.replace(' ', '-')}-{'resized' if trial.resizes else 'same'}"
    run = Started(trial, root / name)
    try:
        disturb(run)
        if not trial.problems:
            compare(run, quiet)
    except Exception as error:  # noqa: BLE001  # the other trials continue, and the table says it
        trial.problems.append(f"{type(error).__name__}: {error}")
    finally:
        for process, _ in run.processes():
            with suppress(psutil.Error):
                process.kill()
        run.process.wait()
    print(
        name,
        trial.first,
        dict(trial.kills),
        trial.ranks,
        trial.problems or "right",
        file=sys.stderr,
        flush=True,
    )
    if not trial.problems:
        shutil.rmtree(run.folder)
    return trial


def quiet_run(
    programs: ForkedPrograms, form: str, ranks: int, root: Path
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors that an undisturbed run ends with, and what its ranks told."""
    folder = root / f"quiet-{form}-{ranks}"
    (folder / "told").mkdir(parents=True)
    group = Group(folder / "run", programs, PROGRAM)
    ended = group.run(ranks, form, "--told", str(folder / "told"))
    assert ended.codes == [0] * ranks, ended.errors
    ends = {(folder / f"told/rank-{rank}").read_text() for rank in range(ranks)}
    assert len(ends) == 1, f"ranks of an undisturbed run ended with different states: {ends}"
    return arrays(group.folder, folder), ends.pop()


def planned(seed: int, kills: int) -> list[Trial]:
    """Return the trials of a campaign."""
    plans = []
    for number, form in enumerate(FORMS):
        ranks = 2 + number % 3
        plans += [
            (form, "elasticflow run", ranks, False, 4),
            (form, "elasticflow run", ranks, True, 3),
            (form, "torchrun", 2 + (number + 1) % 3, False, 3),
            (form, "torchrun", 2 + (number + 2) % 3, True, 2),
            (form, "python", 1, False, 3),
        ]
    share = kills / 100
    return [
        Trial(*plan[:4], max(1, round(plan[4] * share)), random.Random(f"{seed} {plan}")) for plan in plans
    ]


def table(trials: list[Trial], facts: dict[str, Any], minutes: float, seed: int) -> list[str]:
    """Return the lines of the table."""
    total = sum((trial.kills for trial in trials), Counter[str]())
    listed = ", ".join(f"{number} {kind}s" for kind, number in sorted(total.items()))
    machine = (
        f"{facts['cores']} cores under other work (load {os.getloadavg()[2]:.0f}), commit {facts['commit']}"
    )
    lines = [
        "# Random kills of scripts with a loop of their own",
        "",
        f"{facts['date']}, {facts['facts']}, {machine}; {total.total()} kills by SIGKILL in {minutes:.0f} min, seed {seed}:",
        f"{listed} (a node: torchrun and all that it started).",
        "",
        "Eight forms of loop (`tests/runtime/programs/loop_forms.py`), a snapshot every 7 steps. A weight of the model counts how often its",
        "sample was learned from, a state of the optimizer adds up the numbers of the updates that had it; a layer has dropout and",
        "momentum. `same`: at the end every tensor has the bits of an undisturbed run on as many ranks. `resized`: it continued with other",
        "numbers of ranks; the counts and the sums of update numbers are compared, to 0.01. Always: the ranks end with equal states, and",
        "under `elasticflow run` metrics.jsonl has each step once. Three kills of ten come at a moment that may lie before training.",
        "",
        "| form | started by | ranks | killed | starts | came out |",
        "|---|---|---|---|---:|---|",
    ]
    for trial in trials:
        killed = ", ".join(f"{kind} {number}" for kind, number in sorted(trial.kills.items())) or "none"
        right = "counts equal (resized)" if trial.resizes else "bits equal (same)"
        ranks = ", ".join(map(str, dict.fromkeys(trial.ranks)))
        came = "; ".join(trial.problems) or right
        lines.append(f"| {trial.form} | {trial.launcher} | {ranks} | {killed} | {trial.starts} | {came} |")
    return [*lines, "", "Again: `python -m tests.measured.campaign.own_scripts`"]


def main() -> int:
    """Write the table; return 1 if a run came out wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--form", choices=FORMS, help="only this form; no table is written")
    parser.add_argument("--launcher", choices=VICTIMS, help="only under it; no table is written")
    options = parser.parse_args()
    facts, began = head(), time.monotonic()
    trials = [
        trial
        for trial in planned(options.seed, options.kills)
        if options.form in (None, trial.form) and options.launcher in (None, trial.launcher)
    ]
    root = Path(tempfile.mkdtemp(prefix="own_scripts-"))
    programs = ForkedPrograms(root)
    quiet: dict[str, dict[int, Any]] = {form: {} for form in FORMS}
    for form, ranks in sorted({(t.form, n) for t in trials for n in (1, t.first) if n == 1 or not t.resizes}):
        quiet[form][ranks] = quiet_run(programs, form, ranks, root)
    programs.close()
    print("undisturbed runs are done", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(3) as pool:  # they mostly wait
        list(pool.map(lambda trial: conduct(trial, quiet[trial.form], root), trials))
    lines = table(trials, facts, (time.monotonic() - began) / 60, options.seed)
    if options.form or options.launcher:
        print("\n".join(lines))
    else:
        Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    wrong = [trial for trial in trials if trial.problems]
    if not wrong:
        shutil.rmtree(root)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
