"""`elasticflow validate [FILE]...`: check job files without running anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from elasticflow.cli.output import counts_of, report_findings, shortest_path
from elasticflow.cli.parameters import JOB_FILE, findings_option, overrides_option, strict_option
from elasticflow.cli.write.deep_options import deep_options, requested, try_out_all
from elasticflow.jobfile.diagnostics.diagnostic import in_order
from elasticflow.observe.terminal.formats import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.render_text import Format
    from elasticflow.jobfile.load import LoadedJob

_SERVER_CHECK = "elasticflow submit kubernetes {} --print | kubectl apply --dry-run=server -f -"


@click.command("validate")
@click.argument("files", nargs=-1, metavar="[FILE]...", type=JOB_FILE)
@overrides_option
@strict_option
@findings_option
@deep_options
def command(
    files: tuple[Path, ...],
    overrides: tuple[str, ...],
    output_format: str,
    *,
    strict: bool,
    deep: bool,
    deep_step: bool,
    deep_timeout: int | None,
) -> int:
    """Check job files: keys, types, the whole node range, and entry points by reading their source.

    Nothing is run or imported, neither your code nor torch, unless with --deep. Exit code 0 without errors, 1 with.
    A folder stands for the job files in it: jobs/*.toml and *.job.toml at any depth, or if there are none its own TOML
    files; default: the project. Files called base.toml, *.base.toml or _*.toml may lack required keys, as other files
    extend them.

    \b
    elasticflow validate
    elasticflow validate jobs/*.toml
    elasticflow validate --deep jobs/mnist.toml        calls your code, in a child process
    elasticflow validate jobs/mnist.toml --set nodes.max=8
    elasticflow validate --format github jobs/*.toml
    """
    request = requested(deep=deep, deep_step=deep_step, deep_timeout=deep_timeout)
    jobs = _loaded(_job_files(files), overrides)
    diagnostics, learnt = [diagnostic for job in jobs for diagnostic in job.diagnostics], ""
    if request is not None:
        deeper, learnt = try_out_all(jobs, overrides, request)
        diagnostics += deeper
    diagnostics = in_order(diagnostics)  # two jobs may share a base
    style = cast("Format", output_format)
    shown = [
        diagnostic
        for diagnostic in diagnostics
        if diagnostic.severity != "note" or style in {"json", "sarif"}
    ]
    return report_findings(
        diagnostics, shown, style, lambda: learnt + _summary(diagnostics, jobs, strict=strict), strict=strict
    )


def _job_files(given: Sequence[Path]) -> list[Path]:
    """Return the given files, with folders replaced by the job files in them."""
    from elasticflow.jobfile.project import current_project_root, job_files_in

    found: list[Path] = []
    for path in given or [current_project_root()]:
        if not path.is_dir():
            found.append(path)
            continue
        inside = job_files_in(path)
        if not inside:
            raise click.UsageError(
                f"there is no job file in {path}: give one, or write one with `elasticflow init`"
            )
        found += [Path(shortest_path(each)) for each in inside]
    return found


def _loaded(files: Sequence[Path], overrides: Sequence[str]) -> list[LoadedJob]:
    """Return the jobs of the files; a file that is given twice, even under two paths, is read once."""
    from elasticflow.jobfile.load import load_job
    from elasticflow.jobfile.project import is_base
    from elasticflow.jobfile.validate_source import ValidationCache

    once = {os.path.realpath(file): file for file in reversed(files)}
    cache = ValidationCache.empty()
    loaded = [load_job(file, overrides, cache=cache) for file in reversed(once.values())]
    return [job.as_base() if is_base(job.path) else job for job in loaded]


def _summary(diagnostics: Sequence[Diagnostic], jobs: Sequence[LoadedJob], *, strict: bool) -> str:
    from elasticflow.jobfile.diagnostics import codes

    num_cases = sum(len(job.cases) for job in jobs)
    cases = f" ({plural(num_cases, 'case')})" if num_cases else ""
    text = f"{plural(len(jobs), 'file')}{cases} checked: {counts_of(diagnostics) or 'no problems'}"
    if strict and counts_of(diagnostics, ["warning"]):
        text += " (with --strict, warnings are errors)"
    absent = sorted(
        {
            diagnostic.message.partition(": ")[2]
            for diagnostic in diagnostics
            if diagnostic.severity == "note" and diagnostic.code == codes.NOT_INSTALLED
        }
    )
    if absent:
        text += f" (some entry points were not looked at: {', '.join(absent)})"
    if patched := [
        each for each in jobs if (job := each.valid_job) and job.kubernetes and job.kubernetes.patch
    ]:
        text += (
            f"\nkubernetes.patch is not read here; this checks it: {_SERVER_CHECK.format(patched[0].path)}"
        )
    return text
