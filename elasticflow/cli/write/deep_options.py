"""`--deep`: its options, the trial of a job's own code, and a line about the results."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.deep.check import DeepReport
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.load import LoadedJob

_TRIED_OUT = ("model", "optimizer", "lr_scheduler", "dataset", "evaluation", "hooks", "train", "ddp", "parallel", "env")  # fmt: skip
_LIMIT_S = 60


class DeepRequest(NamedTuple):
    """A request to try a job's own code: with or without a training step, and the most seconds it may take."""

    takes_step: bool
    limit_s: int


def deep_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--deep`, `--deep-step` and `--deep-timeout`."""
    for option in (
        click.option(
            "--deep-timeout",
            metavar="SECONDS",
            type=click.IntRange(1, 86_400),
            help=f"Most seconds that --deep takes for each job; default: {_LIMIT_S}.",
        ),
        click.option(
            "--deep-step",
            is_flag=True,
            help="Like --deep; also train one step of a few samples on the CPU, and restart from it.",
        ),
        click.option(
            "--deep",
            is_flag=True,
            help="Import and call the job's own code, in a child process: build model and optimizer, read samples.",
        ),
    ):
        command = option(command)
    return command


def requested(*, deep: bool, deep_step: bool, deep_timeout: int | None) -> DeepRequest | None:
    """Return the request of these options; None without --deep and --deep-step.

    Raises:
        UsageError: --deep-timeout is given alone.
    """
    if deep or deep_step:
        return DeepRequest(deep_step, deep_timeout or _LIMIT_S)
    if deep_timeout is not None:
        raise click.UsageError("--deep-timeout limits --deep, which is not given")
    return None


def try_out_loaded(loaded: LoadedJob, request: DeepRequest) -> tuple[DeepReport, list[Diagnostic]]:
    """Return the report of trying out a job without errors, and its findings, each at its place in the job file."""
    from elasticflow.deep.check import check_deep_facts, diagnostics_of, try_out
    from elasticflow.errors import TrialRefusedError

    if loaded.job.script is not None:
        raise TrialRefusedError(
            "--deep tries out what a job file names, and a job with [script] names a script, which would train",
            "leave --deep out: the script was read, and is valid Python; its first launch shows the rest",
        )
    from elasticflow.observe.terminal.screen import WaitingLine

    case = "" if loaded.case is None else f" (case {loaded.case})"
    with WaitingLine(sys.stderr, os.environ) as waiting:
        report = try_out(
            loaded.job,
            loaded.project_root,
            limit_s=request.limit_s,
            takes_step=request.takes_step,
            watch=partial(waiting.tell, f"trying out {loaded.path}{case}"),
        )
    source, facts = loaded.source, report.facts
    known = check_deep_facts(
        source,
        loaded.job,
        samples=facts.samples,
        snapshot_bytes=facts.snapshot_bytes,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    # The reader has seen these findings already, with more detail.
    shown = {(diagnostic.code, diagnostic.where) for diagnostic in loaded.diagnostics}
    new = [diagnostic for diagnostic in known if (diagnostic.code, diagnostic.where) not in shown]
    return report, [*diagnostics_of(report, source), *new]


def try_out_all(
    jobs: Sequence[LoadedJob], overrides: Sequence[str], request: DeepRequest
) -> tuple[list[Diagnostic], str]:
    """Return the findings about several jobs, and lines with the results of each.

    References to the environment are looked up. Cases of a file that are the same to `--deep` are tried out once.

    Raises:
        TrialRefusedError: the only job has a script; among other jobs, a line says so.
    """
    from elasticflow.jobfile.diagnostics import codes
    from elasticflow.jobfile.load import load_job

    diagnostics: list[Diagnostic] = []
    lines = []
    for loaded in jobs:
        if loaded.has_errors:
            lines.append(f"{loaded.path}: not tried out: it has errors\n")
            continue
        if loaded.valid_job is None and not loaded.cases:
            lines.append(f"{loaded.path}: not tried out: by its name it is a part of other job files\n")
            continue
        here = load_job(loaded.path, overrides, environment=os.environ)
        if here.has_errors:
            errors = [each for each in here.diagnostics if each.severity == "error"]
            diagnostics += [
                each._replace(severity="warning") if each.code == codes.NOT_SET else each for each in errors
            ]
            lines.append(f"{loaded.path}: not tried out: it has errors with this machine's variables\n")
            continue
        for cases in cases_alike(here, overrides):
            if len(jobs) > 1 and cases[0].job.script is not None:
                lines.append(f"{loaded.path}: not tried out: its script would train\n")
                continue
            report, findings = try_out_loaded(cases[0], request)
            of_cases = _in_words(cases)
            diagnostics += [finding._replace(message=f"{finding.message}{of_cases}") for finding in findings]
            text = report_text(report)
            lines += [f"{loaded.path}{of_cases}: {text}\n"] * bool(text)
    return diagnostics, "".join(lines)


def cases_alike(loaded: LoadedJob, overrides: Sequence[str]) -> list[list[LoadedJob]]:
    """Return the cases of a file in groups of cases that are the same to `--deep`; a file without cases is one group."""
    import json

    from elasticflow.compiler.provenance.job_json import job_to_json
    from elasticflow.jobfile.load import require_cases

    if not loaded.cases:
        return [[loaded]] if loaded.valid_job is not None else []
    groups: dict[str, list[LoadedJob]] = {}
    for case in require_cases(loaded.path, overrides, environment=os.environ):
        tables = job_to_json(case.job)
        # A job with [script] has none of these tables.
        what = [tables.get(name) for name in _TRIED_OUT]
        what += [tables["job"]["path"], tables["snapshots"]["include"], tables["snapshots"]["ignore"]]
        groups.setdefault(json.dumps(what, sort_keys=True), []).append(case)
    return list(groups.values())


def _in_words(cases: Sequence[LoadedJob]) -> str:
    """Return ` (case wide and 3 more)`; nothing for a file without cases."""
    if cases[0].case is None:
        return ""
    more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
    return f" (case {cases[0].case}{more})"


def report_text(report: DeepReport) -> str:
    """Return the results in words; empty if there are none."""
    from elasticflow.observe.terminal.formats import groups_in_words, plural, size

    facts, parts = report.facts, []
    if facts.samples is not None:
        of = "" if facts.sample is None else f" of {facts.sample}"
        parts.append(f"{plural(facts.samples, 'sample')}{of}")
    if facts.parameters is not None and facts.trainable is not None:
        frozen = facts.parameters - facts.trainable
        parts.append(
            plural(facts.parameters, "parameter") + (f", {frozen:,} of them frozen" if frozen else "")
        )
    if facts.groups is not None:
        parts.append(f"in groups: {groups_in_words(facts.groups)}")
    if facts.snapshot_bytes is not None:
        parts.append(f"a snapshot is about {size(facts.snapshot_bytes)}")
    if facts.loss is not None:
        parts.append(f"loss of the first step {float(facts.loss):.4g}")
    return "; ".join([*parts, *report.notes])
