"""Tables of a file's cases: what they are, and what became of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.cli.facts import COLOURS, evaluation_of
from elasticflow.cli.terminal import paint
from elasticflow.observe.status import read_status
from elasticflow.observe.terminal.formats import number, plural, span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.run_folder import RunFolder


class CaseResult(NamedTuple):
    """What became of one case.

    Attributes:
        case: Its name.
        run: Its run folder; it need not exist.
        outcome: A word or two: as in `elasticflow runs`, or why there is no run.
        seconds: Spent on it now; None: nothing was done.
    """

    case: str
    run: RunFolder
    outcome: str
    seconds: float | None = None


def cases_text(path: Path, jobs: Sequence[LoadedJob]) -> Iterator[str]:
    """Yield the lines that tell which cases a file has, and what each changes."""
    from elasticflow.jobfile.diagnostics.toml_literals import dotted, show

    yield f"{path}: {plural(len(jobs), 'case')} of one file"
    yield ""
    keys = list(dict.fromkeys(key for job in jobs for key in job.changes))
    rows = [
        (job.case or "", *(show(job.changes[key]) if key in job.changes else "-" for key in keys))
        for job in jobs
    ]
    yield from _table(("CASE", *map(dotted, keys)), rows)
    yield ""
    yield f"one of them:  elasticflow plan {path} --case {jobs[0].case}"
    yield f"train one:    elasticflow run {path} --case {jobs[0].case}"
    yield f"train all:    elasticflow run {path} --all"


def results_text(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield the lines of the summary of `run --all`."""
    header = ("CASE", "RUN", "OUTCOME", "STEP", "LOSS", "EVALUATION", "TIME")
    rows, colours = [], []
    for each in results:
        found = read_status(each.run)
        of = "" if found.steps is None else f"/{found.steps}"
        is_there = found.launch > 0
        rows.append(
            (
                *(each.case, each.run.run_id if is_there else "-", each.outcome),
                f"{found.step}{of}" if is_there else "-",
                number(found.loss),
                evaluation_of(found) or "-",
                "-" if each.seconds is None else span(each.seconds),
            )
        )
        colours.append({str(key): value for key, value in COLOURS.items()}.get(each.outcome.split(",")[0]))
    yield from _table(header, rows, colours)


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], colours: Iterable[str | None] = ()
) -> Iterator[str]:
    """Yield a header and the rows; each row's third cell in its colour."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    yield paint(_line(header, widths), dim=True)
    painted = list(colours) or [None] * len(rows)
    for row, colour in zip(rows, painted, strict=True):
        if colour is None:
            yield _line(row, widths)
            continue
        cells = [f"{text:<{width}}" for text, width in zip(row, widths, strict=True)]
        cells[2] = paint(cells[2], colour)
        yield "  ".join(cells).rstrip()


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
