"""A plan in words and tables, for `plan` and `run --dry-run`."""

from __future__ import annotations

import re
import shlex
import textwrap
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.cli.output import paint
from elasticflow.cli.write.plan_facts import facts
from elasticflow.cli.write.plan_figures import figures_table, worlds_notes, worlds_table
from elasticflow.compiler.plan.batch_split import worlds
from elasticflow.compiler.plan.launch_plan import torchrun_command
from elasticflow.compiler.provenance.drift import lines_of as drift_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elasticflow.compiler.plan.forecast import Forecast, Knowledge, KnownSets
    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.observe.estimates import RunFacts
    from elasticflow.protocol.key_weights import Weight

_MARGIN = 13
_HELD = re.compile(r"(?<=\d) (?=[A-Za-z])|(?<=\brun) (?=\d)")
Answer = Literal["goes on", "asks", "refuses"]
_ANSWERS: dict[Answer, str] = {
    "goes on": "it could continue as this job",
    "asks": "it could continue as this job, with --accept-drift only",
    "refuses": "it cannot continue as this job",
}
_COLOURS: dict[Weight, str] = {"corrupting": "red", "trajectory": "yellow", "harmless": "green"}


class PlanView(NamedTuple):
    """The content of a plan for the terminal.

    Attributes:
        run_facts: Facts of the run that the job is compared with; None: there is no such run.
        answer: The answer to whether that run could continue as this job.
    """

    plan: LaunchPlan
    job: Job
    known: Knowledge
    ahead: Forecast
    run_facts: RunFacts | None
    answer: Answer
    asides: Mapping[str, str]
    sets: KnownSets | None = None


def lines_of(view: PlanView, width: int) -> Iterator[str]:
    """Yield the lines of the whole plan, at most *width* wide where words can be broken; facts first, the command last."""
    told = [*facts(view.plan, view.job, view.known, view.sets), *view.asides.items()]
    if view.run_facts is not None:
        told.append(("drift", _drift(view.run_facts, view.answer)))
    for name, text in told:
        first, *more = _wrapped(text, width - _MARGIN)
        yield paint(f"{name:<{_MARGIN}}", bold=True) + first
        yield from (f"{'':<{_MARGIN}}{line}" for line in more)
    if view.run_facts is not None and view.run_facts.drift:
        yield from _differences(view.run_facts.drift, width)
    if view.plan.script is None:
        yield ""
        yield from figures_table(view.job, view.known, view.ahead, view.run_facts)
    yield ""
    rows = tuple(worlds(view.job))
    yield from worlds_table(rows)
    for text in () if view.plan.script is not None else worlds_notes(view.job, rows):
        yield ""
        yield from textwrap.wrap(text, width, break_long_words=False)
    yield ""
    yield from _command(view.plan, width)


def _command(plan: LaunchPlan, width: int) -> Iterator[str]:
    """Yield the torchrun command that is equal to the launch, and the variables that it needs."""
    yield paint("# the launch as a command of torchrun", dim=True)
    if plan.script is None:  # another train.py may lie in the project
        yield paint("# (its train.py and torchrun.sh: elasticflow plan JOB -o DIR)", dim=True)
    yield "python -m torch.distributed.run \\"
    program = 1 if plan.script is None else len(torchrun_command(plan.script))
    yield from (f"    {shlex.quote(option)} \\" for option in plan.torchrun_args[:-program])
    yield f"    {shlex.join(plan.torchrun_args[-program:])}"
    yield ""
    yield from _environment(plan, width)


def _wrapped(text: str, width: int) -> list[str]:
    """Return the text in lines, never broken between a number and its unit, or between `run` and the run's id."""
    held = _HELD.sub("\0", text)
    lines = textwrap.wrap(held, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _drift(run_facts: RunFacts, answer: Answer) -> str:
    run = f"run {run_facts.run_id}{' (finished)' * run_facts.is_finished}"
    if run_facts.drift is None:
        return f"the job of {run} cannot be read"
    if not run_facts.drift:
        return f"none since {run}"
    return f"since {run}; {_ANSWERS[answer]}:"


def _differences(drift: Sequence[Difference], width: int) -> Iterator[str]:
    """Yield the table of differences; a reason that does not fit on the line is on the next one."""
    for line in drift_lines(drift, lambda text, weight: paint(text, _COLOURS[weight], bold=True)):
        if len(line) <= width:
            yield line
            continue
        change, _, reason = line.rpartition("  ")
        yield change.rstrip()
        yield from textwrap.wrap(reason, width, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _environment(plan: LaunchPlan, width: int) -> Iterator[str]:
    """Yield the variables in groups, each below its reason."""
    groups: dict[str, list[str]] = {}
    for name, value in plan.environment.items():
        groups.setdefault(plan.reasons[name], []).append(f"{name}={shlex.quote(value)}")
    for reason, settings in groups.items():
        for line in textwrap.wrap(reason, width - 2):
            yield paint(f"# {line}", dim=True)
        yield from settings
    if plan.env or plan.env_secrets:
        yield paint("# [env] of the job, before torch is imported", dim=True)
    yield from (f"{name}={shlex.quote(value)}" for name, value in plan.env.items())
    yield from (f"{name}=***" for name in plan.env_secrets)
