"""`elasticflow report [RUN...]`: a run, or several side by side, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import shortest_path, warn, write_file
from elasticflow.cli.parameters import RUN, Completed
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.runs import find_run, list_runs

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder

_NAME = "report.html"


@click.command("report")
@click.argument("runs", type=RUN, metavar="[RUN]...", nargs=-1)
@click.option(
    "--sweep",
    type=Completed("job_files"),
    metavar="JOB",
    help="The newest run of each case of JOB's [matrix].",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Where to write it; default: report.html in the run folder, or in runs/ for several.",
)
def command(runs: tuple[str, ...], sweep: str | None, output: Path | None) -> None:
    """Write a report of RUN, or of several runs side by side, as one HTML file that needs no network and no server.

    It shows the run's state, its use of time, its events, the curves of all measurements, its generations, snapshots,
    restart budget, job and environment. A run is a run folder, a run id, or a job's name; default: the newest run.

    \b
    elasticflow report                          the newest run
    elasticflow report mnist -o /tmp/mnist.html
    elasticflow report first second third       what differs, and how they did
    elasticflow report --sweep jobs/sweep.toml  every case of a sweep
    """
    if sweep is not None and runs:
        raise click.UsageError("--sweep chooses the runs itself: give it, or runs")
    root = current_project_root()
    folders = (
        [find_run(root, run, by_hand=True) for run in runs or (None,)]
        if sweep is None
        else _of_sweep(root, sweep)
    )
    is_one = len(folders) == 1 and sweep is None
    target = output or (folders[0].path if is_one else root / "runs") / _NAME
    size = write_file(target, _text(folders, target, sweep))
    click.echo(f"wrote {shortest_path(target)} ({size / 1000:,.0f} kB)")


def _text(folders: list[RunFolder], target: Path, sweep: str | None) -> str:
    from elasticflow.observe.remote_logs import fetch
    from elasticflow.report.facts import facts_of
    from elasticflow.report.page import render_comparison, render_run

    for folder in folders:
        if (failure := fetch(folder, logged=True)) is not None:
            warn(failure)
    facts = [facts_of(folder, target) for folder in folders]
    if sweep is not None:
        return render_comparison(facts, title=sweep, is_sweep=True)
    if len(facts) == 1:
        return render_run(facts[0])
    return render_comparison(facts, title=", ".join(each.name for each in facts), is_sweep=False)


def _of_sweep(root: Path, job: str) -> list[RunFolder]:
    """Return the newest run of each case, in the order of the cases' names.

    Args:
        job: The file with [matrix], or the job's name in it, which begins the names of the cases.
    """
    from elasticflow.errors import RunNotFoundError
    from elasticflow.jobfile.load import require_cases
    from elasticflow.report.facts import case_of

    of_file = None
    if job.endswith(".toml"):
        loaded = require_cases(Path(job), environment=None)
        of_file = {each.job.job.name for each in loaded}
    newest: dict[str, RunFolder] = {}
    for folder in list_runs(root):
        case = case_of(folder)
        if case is not None and (folder.job in of_file if of_file else folder.job == f"{job}-{case}"):
            newest.setdefault(case, folder)
    if not newest:
        remedy = "train its cases: elasticflow run FILE --all; `elasticflow report RUN RUN` compares any runs"
        raise RunNotFoundError(f'no run of job "{job}" trains a case of a [matrix]', remedy)
    return [newest[case] for case in sorted(newest)]
