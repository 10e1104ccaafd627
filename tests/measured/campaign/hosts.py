"""Cut hosts off and mend their links, add hosts and take them away, and find the weights of a run that nobody disturbed.

By hand, as root, with iproute2: `python -m tests.measured.campaign.hosts`, or a part of it with `--only`. The table lies beside this
file; results are kept as they come, so that parts may be done one by one. Hosts are network namespaces on one switch.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import named, project_at, steps_of, tensors, wait_gone
from tests.hosts import Hosts, ip_pids
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.end_to_end.harness import Project, Running

TABLE = Path(__file__).with_name("hosts.md")
RESULTS = Path(tempfile.gettempdir()) / "elasticflow-hosts.jsonl"
STEPS, EVERY, BUDGET = 800, 5, 1000
PAUSE_S, PORT, TOKEN = 0.02, 29400, "a-token-of-this-campaign"
TRIES = 2
# A host that is cut off has let its workers go after so long.
_ALONE_S = 20.0


@dataclass
class Try:
    """One run that was disturbed, and what came of it; without problems all was as it must be.

    Attributes:
        part: Of the campaign.
        generations: That were formed.
        charged: Restarts it cost.
        seconds: From the moment the link was mended, or the host came, until all hosts train together.
        problems: In words.
    """

    part: str
    generations: int = 0
    charged: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Run:
    """One run on the hosts: the same command on each, given a name and where they meet.

    Args:
        projects: Of the hosts, the one that leads first.
        hosts: They.
        name: Of the run.
        shared: Folder for its snapshots, which all see.
        store: Host that serves the store; None: the one that leads.
        job: Name of the job.
        extra: Keys that it has otherwise, as `--set` takes them.

    Attributes:
        generation: The one that trained last.
        is_last: None may follow on it.
    """

    def __init__(
        self,
        projects: list[Project],
        hosts: Hosts,
        name: str,
        shared: Path,
        store: int | None = None,
        job: str = "tiny",
        extra: Sequence[str] = (),
    ) -> None:
        self.projects, self.hosts, self.name, self.shared = projects, hosts, name, shared
        self.job = job
        self.generation = 0
        self.is_last = False
        self._workers: list[int] = []
        endpoint = f"{hosts.addresses[store or 0]}:{PORT}"
        outside = [] if store is None else ["torchrun.rdzv_conf={is_host=false}"]
        sets = [
            f"nodes.endpoint={endpoint}",
            "nodes.max=3",
            "nodes.nproc_per_node=1",
            f"snapshots.uri={shared}",
            *outside,
            *extra,
        ]
        self.words = (
            "run",
            f"jobs/{job}.toml",
            f"--run-id={name}",
            f"--join={endpoint}",
            *(f"--set={s}" for s in sets),
        )
        self.commands: dict[int, Running] = {}
        for project in projects:
            tiny_job.reset(project)

    def start(self, *numbers: int) -> None:
        """Start the command on hosts."""
        for number in numbers:
            self.commands[number] = self.projects[number].start(
                *self.words,
                run_id=self.name,
                job=self.job,
                TINY_PAUSE_S=str(PAUSE_S),
                ELASTICFLOW_TOKEN=TOKEN,
            )

    @property
    def leads(self) -> Running:
        """The command on the host that leads."""
        return self.commands[0]

    def trains(self, count: int, after: int | None = None) -> None:
        """Wait until a generation of so many workers, after the last one or *after*, has trained a few steps."""
        self.generation = self.leads.wait_for_group(count, self.generation if after is None else after)
        self._workers = [worker["pid"] for worker in self.leads.state()["workers"]]

    def workers_on(self, *numbers: int) -> list[int]:
        """Return the workers of the generation that trained last that are on some hosts, and live."""
        there = {pid for number in numbers for pid in ip_pids(self.hosts.names[number])}
        return [pid for pid in self._workers if pid in there]

    def hurry(self) -> None:
        """Let it come to its end."""
        for project in self.projects:
            tiny_job.hurry(project)
        for running in self.commands.values():
            running.end()

    def finish(self, done: Try, expected: dict[str, Any]) -> None:
        """Let it come to its end, and compare it with the undisturbed one."""
        self.hurry()
        for number, running in self.commands.items():
            if (code := running.end()) != 0:
                done.problems.append(f"host {number + 1} ended with {code}: {running.told()[-1500:]}")
        happened = self.leads.events()
        done.generations = len(named(happened, events.GENERATION_STARTED))
        if (
            self.is_last
            and (last := named(happened, events.GENERATION_STARTED)[-1]["generation"]) != self.generation
        ):
            done.problems.append(f"generation {last} after {self.generation}")
        done.charged = len(named(happened, events.BUDGET_CHARGED))
        if expected["bits"] != tensors(Catalog(Storage(str(self.shared)), f"{self.name}/")):
            done.problems.append("other weights than undisturbed")
        if (steps := steps_of(self.leads.run)) != list(range(1, STEPS + 1)):
            done.problems.append(f"steps in metrics.jsonl: {len(steps)}, the last {steps[-1:]}")
        if left := wait_gone(self.name):
            done.problems.append(f"left behind: {left}")


def _cut(run: Run, done: Try, host: int, seconds: float) -> None:
    """Cut a host off for a while; a short cut is not noticed, after a long one all train together again."""
    run.start(0, 1, 2)
    run.trains(3)
    began = time.monotonic()
    alone = [1, 2] if host == 0 else [host]
    cut_off = run.workers_on(*alone)
    if len(cut_off) != len(alone):
        done.problems.append(f"workers {cut_off} on {len(alone)} hosts")
    run.hosts.link("down", host)
    if seconds <= 1:
        time.sleep(seconds)
        run.hosts.link("up", host)
        mended = time.monotonic()
        run.leads.wait_for_step(run.leads.state()["step"] + 20)
        run.is_last = True
    else:
        run.trains(1 if host == 0 else 2)
        while time.monotonic() < began + seconds:
            time.sleep(0.1)
            there = [pid for number in alone for pid in ip_pids(run.hosts.names[number])]
            if time.monotonic() > began + _ALONE_S and not set(cut_off).isdisjoint(there):
                done.problems.append(f"workers on a host that is cut off, after {_ALONE_S:g} s")
                break
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        run.hosts.link("up", host)
        mended = time.monotonic()
        run.trains(3)
    done.seconds = time.monotonic() - mended


def _cut_store(run: Run, done: Try, seconds: float) -> None:
    """Cut off the host that serves the store, and trains nothing: all continue, and nothing is formed anew."""
    with _served(run):
        _start_led_by_first(run)
        run.hosts.link("down", 3)
        time.sleep(seconds)
        run.hosts.link("up", 3)
        mended = time.monotonic()
        run.leads.wait_for_step(run.leads.state()["step"] + 20)
        done.seconds = time.monotonic() - mended
        run.is_last = True
        run.hurry()


def _kill_store(run: Run, done: Try) -> None:
    """Kill the server of the store again and again; in the end a worker, which is replaced."""
    with _served(run) as serving:
        _start_led_by_first(run)
        for _ in range(3):
            os.kill(serving[-1].process.pid, signal.SIGKILL)
            serving[-1].process.wait()
            serving.append(_serve(run))
            began = time.monotonic()
            run.leads.wait_for_step(run.leads.state()["step"] + 20)
            done.seconds = max(done.seconds, time.monotonic() - began)
        os.kill(run.workers_on(1)[0], signal.SIGKILL)
        run.trains(3)
        run.is_last = True
        run.hurry()


def _start_led_by_first(run: Run) -> None:
    """Start the first host, which leads before the others come: any may, where the store is elsewhere."""
    run.start(0)
    run.trains(1)
    run.start(1, 2)
    run.trains(3)


@contextmanager
def _served(run: Run) -> Iterator[list[Running]]:
    """Serve the store on the fourth host meanwhile."""
    serving = [_serve(run)]
    try:
        yield serving
    finally:
        os.kill(serving[-1].process.pid, signal.SIGTERM)
        serving[-1].end()


def _serve(run: Run) -> Running:
    words = (
        "rendezvous",
        "serve",
        f"--port={PORT}",
        f"--state={run.shared.with_name(run.shared.name + '-store')}",
    )
    serving = run.projects[3].start(*words, run_id="store", ELASTICFLOW_TOKEN=TOKEN)
    serving.wait_for("a store", lambda: "serving" in serving.output.read_text())
    return serving


def _add(run: Run, done: Try) -> None:
    """Two hosts train, and a third one comes."""
    run.start(0, 1)
    run.trains(2)
    began = time.monotonic()
    run.start(2)
    run.trains(3)
    done.seconds = time.monotonic() - began


def _stranger(run: Run, done: Try) -> None:
    """A host without a token, and one with another one, try to take part: they are refused, and nothing happens."""
    run.start(0, 1)
    run.trains(2)
    stranger = run.projects[2]
    for token in ({}, {"ELASTICFLOW_TOKEN": "x" * 32}):
        refused = stranger.start(*run.words, run_id=run.name, **token)
        if (code := refused.end()) != 2 or "token" not in refused.output.read_text():
            done.problems.append(f"a stranger ended with {code}: {refused.told()}")
    run.is_last = True
    if not named(run.leads.events(), events.CONNECTION_REFUSED):
        done.problems.append("nobody was told of strangers")


def _crash(run: Run, done: Try) -> None:
    """All processes of a host are killed, as when its power fails; the same command is started there again."""
    run.start(0, 1, 2)
    run.trains(3)
    for pid in ip_pids(run.hosts.names[2]):
        os.kill(pid, signal.SIGKILL)
    run.commands.pop(2).process.wait()
    crashed = run.generation
    run.trains(2)
    logs = run.projects[0].start("logs", run.name, f"--generation={crashed}", run_id=run.name, job="tiny")
    if logs.end() != 0 or "are not to be had: they are on host" not in logs.output.read_text():
        done.problems.append(f"nobody is told of logs that are gone: {logs.told()}")
    began = time.monotonic()
    run.start(2)
    run.trains(3)
    done.seconds = time.monotonic() - began


PARTS: dict[str, Callable[[Run, Try], None]] = {
    "a node cut off for 1 s": partial(_cut, host=2, seconds=1),
    "a node cut off for 5 s": partial(_cut, host=2, seconds=5),
    "a node cut off for 30 s": partial(_cut, host=2, seconds=30),
    "the host that leads, and serves the store, cut off for 1 s": partial(_cut, host=0, seconds=1),
    "the host that leads, and serves the store, cut off for 5 s": partial(_cut, host=0, seconds=5),
    "the host that leads, and serves the store, cut off for 30 s": partial(_cut, host=0, seconds=30),
    "a store of its own cut off for 5 s": partial(_cut_store, seconds=5),
    "a store of its own cut off for 30 s": partial(_cut_store, seconds=30),
    "a store of its own killed three times, then a worker": _kill_store,
    "a node added": _add,
    "strangers: no token, another token": _stranger,
    "a host crashes, and is back": _crash,
}

TEXT = """# Hosts

{date}, {facts}, {cores} cores shared with other work (load 3 to 20); commit {commit}.
Made by `python -m tests.measured.campaign.hosts`.

Three hosts, each a network namespace on a switch in another one, with a worker each; `elasticflow run JOB --run-id ID --join HEAD:PORT`
on all of them, with a token, and snapshots in a folder that all see. A tiny job in exact mode, {steps} steps, a snapshot every {every}.
A link is cut at the switch. *As required*: the weights at the end have the bits of an undisturbed run, every step is in
metrics.jsonl once, every command ends with 0, no process is left; a cut of 1 s, and any of a store that keeps its state
(`rendezvous serve --state`, on a fourth host), ends no generation; after 5 s and 30 s the others have continued without the host that was cut
off, on which no worker is left {alone:g} s after the cut, and it takes part again by itself. *Seconds*: from the mended
link, or the start of the host, until all three train.

| what | tries | as required | generations | restarts charged | seconds, each |
|---|---:|---:|---:|---:|---|
{rows}

`run --hosts`, a host whose sshd and all else is killed, and back; one whose link is cut until ssh gives up: see
[clusters](clusters.md).
{problems}"""


def table(tries: list[Try]) -> str:
    """Return the Markdown table of all tries so far."""
    rows = []
    for part in [part for part in PARTS if any(done.part == part for done in tries)]:
        some = [done for done in tries if done.part == part]
        good = sum(not done.problems for done in some)
        formed, charged = (
            "/".join(map(str, sorted({getattr(done, name) for done in some})))
            for name in ("generations", "charged")
        )
        seconds = ", ".join(f"{done.seconds:.1f}" for done in some)
        rows.append(f"| {part} | {len(some)} | {good} | {formed} | {charged} | {seconds} |")
    wrong = [f"* {done.part}: {'; '.join(done.problems)}" for done in tries if done.problems]
    return TEXT.format(
        **head(),
        steps=STEPS,
        every=EVERY,
        alone=_ALONE_S,
        rows="\n".join(rows),
        problems="\n".join(["", "Not as required:", "", *wrong, ""] if wrong else []),
    )


def disturb(part: str, folder: Path, number: int, expected: dict[str, Any]) -> Try:
    """Do one part, in projects of its own below *folder*, and return what came of it."""
    done, hosts = Try(part), Hosts(4)
    with ExitStack() as stack:
        stack.callback(hosts.remove)
        hosts.make()
        projects = []
        for index, name in enumerate(hosts.names):
            project = stack.enter_context(project_at(folder / f"{number}-{index}"))
            project.prefix = ("ip", "netns", "exec", name)
            tiny_job.write(project, STEPS, EVERY, BUDGET)
            projects.append(project)
        store = 3 if "of its own" in part else None
        run = Run(projects, hosts, f"hosts-{os.getpid()}-{number}", folder / f"shared-{number}", store)
        PARTS[part](run, done)
        run.finish(done, expected)
    return done


def read_results(path: Path) -> list[Try]:
    """Return the tries of earlier calls."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [Try(**json.loads(line)) for line in lines]


def main() -> int:
    """Disturb, print one line a try, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--only", nargs="*", default=list(PARTS), help="parts, by the beginning of their names"
    )
    options.add_argument("--tries", type=int, default=TRIES, help="of each part")
    options.add_argument(
        "--results", type=Path, default=RESULTS, help="where results are kept: tries done are not done again"
    )
    given = options.parse_args()
    parts = [part for part in PARTS if part.startswith(tuple(given.only))]
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        with project_at(folder / "undisturbed") as project:
            tiny_job.write(project, STEPS, EVERY, BUDGET)
            expected = tiny_job.undisturbed(project, STEPS)
        for part in parts:
            while len([done for done in read_results(given.results) if done.part == part]) < given.tries:
                done = disturb(part, folder, len(read_results(given.results)), expected)
                print(done, flush=True)
                with given.results.open("a") as file:
                    file.write(json.dumps(asdict(done)) + "\n")
    tries = read_results(given.results)
    TABLE.write_text(table(tries), encoding="utf-8")
    return int(any(done.problems for done in tries))


if __name__ == "__main__":
    sys.exit(main())
