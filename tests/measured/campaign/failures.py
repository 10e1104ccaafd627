"""Inject 21 kinds of failure into a running job, each for real, and look how it ends and what is said about it.

By hand, as root where namespaces and memory groups are to be made: `python -m tests.measured.campaign.failures`, or a few of them
with `--only`. The table lies beside this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import elasticflow
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import Project, project_at, wait_gone
from tests.measured.campaign import injections_inside as inside
from tests.measured.campaign import injections_outside as outside
from tests.measured.campaign.facts import head
from tests.measured.campaign.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TABLE = Path(__file__).with_name("failures.md")
RESULTS = Path(tempfile.gettempdir()) / "elasticflow-failures.jsonl"
STEPS, EVERY = 300, 10


@dataclass
class Row:
    """One line of the table.

    Attributes:
        kind: Of failure.
        how: It was injected.
        said: What the user sees, in events.
        ended: How it ended.
        is_good: In the undisturbed run's weights or in a refusal that names the cause.
    """

    kind: str
    how: str
    said: str
    ended: str
    is_good: bool


KINDS: tuple[tuple[str, Callable[[Trial], str]], ...] = (
    ("tensor corruption", inside.tensor_corruption),
    ("stale state", outside.stale),
    ("dropped samples", inside.dropped),
    ("duplicated samples, messages", inside.duplicated),
    ("reordered samples", inside.reordered),
    ("delay", inside.delay),
    ("hang", inside.hang),
    ("timeout", inside.timeout),
    ("exception", inside.exception),
    ("resource exhaustion: memory", inside.memory),
    ("resource exhaustion: memory, refused", inside.device_memory),
    ("resource exhaustion: disk", inside.disk),
    ("resource exhaustion: file handles", inside.file_handles),
    ("resource exhaustion: shared memory", inside.shared_memory),
    ("process termination", inside.termination),
    ("resource unavailable", inside.dataset_gone),
    ("snapshot corruption", outside.corrupt),
    ("snapshot truncation", outside.truncated),
    ("snapshot missing", outside.missing),
    ("I/O error", outside.io_error),
    ("payload corruption", outside.payload),
    ("collective desync", inside.desync),
    ("message drop", outside.message_drop),
    ("network partition", outside.partition),
    ("configuration drift", outside.drift),
)


TEXT = """# Failures

{date}, {facts}, {cores} cores shared with other work; commit {commit},
or an earlier one where a result was kept.
Made by `python -m tests.measured.campaign.failures`, as root.

The 21 kinds of failure that a public campaign names, each injected for real into a running job: an MLP with dropout in
4 virtual shards (`consistency = "exact"`), two CPU workers, {steps} steps, a snapshot every {every}. *Said*: the events
that people see, with their words. *Undisturbed weights*: exit code 0, every step's loss and every tensor of the last
snapshot have the bits of the run that nobody disturbed. No accelerator was there to be taken away.

| kind | injected | said | ended in | as required |
|---|---|---|---|---|
{rows}
"""


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of the results so far."""
    return TEXT.format(
        **head(),
        steps=STEPS,
        every=EVERY,
        rows="\n".join(
            f"| {row.kind} | {row.how} | {row.said} | {row.ended} | {'yes' if row.is_good else 'no'} |"
            for row in rows
        ),
    )


def inject(project: Project, kind: str, do: Callable[[Trial], str], expected: dict[str, Any]) -> Row:
    """Inject one kind and return what came of it; nothing of the run lives afterwards."""
    trial = Trial(
        project, kind.replace(" ", "-").replace(",", "").replace(":", "").replace("/", "-"), expected
    )
    how = (do.__doc__ or "").strip()
    try:
        how = do(trial)
    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  the others are to be tried, too
        trial.is_good = False
        trial.ended.append(f"{type(error).__name__}: {error}"[-1500:])
    for running in project.started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
    if left := wait_gone(trial.run_id):
        trial.is_good = False
        trial.ended.append(f"left alive: {left}")
    said = trial.said() if hasattr(trial, "series") else ""
    ended = " ".join("; ".join(trial.ended).split())
    place = str(project.root)
    said, ended = (
        text.replace(place, "PROJECT").replace(f"{Path(elasticflow.__file__).parents[1]}/", "")
        for text in (said, ended)
    )
    return Row(kind, how, said, ended, trial.is_good)


def read_results(path: Path) -> dict[str, Row]:
    """Return the results of earlier calls, by kind; the last of each counts."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    return {row.kind: row for row in rows}


def main() -> int:
    """Inject, print one line each, write the table; return 1 if anything was not as required."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", nargs="*", help="kinds, by the first words of their names")
    options.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    options.add_argument("--again", action="store_true", help="also kinds that came out well before")
    given = options.parse_args()
    rows = read_results(given.results)
    with (
        tempfile.TemporaryDirectory(prefix="failures-") as folder,
        project_at(Path(folder) / "project") as project,
    ):
        tiny_job.write(project, STEPS, EVERY, 100)
        expected = tiny_job.undisturbed(project, STEPS)
        for kind, do in KINDS:
            is_asked = given.only is None or any(kind.startswith(word) for word in given.only)
            if is_asked and (given.again or kind not in rows or not rows[kind].is_good):
                rows[kind] = inject(project, kind, do, expected)
                print(rows[kind], flush=True)
                with given.results.open("a") as file:
                    file.write(json.dumps(asdict(rows[kind])) + "\n")
    found = [rows[kind] for kind, _ in KINDS if kind in rows]
    if len(found) == len(KINDS):
        TABLE.write_text(table(found), encoding="utf-8")
    return int(not all(row.is_good for row in found))


if __name__ == "__main__":
    sys.exit(main())
