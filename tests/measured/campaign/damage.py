"""Damage every file of a run in every way, and look what every command makes of it.

By hand, as root: `python -m tests.measured.campaign.damage`, with `--only` for some kinds of files, with `--both` to launch with `run --run-id`
and with `resume` in every cell. The table lies beside this file. What only looks is called in this process, one command
after the other; what launches is started for real and trains to the end. Without `--both` the two ways to launch take
turns, cell by cell, since what they read first is all in which they differ, and only the files whose damage has ended runs
are launched with every damage, the others with two. Results are kept; `--again` begins anew.

A file is unreadable to this program though it runs as root: it gives up the capabilities that let root read everything.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.cli.main import call
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.damage import harm
from tests.damage.harm import Answer
from tests.measured.campaign.facts import head

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(tempfile.gettempdir()) / "elasticflow-damage.jsonl"
TABLE = Path(__file__).with_name("damage.md")
LIMIT_S = 180
LOOKING = [command for command in harm.COMMANDS if command not in harm.LAUNCHING]
# What a launch reads, and where damage once ended runs or began them anew; with the others two damages stand for all.
IN_FULL = (
    "JOB.json",
    "generations/NNNN.json",
    "launches/NNNN/job.json",
    "launches/NNNN/plan.json",
    "launches/NNNN/train.py",
    "metrics.jsonl",
    "snapshots/NAME/MANIFEST.json",
    "state.json",
)
FEW = ("300 bytes zeroed", "a directory")
_MARK = "ELASTICFLOW_DAMAGE_WITHOUT_CAPABILITIES"

TEXT = """# Damage

{date}, {facts}, {cores} cores shared with other work; commit {commit}.
Made by `python -m tests.measured.campaign.damage`, as root without the capabilities that let root read everything.

A run of 60 steps with a snapshot every 10 lost a worker, continued and was interrupted after step {last}; its snapshots of
steps {steps} are whole, the oldest is set aside by a verdict. In each cell one file of a copy of it is damaged in one way, once.

- **Launched**: `elasticflow run --run-id` or `elasticflow resume`, taking turns, as real processes that train to the end.
  `on` resumed from the newest snapshot and finished. `older` resumed from the one before, since the damage is in the
  newest one. `refused`: exit code 2, file and remedy named, no generation claimed. `-`: not launched for real; two damages
  stand for all with files that no launch reads or whose damage never ended a run. The unit test `tests/damage` decides
  these cells, too, with launches that are cut short once they know from where they continue.
- **Looked at**: `status`, `runs`, `why`, `logs`, `snapshots list`, `snapshots show`, `snapshots verify --all`. `shown`: all of
  them did, with a warning where something is left out. Else how many did not: `refused` with exit code 2, file and remedy;
  `named`: `verify` says which file is damaged (exit code 1).

Anything else (a traceback, the beginning, another snapshot, a generation claimed in vain) would stand here as **BAD**.
{launches} launches and {looks} looks: {bad} bad.

## Launched

| file | {damages} |
|---|{rule}|
{launched}

## Looked at

| file | {damages} |
|---|{rule}|
{looked}
"""


@dataclass
class Cell:
    """What came of one damage to one kind of file.

    Attributes:
        kind: Of file.
        damage: Which.
        launched: Outcomes, one for each command that launches.
        looked: Outcomes of the commands that only look.
        bad: What is not as it should be.
    """

    kind: str
    damage: str
    launched: list[str] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def _start(root: Path, command: str, output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "elasticflow", *harm.COMMANDS[command]],
            cwd=root,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )


def make_run(root: Path) -> list[str]:
    """Make the project with its run, and return the names of the snapshots that are whole, the newest first."""
    harm.write_project(root)
    (root / "slow").touch()
    folder = root / harm.FOLDER
    running = _start(root, "run --run-id", root / "output.txt")

    def wait_for_lines(count: int) -> None:
        metrics, deadline = folder / "metrics.jsonl", time.monotonic() + LIMIT_S
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < count:
            if running.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((root / "output.txt").read_text())
            time.sleep(0.05)

    wait_for_lines(12)
    os.kill(json.loads((folder / "state.json").read_text())["workers"][0]["pid"], signal.SIGKILL)
    wait_for_lines(34)
    running.send_signal(signal.SIGTERM)
    running.wait(LIMIT_S)
    (root / "slow").unlink()
    names = harm.snapshots_of(root)
    catalog = Catalog(Storage(str(folder)))
    catalog.pin(names[1], "a note")
    catalog.quarantine(names[-1], "set aside for the campaign")
    return names[:-1]


def look(root: Path, command: str) -> Answer:
    """Run a command that only looks, in this process."""
    said, code = io.StringIO(), None
    os.chdir(root)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = call(harm.COMMANDS[command])
        except Exception as error:  # noqa: BLE001  # what a user would see as a traceback
            said.write(f"Traceback: {type(error).__name__}: {error}")
    return Answer(code, said.getvalue())


def launch(root: Path, command: str) -> Answer:
    """Launch the run for real, and return what came of it once it has ended."""
    before = harm.claims_of(root)
    output = root / "launched.txt"
    running = _start(root, command, output)
    try:
        code: int | None = running.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        code = None
    logs = sorted((root / harm.FOLDER / "logs").glob("g*/rank0.jsonl"))
    started: dict[str, Any] = {}
    if harm.claims_of(root) > before and logs:
        for line in logs[-1].read_bytes().splitlines():
            record = json.loads(line)
            if record.get("event") == "training.started":
                started = record
    return Answer(code, output.read_text(), started.get("restored_from"), harm.claims_of(root) - before)


def try_out(
    original: Path, scratch: Path, cell: Cell, file: Path, commands: Sequence[str], names: list[str]
) -> None:
    """Damage *file* in copies of the project, run *commands*, and note in *cell* what came of it."""
    expected = harm.expected_of(names, file)
    root = scratch / "-".join([harm.kind_of(file).replace("/", "_"), cell.damage.replace(" ", "_")])
    for command in commands:
        is_launch = command in harm.LAUNCHING
        if is_launch or not root.exists():
            shutil.rmtree(root, ignore_errors=True)
            harm.copy_of(original, root)
            harm.DAMAGES[cell.damage](root / harm.FOLDER / file)
        answer = launch(root, command) if is_launch else look(root, command)
        problem = harm.problem_of(command, file, answer, expected)
        if is_launch:
            on = "on" if answer.went_on_from == names[0] else "older"
            cell.launched.append("BAD" if problem else "refused" if answer.code == 2 else on)
        else:
            cell.looked.append("BAD" if problem else {0: "shown", 1: "named", 2: "refused"}[answer.code or 0])
        if problem:
            cell.bad.append(f"{command}: {problem}\n{answer.said[-2000:]}")
    os.chdir(scratch)
    shutil.rmtree(root, ignore_errors=True)


def _launches_of(kind: str, damage: str, turn: int, *, both: bool) -> Sequence[str]:
    if both:
        return harm.LAUNCHING
    if kind not in IN_FULL and damage not in FEW:
        return ()
    return (harm.LAUNCHING[turn % 2],)


def fill(
    original: Path, scratch: Path, names: list[str], kept: dict[tuple[str, str], Cell], options: Any
) -> list[Cell]:
    """Return all cells, those of *kept* as they are; of the kinds that were asked for."""
    files = {harm.kind_of(file): file for file in harm.files_of(original)}
    # The newest of each kind: later ones in the order of names took their places.
    chosen = {
        kind: file for kind, file in files.items() if not options.only or kind.startswith(tuple(options.only))
    }
    cells = [Cell(kind, damage) for kind in chosen for damage in harm.DAMAGES]
    missing = [(turn, cell) for turn, cell in enumerate(cells) if (cell.kind, cell.damage) not in kept]
    for _, cell in missing:
        try_out(original, scratch, cell, chosen[cell.kind], LOOKING, names)

    deadline = time.monotonic() + options.limit_s

    def launched(turn: int, cell: Cell) -> None:
        if time.monotonic() > deadline:
            kept[cell.kind, cell.damage] = cell
            return
        commands = _launches_of(cell.kind, cell.damage, turn, both=options.both)
        try_out(original, scratch, cell, chosen[cell.kind], commands, names)
        kept[cell.kind, cell.damage] = cell
        print(cell.kind, "|", cell.damage, "|", *cell.launched, "|", *cell.bad, flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(asdict(cell)) + "\n")

    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(lambda each: launched(*each), missing))
    return [kept[cell.kind, cell.damage] for cell in cells]


def read_results(path: Path) -> dict[tuple[str, str], Cell]:
    """Return the cells of earlier calls that are as they should be."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [Cell(**json.loads(line)) for line in lines]
    return {(cell.kind, cell.damage): cell for cell in cells if not cell.bad}


def _looked(cell: Cell) -> str:
    others = Counter(outcome for outcome in cell.looked if outcome != "shown")
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(others.items())) or "shown"


def table(cells: Sequence[Cell], names: list[str]) -> str:
    """Return the Markdown page of the results."""
    by_place = {(cell.kind, cell.damage): cell for cell in cells}
    kinds = list(dict.fromkeys(cell.kind for cell in cells))

    def rows(show: Any) -> str:
        return "\n".join(
            f"| {kind} | " + " | ".join(show(by_place[kind, damage]) for damage in harm.DAMAGES) + " |"
            for kind in kinds
        )

    steps = [int(name.split("-")[0]) for name in names]
    return TEXT.format(
        **head(),
        last=steps[0],
        steps=", ".join(map(str, reversed(steps))),
        damages=" | ".join(harm.DAMAGES),
        rule="|".join("---" for _ in harm.DAMAGES),
        launches=sum(len(cell.launched) for cell in cells),
        looks=sum(len(cell.looked) for cell in cells),
        bad=sum(len(cell.bad) for cell in cells),
        launched=rows(lambda cell: ", ".join(dict.fromkeys(cell.launched)) or "-"),
        looked=rows(_looked),
    )


def _without_capabilities() -> None:
    """Begin anew without the capabilities by which root may read what no permission lets it read."""
    if os.geteuid() == 0 and _MARK not in os.environ:
        os.environ[_MARK] = "1"
        without = "--bounding-set=-dac_override,-dac_read_search"
        command = [
            "setpriv",
            without,
            "--inh-caps=-all",
            sys.executable,
            "-m",
            "tests.measured.campaign.damage",
        ]
        os.execvp("setpriv", [*command, *sys.argv[1:]])


def main() -> int:
    """Fill the table, and write it; return 1 if anything was not as it should be."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--only", nargs="*", help="kinds of files, by how their names begin; no table is written"
    )
    options.add_argument("--both", action="store_true", help="launch in both ways in every cell")
    options.add_argument("--again", action="store_true", help="also cells that came out well before")
    options.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    options.add_argument(
        "--limit-s", type=float, default=float("inf"), help="launch nothing later; the next call goes on"
    )
    options.add_argument("--at-once", type=int, default=2, help="launches at a time")
    given = options.parse_args()
    _without_capabilities()
    with tempfile.TemporaryDirectory(prefix="damage-", ignore_cleanup_errors=True) as folder:
        original, scratch = Path(folder) / "original", Path(folder) / "copies"
        scratch.mkdir()
        names = make_run(original)
        kept = {} if given.again else read_results(given.results)
        cells = fill(original, scratch, names, kept, given)
        os.chdir(ROOT)
    if not given.only:
        TABLE.write_text(table(cells, names), encoding="utf-8")
    bad = [text for cell in cells for text in cell.bad]
    print(f"{len(bad)} bad")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
