"""A job of small steps in exact mode, whose own code does harm on cue, in a project."""

from __future__ import annotations

import os
import random
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow import events
from tests.end_to_end import trajectory_jobs as jobs
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import named, project_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.harness import Project

SAMPLES = 100
STEPS, EVERY, BUDGET = 200, 5, 100  # of the job as the tests outside the campaigns have it
_CODE = Path(__file__).with_name("obedient.py")


def write(project: Project, steps: int, every: int, budget: int) -> None:
    """Put the job `tiny` and its code into *project*: *steps* long, a snapshot *every* so many, that restart *budget*."""
    jobs.write_jobs(project)
    shutil.copy(_CODE, project.root)
    (project.root / "samples.txt").write_text(" ".join(map(str, range(SAMPLES))))
    text = jobs.TRAINED.format(
        name="tiny",
        seed=jobs.SEED,
        steps=steps,
        model='entry = "trajectory_models:mlp"\nstep = "obedient:step"',
        clip="",
        train=jobs.EXACT,
    )
    for old, new in (
        ('entry = "trajectory_models:Images"', 'entry = "obedient:Samples"'),
        # Each shard is a forward and a backward, and those are most of a step's work.
        ("virtual_shards = 8", "virtual_shards = 4"),
        ("budget = 100", f"budget = {budget}"),
        ('every = "6 steps"', f'every = "{every} steps"'),
    ):
        assert old in text
        text = text.replace(old, new)
    project.write("jobs/tiny.toml", text)


def write_standard(project: Project) -> None:
    """Put the job that `reference` has trained into *project*."""
    write(project, STEPS, EVERY, BUDGET)


@dataclass(frozen=True)
class Reference:
    """What the job comes to undisturbed.

    Attributes:
        found: Losses and bits, as `Series.finish` gives them.
        start_s: From the first event to the first step.
    """

    found: dict[str, Any]
    start_s: float


def reference(root: Path) -> Reference:
    """Return what the standard job comes to, in a project of its own at *root*."""
    with project_at(root) as project:
        write_standard(project)
        found = undisturbed(project, STEPS)
        happened = project.started[-1].events()
    began, ready = (
        datetime.fromisoformat(event["timestamp"])
        for event in (happened[0], named(happened, events.TRAINING_FIRST_STEP)[0])
    )
    return Reference(found, (ready - began).total_seconds())


def undisturbed(project: Project, steps: int) -> dict[str, Any]:
    """Return what a run of *steps* that nobody disturbs comes to, as `Series.finish` gives it."""
    reset(project)
    hurry(project)
    outcome = Outcome("", "")
    found = Series(project, f"undisturbed-{os.getpid()}", job="tiny").finish(None, outcome)
    if outcome.problems or len(found["losses"]) != steps:
        raise RuntimeError(f"undisturbed: {outcome.problems}")
    return found


def reset(project: Project) -> None:
    """Take all cues away."""
    for name in ("hurry", "dawdle"):
        (project.root / name).unlink(missing_ok=True)
    shutil.rmtree(project.root / "cues", ignore_errors=True)
    (project.root / "cues").mkdir()


def hurry(project: Project) -> None:
    """Let steps take no more time than they need."""
    (project.root / "hurry").touch()


def dawdle(project: Project) -> None:
    """Let every other loader process be slow."""
    (project.root / "dawdle").touch()


def cue(project: Project, act: str, rank: int) -> None:
    """Have *rank* do *act* of `obedient.ACTS` in its next step, once."""
    (project.root / "cues" / f"{act}@{rank}").touch()


@contextmanager
def other_order(project: Project) -> Iterator[None]:
    """Have the samples in another order for a while."""
    path = project.root / "samples.txt"
    before = path.read_text()
    words = before.split()
    random.Random(1).shuffle(words)
    path.write_text(" ".join(words))
    yield
    path.write_text(before)


@contextmanager
def without_samples(project: Project) -> Iterator[None]:
    """Have the samples' file away for a while."""
    path = project.root / "samples.txt"
    away: Path = path.rename(project.root / "away.txt")
    yield
    away.rename(path)
