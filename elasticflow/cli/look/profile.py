"""`elasticflow profile [RUN]`: a trace of where a step's time is spent, while the run continues."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from elasticflow import events
from elasticflow.cli.output import cut, paint, print_json, run_word, shortest_path, table, terminal_width
from elasticflow.cli.parameters import RUN, format_option
from elasticflow.errors import (
    ANSWER_IS_NO,
    FINISHED,
    LaunchFolderError,
    NotRunningError,
    ProfileError,
    TrialRefusedError,
)
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.profile_trace import read_trace, top
from elasticflow.observe.records import parse
from elasticflow.observe.runs import find_run
from elasticflow.observe.status import is_locked, read_status
from elasticflow.observe.terminal.formats import plural, size, span
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.messages import MOST_PROFILED, ProfileRequest
from elasticflow.protocol.run_files import resume_command
from elasticflow.system import atomic_files
from elasticflow.system.json_lines import FollowedLines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from elasticflow.observe.profile_trace import Operator, Trace
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

_POLL_S = 0.2
_TELL_S = 2.0
_LONGEST_NAME = 44


@click.command("profile")
@click.argument("run", type=RUN, required=False)
@click.option(
    "--steps",
    type=click.IntRange(1, MOST_PROFILED),
    default=5,
    show_default=True,
    help="Number of steps to trace.",
)
@click.option("--ranks", default="0", show_default=True, metavar="RANKS", help="Ranks to trace: 0,3 or all.")
@click.option("--shapes", is_flag=True, help="Tell operators apart by the shapes of their inputs.")
@click.option("--memory", is_flag=True, help="Trace what operators allocate and free.")
@click.option("--stacks", is_flag=True, help="Also trace the Python functions: large, and slow.")
@click.option(
    "--sort",
    type=click.Choice(["self", "total", "calls"]),
    default="self",
    show_default=True,
    help="Order of rows.",
)
@click.option("--top", "most", type=click.IntRange(0), default=15, show_default=True, help="Rows; 0: all.")
@click.option(
    "--show", type=click.IntRange(1), metavar="NUMBER", help="Show the traces of an earlier request."
)
@click.option("--no-wait", is_flag=True, help="Make the request and exit.")
@format_option
def command(
    *,
    run: str | None,
    steps: int,
    ranks: str,
    shapes: bool,
    memory: bool,
    stacks: bool,
    sort: str,
    most: int,
    show: int | None,
    no_wait: bool,
    form: str,
) -> int:
    """Trace the next steps of RUN with torch's profiler, while it trains, and show what takes the time.

    RUN is a run folder, a run id, or a job's name; default: the newest run. Nothing is restarted, and the weights are
    those of a run without a trace. One step warms up, then --steps are recorded; the trace is written to the run folder
    (profiles/NUMBER) and opens in https://ui.perfetto.dev or chrome://tracing. Ctrl-C withdraws the request.

    \b
    elasticflow profile
    elasticflow profile mnist --steps 10 --ranks all
    elasticflow profile mnist --show 1 --sort total
    """
    folder = find_run(current_project_root(), run)
    if show is None:
        request = ProfileRequest(steps, _ranks(folder, ranks), shapes, memory, stacks)
        show = _ask(folder, request)
        if no_wait:
            click.echo(f"asked: elasticflow profile {run_word(folder)} --show {show}", err=True)
            if form == "json":
                print_json({"profile": show})
            return FINISHED
        if unanswered := _wait(folder, show, request):
            _show(folder, show, sort, most, form)
            click.echo(f"{', '.join(unanswered)}: the run ended before the trace was there", err=True)
            return ANSWER_IS_NO
    return _show(folder, show, sort, most, form)


def _ranks(folder: RunFolder, text: str) -> tuple[int, ...]:
    status = read_status(folder)
    if not is_locked(folder) and status.pid is None:
        again = (
            f"{resume_command(run_word(folder), status.resume_command)} continues it; "
            if status.status == "interrupted"
            else ""
        )
        raise NotRunningError(
            f"run {folder.run_id} is {status.status}: only a run that is training can be traced",
            f"{again}--show NUMBER shows traces that are there",
        )
    if status.has_no_steps and not _may_report_steps(folder):
        raise ProfileError(
            f"run {folder.run_id} trains by {status.script}, which has no loop on elasticflow.join: "
            "where its steps begin and end is not known",
            "torch.profiler in the script traces it; elasticflow guide own-loop",
        )
    here = sorted(worker.rank for worker in status.workers)
    if text == "all" and here:
        return tuple(here)
    if not re.fullmatch(r"\d+(,\d+)*", text) and text != "all":
        raise ProfileError(f"--ranks {text}: not a list of ranks", "write --ranks 0,3 or --ranks all")
    ranks = tuple(sorted({int(each) for each in text.split(",")})) if text != "all" else (0,)
    if here and (absent := [rank for rank in ranks if rank not in here]):
        raise ProfileError(
            f"--ranks {text}: the run has no rank {absent[0]}", f"it has ranks 0 to {here[-1]} now"
        )
    return ranks


def _may_report_steps(folder: RunFolder) -> bool:
    """Return False if the source of the run's script shows that it never calls `elasticflow.join`."""
    from elasticflow.compiler.launch_folder import made_in
    from elasticflow.trials.trial import require_own_loop

    # A record or a script that cannot be read shows nothing.
    with contextlib.suppress(LaunchFolderError, IndexError, OSError):
        try:
            require_own_loop(made_in(folder.launch(folder.launch_numbers()[-1])).job, folder.project_root)
        except TrialRefusedError:
            return False
    return True


def _ask(folder: RunFolder, request: ProfileRequest) -> int:
    number = max((int(p.name) for p in folder.profiles.glob("*") if p.name.isdecimal()), default=0) + 1
    while True:
        path = folder.profile_request(number)
        try:
            path.parent.mkdir(parents=True)
        except FileExistsError:  # another process makes a request at this moment
            number += 1
            continue
        except OSError as error:
            raise ProfileError(
                f"run {folder.run_id} cannot be asked for a trace: {path.parent} cannot be made: {error.strerror}",
                "the user who has started the run can ask for it",
            ) from error
        atomic_files.replace(path, [to_json(request).encode()], sync=False)
        return number


def _wait(folder: RunFolder, number: int, request: ProfileRequest) -> list[str]:
    """Wait until each rank has answered, or the run has ended; return the ranks that have not answered.

    Raises:
        NotRunningError: the run ended, and no rank has answered.
    """
    story = _Story(folder, number)
    began = told = time.monotonic()
    try:
        while story.awaited(request):
            is_running = is_locked(folder)
            story.read()
            if not is_running:
                break  # all its events are read
            if time.monotonic() >= told + _TELL_S:
                told = time.monotonic()
                click.echo(f"{story.waits_for}, {told - began:.0f} s", err=True)
            time.sleep(_POLL_S)
    finally:
        # This withdraws the request, unless the supervisor has taken it.
        if not story.names:
            folder.profile_request(number).unlink(missing_ok=True)
    if not story.answers:
        raise NotRunningError(
            f"run {folder.run_id} ended before the trace was there", f"elasticflow why {run_word(folder)}"
        )
    return [f"rank {rank}" for rank in story.awaited(request)]


class _Story:
    """Events of a run about one request.

    Attributes:
        answers: By rank, the event that ended the rank's part; rank None answers a request that could not be read.
    """

    def __init__(self, folder: RunFolder, number: int) -> None:
        self._number = number
        self._lines = FollowedLines(folder.events)
        self.names: set[str] = set()
        self.answers: dict[int | None, Record] = {}
        self.read()

    def read(self) -> None:
        """Read the new events."""
        for line in self._lines.lines():
            if b'"profile.' not in line or (record := parse(line)) is None:
                continue
            if record.get("profile") == self._number:
                self.names.add(str(record["event"]))
                if record["event"] in (events.PROFILE_FINISHED, events.PROFILE_FAILED):
                    self.answers[record.get("rank")] = record

    def awaited(self, request: ProfileRequest) -> list[int]:
        """Return the ranks that are still to answer *request*."""
        return [] if None in self.answers else [rank for rank in request.ranks if rank not in self.answers]

    @property
    def waits_for(self) -> str:
        """State that the request waits for."""
        if events.PROFILE_STARTED in self.names:
            return "tracing"
        if events.PROFILE_REQUESTED in self.names:
            return "waiting for the end of a step"
        return "waiting until the run trains, and traces that were asked for before are there"


def _show(folder: RunFolder, number: int, sort: str, most: int, form: str) -> int:
    found = folder.traces(number)
    answers = _Story(folder, number).answers
    failed = [record for record in answers.values() if record["event"] == events.PROFILE_FAILED]
    for record in failed:
        whose = "" if record.get("rank") is None else f"rank {record['rank']}: "
        click.echo(f"{whose}{record.get('reason')}", err=True)
    elsewhere = [
        record
        for record in answers.values()
        if record["event"] == events.PROFILE_FINISHED and record.get("rank") not in found
    ]
    for record in elsewhere:
        click.echo(
            f"rank {record.get('rank')}: its trace lies on node {record.get('node')}: {record.get('path')}",
            err=True,
        )
    if not found and not elsewhere and not failed:
        there = [str(each) for each in folder.profile_numbers() if folder.traces(each)]
        raise ProfileError(
            f"run {folder.run_id} has no trace {number}",
            f"it has {', '.join(there)}" if there else f"elasticflow profile {folder.run_id} writes one",
        )
    if form == "json":
        print_json([_as_json(rank, path, answers.get(rank, {}), sort, most) for rank, path in found.items()])
    else:
        for rank, path in found.items():
            click.echo("\n".join(_text(rank, path, answers.get(rank, {}), sort, most)))
    return ANSWER_IS_NO if failed else FINISHED


def _as_json(rank: int, path: Path, record: Record, sort: str, most: int) -> dict[str, Any]:
    trace = read_trace(path)
    return {
        "rank": rank,
        "path": str(path),
        "first_step": record.get("first_step"),
        "last_step": record.get("last_step"),
        "steps_us": trace.steps_us,
        "parts_us": trace.parts,
        "operators": [asdict(each) for each in top(trace.operators, sort, most)],
        "kernels": [asdict(each) for each in top(trace.kernels, sort, most)],
    }


def _text(rank: int, path: Path, record: Record, sort: str, most: int) -> Iterator[str]:
    trace = read_trace(path)
    count = len(trace.steps_us)
    which = f" ({record['first_step']} to {record['last_step']})" if "first_step" in record else ""
    yield paint(f"rank {rank}: {plural(count, 'step')}{which}{_lengths(trace)}", bold=True)
    if count:
        yield from _parts(trace)
    yield ""
    yield from _operators("OPERATOR", trace.operators, count, sort, most)
    if trace.kernels:
        yield ""
        yield from _operators("KERNEL", trace.kernels, count, sort, most)
    yield ""
    yield f"{shortest_path(path)}, {size(path.stat().st_size)}"
    yield "open it in https://ui.perfetto.dev"


def _lengths(trace: Trace) -> str:
    if not trace.steps_us:
        return ""
    middle = sum(trace.steps_us) / len(trace.steps_us)
    return f", {_time(middle)} each ({_time(min(trace.steps_us))} to {_time(max(trace.steps_us))})"


def _parts(trace: Trace) -> Iterator[str]:
    whole = sum(trace.steps_us)
    rows = [(name, _time(us / len(trace.steps_us)), f"{us / whole:.0%}") for name, us in trace.parts.items()]
    yield ""
    yield from table(("PART", "A STEP", "SHARE"), rows)


def _operators(title: str, operators: Sequence[Operator], count: int, sort: str, most: int) -> Iterator[str]:
    whole = sum(each.self_us for each in operators) or 1.0
    rows = [
        (
            cut(f"{each.name} {each.shapes}".strip(), _LONGEST_NAME),
            _time(each.self_us / max(count, 1)),
            f"{each.self_us / whole:.0%}",
            _time(each.total_us / max(count, 1)),
            f"{each.calls / max(count, 1):.0f}",
        )
        for each in top(operators, sort, most)
    ]
    header = (title, "SELF", "SHARE", "TOTAL", "CALLS")
    yield from table(header, rows, width=terminal_width(), first_to_go=("TOTAL", "SHARE"))
    if most and len(operators) > most:
        yield paint(f"a step of each; {len(operators) - most} more with --top 0", dim=True)


def _time(microseconds: float) -> str:
    """Return `437 us`, `4.1 ms`, `0.35 s`."""
    if microseconds < 999.5:
        return f"{microseconds:.0f} us"
    return f"{microseconds / 1e3:.1f} ms" if microseconds < 99_950 else span(microseconds / 1e6)
