"""Kill workers, agents and nodes of runs that hold their state in memory by default, and count the steps that are done again.

By hand, as root, with iproute2: `python -m tests.measured.campaign.memory`, or a part of it with `--only`. The table lies beside this
file; results are kept as they come, so that a part may be done by and by. Nodes that are lost are network namespaces on one switch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil

from elasticflow import events
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end import tiny_job
from tests.end_to_end import trajectory_jobs as jobs
from tests.end_to_end.disturbed import MODULES, Series
from tests.end_to_end.harness import named, project_at, steps_of, tensors, wait_gone
from tests.hosts import Hosts, ip_pids
from tests.measured.campaign.facts import head
from tests.measured.campaign.hosts import Run

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

SEED = 20261127
TABLE = Path(__file__).with_name("memory.md")
RESULTS = Path(tempfile.gettempdir()) / "elasticflow-memory.jsonl"
# Steps of a run whose workers are killed, and of another whose nodes are lost.
STEPS, LOSING_STEPS = 600, 1500
EVERY, BUDGET = 500, 1000
PAUSE_S = "0.05"
KILLS_OF_A_RUN, LOSSES_OF_A_RUN = 10, 4
# Name of the job, by what it is.
FORMS = {
    "job file, exact": "tiny",
    "job file, batch": "batch",
    "own loop, exact": "loop",
    "own loop, batch": "ddp",
}
LOOP = """
import os, time
from pathlib import Path
import torch
from torch.nn.functional import cross_entropy
import elasticflow as ef
from obedient import Samples
from trajectory_models import mlp

here, pause = Path(__file__).parent, float(os.environ.get("TINY_PAUSE_S", "0.004"))
run = ef.join({arguments})
# As many on a machine of its own as beside others: sums of several threads have other bits.
torch.set_num_threads(1)
model = mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run.keep(model=model, optimizer=optimizer)
{prepare}

def loss_of(part):
    return {{"loss": cross_entropy(replicas(part.inputs), part.targets), "rows": len(part.inputs)}}

for batch in run.batches(Samples(), size=16, steps={steps}):
    if not (here / "hurry").exists():
        time.sleep(pause)
    optimizer.zero_grad()
    {gradients}
    optimizer.step()
    run.step(loss=loss)
run.finish()
"""
LOOPS = {
    "loop": {
        "arguments": "virtual_shards=4",
        "prepare": "replicas = model",
        "gradients": "loss = run.gradients(loss_of, batch)",
    },
    "ddp": {
        "arguments": "",
        "prepare": "replicas = run.wrap(model)",
        "gradients": "loss = loss_of(batch)['loss']; (loss * batch.share).backward()",
    },
}
# A loop of its own whose steps take no time.
FAST = """
import torch
import elasticflow as ef

run = ef.join()
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randn(64, 16))
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
run.keep(model=model, optimizer=optimizer)
for batch in run.batches(data, size=4, steps={steps}):
    optimizer.zero_grad()
    loss = (model(batch.inputs) - batch.targets).square().mean()
    loss.backward()
    optimizer.step()
    run.step(loss=loss)
run.finish()
"""
FAST_STEPS = 100_000
FLAT_AFTER = (10_000, 50_000, 90_000)
LOOP_JOB = """
[job]
name = "{name}"
seed = 5
[script]
entry = "{name}.py"
[nodes]
nproc_per_node = 2
[snapshots]
every = "{every} steps"
[restarts]
budget = {budget}
"""

TEXT = """# Steps done again with the memory tier

{date}, {facts}, {cores} cores shared with other work; commit {commit}.
Made by `python -m tests.measured.campaign.memory`.

Small jobs with `snapshots.memory` as it is by default, {steps} to {most} steps of some 60 ms, a snapshot every {every} steps. *Worker*, *agent*: `kill -9`
at moments drawn from the seed {seed}, of runs of two workers: on one node, or on two nodes (one worker each) that are simulated
on this machine. *Node*: all processes of a host are killed, and the command is started there again; hosts are network namespaces, 2 to 4, a
worker each. Exact jobs continue with fewer hosts meanwhile; the others wait for the host. *Again*: steps done again after it.
*From memory*: restarts that resumed from a held state; on one node a killed agent takes what the node holds with it. *As required*: exit code 0, and
every tensor at the end has the bits of the undisturbed run, each step once in metrics.jsonl.

| form | killed | nodes | times | from memory | again, median | again, largest | seconds to the next step, median | as required |
|---|---|---|---:|---:|---:|---:|---:|---|
{rows}

{total} in all; median of steps done again: {median:g}.
{problems}
{flat}"""


@dataclass
class Blow:
    """One kill, and what came of it; without problems all was as it must be.

    Attributes:
        form: Of `FORMS`.
        victim: "worker", "agent" or "node".
        nodes: How many the run had.
        run: Name of the run.
        lost: Steps done again.
        seconds: Until training continued.
        is_from_memory: It resumed from a held state.
        problems: In words.
    """

    form: str
    victim: str
    nodes: int
    run: str
    lost: int = 0
    seconds: float = 0.0
    is_from_memory: bool = False
    problems: list[str] = field(default_factory=list)


def write(project: Project, steps: int) -> None:
    """Put the jobs into *project*, *steps* long."""
    tiny_job.write(project, steps, EVERY, BUDGET)
    text = (project.root / "jobs/tiny.toml").read_text()
    # Sums of other threads have other bits.
    project.write("jobs/batch.toml", text.replace('"tiny"', '"batch"').replace(jobs.EXACT, "threads = 1\n"))
    for name, parts in LOOPS.items():
        project.write(f"{name}.py", LOOP.format(steps=steps, **parts))
        project.write(f"jobs/{name}.toml", LOOP_JOB.format(name=name, every=EVERY, budget=BUDGET))
    tiny_job.reset(project)


def digest(bits: dict[str, bytes]) -> str:
    """Return a digest of all tensors."""
    total = sha256()
    for key in sorted(bits):
        total.update(key.encode() + bits[key])
    return total.hexdigest()


def undisturbed(project: Project, job: str, workers: int, steps: int) -> str:
    """Return the digest that *job*, *steps* long, comes to on so many workers if nobody disturbs it."""
    write(project, steps)
    tiny_job.hurry(project)
    running = project.run(
        f"jobs/{job}.toml", f"quiet-{job}-{workers}-{steps}", f"nodes.nproc_per_node={workers}", job=job
    )
    if (code := running.end(1000)) != 0:
        raise RuntimeError(f"{job}, undisturbed, ended with {code}: {running.told()}")
    return digest(tensors(running.run))


def kill(project: Project, form: str, nodes: int, number: int, expected: str) -> list[Blow]:
    """Kill workers in one run, and an agent once; return what came of each kill."""
    draw, job = random.Random(f"{SEED} {form} {nodes} {number}"), FORMS[form]
    write(project, STEPS)
    options = [] if nodes == 1 else [f"--simulate-nodes={nodes}"]
    sets = [] if nodes == 1 else [f"nodes.min={nodes}", f"nodes.max={nodes}", "nodes.nproc_per_node=1"]
    name = f"{job}-{nodes}-{number}"
    series = Series(project, name, *sets, job=job, options=options, TINY_PAUSE_S=PAUSE_S)
    agents = {draw.randrange(KILLS_OF_A_RUN)}
    blows, generation = [], series.trains(0)
    for count in range(KILLS_OF_A_RUN):
        victim = "agent" if count in agents else f"worker {draw.randrange(2)}"
        blow = Blow(form, victim.split(maxsplit=1)[0], nodes, name)
        series.reach(min(STEPS - 50, series.step() + draw.randrange(10, 50)))
        before, began = series.step(), time.monotonic()
        series.kill(victim)
        started = series.started(generation)
        generation = series.trains(generation)
        _note(blow, before, began, started)
        blows.append(blow)
    tiny_job.hurry(project)
    if (code := series.running.end(1000)) != 0:
        blows[-1].problems.append(f"exit code {code}: {series.running.told()[-600:]}")
    _compare(blows[-1], series.running.run, STEPS, tensors(series.running.run), expected)
    return blows


def lose(folder: Path, form: str, nodes: int, number: int, expected: str) -> list[Blow]:
    """Kill all processes of hosts in one run, one host after the other; return what came of each."""
    draw, job = random.Random(f"{SEED} node {form} {nodes} {number}"), FORMS[form]
    hosts, blows = Hosts(nodes), []
    shrinks = "exact" in form
    name = f"{job}-hosts-{nodes}-{number}"
    with ExitStack() as stack:
        stack.callback(hosts.remove)
        hosts.make()
        projects = []
        for index, namespace in enumerate(hosts.names):
            project = stack.enter_context(project_at(folder / f"{name}-{index}"))
            project.prefix = ("ip", "netns", "exec", namespace)
            write(project, LOSING_STEPS)
            projects.append(project)
        extra = (f"nodes.min={1 if shrinks else nodes}", f"nodes.max={nodes}")
        run = Run(projects, hosts, f"{name}-{os.getpid()}", folder / f"shared-{name}", None, job, extra)
        run.start(*range(nodes))
        run.trains(nodes)
        for _ in range(LOSSES_OF_A_RUN):
            victim, blow = draw.randrange(1, nodes), Blow(form, "node", nodes, name)
            run.leads.wait_for_step(run.leads.state()["step"] + draw.randrange(10, 50))
            before, began, lost = run.leads.state()["step"], time.monotonic(), run.generation
            for pid in ip_pids(hosts.names[victim]):
                os.kill(pid, signal.SIGKILL)
            run.commands.pop(victim).process.wait()
            if shrinks:
                run.trains(nodes - 1)
            blow.seconds = time.monotonic() - began
            run.start(victim)
            run.trains(nodes)
            starts = [e for e in named(run.leads.events(), events.TRAINING_STARTED) if e["generation"] > lost]
            _note(blow, before, began if not shrinks else time.monotonic() - blow.seconds, starts[0])
            blow.problems += [
                f"generation {e['generation']} did not resume from memory"
                for e in starts
                if not e["from_memory"]
            ]
            blows.append(blow)
        run.hurry()
        for host, running in run.commands.items():
            if (code := running.end()) != 0:
                blows[-1].problems.append(f"host {host + 1} ended with {code}: {running.told()[-600:]}")
        found = tensors(Catalog(Storage(str(run.shared)), f"{run.name}/"))
        _compare(blows[-1], run.leads.run, LOSING_STEPS, found, expected)
        if left := wait_gone(run.name):
            blows[-1].problems.append(f"left behind: {left}")
    return blows


def _note(blow: Blow, before: int, began: float, started: dict[str, Any]) -> None:
    blow.seconds = time.monotonic() - began
    blow.lost = max(0, before - int(started["step"]))
    blow.is_from_memory = bool(started["from_memory"])


def _compare(blow: Blow, run: Any, count: int, found: dict[str, bytes], expected: str) -> None:
    if digest(found) != expected:
        blow.problems.append("other weights than undisturbed")
    if (steps := steps_of(run)) != list(range(1, count + 1)):
        blow.problems.append(f"steps in metrics.jsonl: {len(steps)}, the last {steps[-1:]}")


def flat(project: Project) -> str:
    """Return the memory of each process of a run of `FAST_STEPS` steps, after some of them, as a Markdown table."""
    project.write("fast.py", FAST.format(steps=FAST_STEPS))
    job = LOOP_JOB.format(name="fast", every=FAST_STEPS // 4, budget=1)
    project.write("jobs/fast.toml", job.replace("nproc_per_node = 2", "nproc_per_node = 1"))
    running = project.run("jobs/fast.toml", f"fast-{os.getpid()}", job="fast")
    found: list[dict[str, float]] = []
    for step in FLAT_AFTER:
        running.wait_for("steps", lambda at=step: running.state().get("step", 0) >= at, 7200)  # type: ignore[misc]
        found.append(_memory(running))
    if (code := running.end(1000)) != 0:
        raise RuntimeError(f"ended with {code}: {running.told()}")
    lines = [f"| {name} | {' | '.join(f'{each.get(name, 0):.1f}' for each in found)} |" for name in found[0]]
    title = f"Memory of a run of {FAST_STEPS} steps of an own loop, one worker, MB of private pages:"
    return "\n".join(
        [
            title,
            "",
            f"| process | after {' | '.join(f'{step:,}' for step in FLAT_AFTER)} steps |",
            f"|---|{'---:|' * len(FLAT_AFTER)}",
            *lines,
            "",
        ]
    )


def _memory(running: Running) -> dict[str, float]:
    found: dict[str, float] = {}
    workers = {worker["pid"] for worker in running.state()["workers"]}
    for process in [psutil.Process(running.process.pid), *running.tree()]:
        command = " ".join(process.cmdline())
        name = next((name for name, module in MODULES.items() if module in command), None)
        name = "worker" if process.pid in workers else name
        if process.pid == running.process.pid:
            name = "supervisor"
        if name is not None:
            found[name] = process.memory_full_info().uss / 1e6
    return found


def row(form: str, victim: str, nodes: int, blows: list[Blow]) -> str:
    """Return one line of the table."""
    lost = [blow.lost for blow in blows]
    held = sum(blow.is_from_memory for blow in blows)
    wrong = sum(bool(blow.problems) for blow in blows)
    seconds = median(blow.seconds for blow in blows)
    good = "all" if not wrong else f"{len(blows) - wrong}"
    return f"| {form} | {victim} | {nodes} | {len(lost)} | {held} | {median(lost):g} | {max(lost)} | {seconds:.1f} | {good} |"


def table(blows: list[Blow], flat: str = "") -> str:
    """Return the Markdown page."""
    groups = sorted({(list(FORMS).index(b.form), b.victim != "worker", b.victim, b.nodes) for b in blows})
    rows = []
    for index, _, victim, nodes in groups:
        form = list(FORMS)[index]
        some = [b for b in blows if (b.form, b.victim, b.nodes) == (form, victim, nodes)]
        rows.append(row(form, victim, nodes, some))
    wrong = [f"- {b.run}, {b.victim}: {'; '.join(b.problems)}" for b in blows if b.problems]
    counts = [f"{sum(b.victim == v for b in blows)} {v}s" for v in ("worker", "agent", "node")]
    return TEXT.format(
        **head(), flat=flat, steps=STEPS, most=LOSING_STEPS, every=EVERY, seed=SEED, rows="\n".join(rows), total=", ".join(counts),
        median=median(b.lost for b in blows), problems="\n".join(["", "Not as required:", "", *wrong] if wrong else []),
    )  # fmt: skip


def read_results(path: Path) -> list[Blow]:
    """Return the blows of earlier calls."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Blow(**json.loads(line)) for line in lines]


def _disturb(
    results: Path, project: Project, folder: Path | None, form: str, nodes: int, number: int
) -> None:
    """Do one run and keep what came of it, unless it is done; with a *folder* hosts are lost, of projects in it."""
    run = f"{FORMS[form]}-{'hosts-' if folder else ''}{nodes}-{number}"
    if any(done.run == run for done in read_results(results)):
        return
    # An exact job has the same bits on any number of workers.
    workers = 2 if "exact" in form or folder is None else nodes
    steps = LOSING_STEPS if folder else STEPS
    kept = results.with_suffix(f".{FORMS[form]}-{workers}-{steps}")
    if not kept.exists():
        kept.write_text(undisturbed(project, FORMS[form], workers, steps))
    expected = kept.read_text()
    if folder is None:
        blows = kill(project, form, nodes, number, expected)
    else:
        blows = lose(folder, form, nodes, number, expected)
    with results.open("a") as file:
        for each in blows:
            print(each, flush=True)
            file.write(json.dumps(asdict(each)) + "\n")


def main() -> int:
    """Disturb, print one line a kill, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", default=["kill", "lose", "flat"], help="kill, lose, flat")
    options.add_argument("--runs", type=int, default=5, help=f"of each form, of {KILLS_OF_A_RUN} kills each")
    options.add_argument("--losing-runs", type=int, default=4, help=f"the same, {LOSSES_OF_A_RUN} nodes each")
    options.add_argument(
        "--results", type=Path, default=RESULTS, help="where results are kept: runs done are not done again"
    )
    given = options.parse_args()
    results: Path = given.results
    kept = results.with_suffix(".flat")
    with tempfile.TemporaryDirectory(prefix="memory-") as name, project_at(Path(name) / "project") as project:
        for number in range(max(given.runs, given.losing_runs)):
            for form in FORMS:
                if "kill" in given.only and number < given.runs:
                    _disturb(results, project, None, form, 1 + number % 2, number)
                if "lose" in given.only and number < given.losing_runs:
                    _disturb(results, project, Path(name), form, 2 + number % 3, number)
        if "flat" in given.only and not kept.exists():
            kept.write_text(flat(project))
    blows = read_results(given.results)
    if not blows:
        print("no table: nothing was killed yet")
        return 0
    TABLE.write_text(table(blows, kept.read_text() if kept.exists() else ""), encoding="utf-8")
    return int(any(blow.problems for blow in blows))


if __name__ == "__main__":
    sys.exit(main())
