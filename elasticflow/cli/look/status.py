"""`elasticflow status [RUN]`: the state of a run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, print_json, run_headline, run_word, shortest_path, show_damage
from elasticflow.cli.parameters import RUN, format_option
from elasticflow.errors import ANSWER_IS_NO, EXIT_CODES, FINISHED, INTERRUPTED
from elasticflow.jobfile.project import current_project_root
from elasticflow.observe.by_hand import RunByHand
from elasticflow.observe.history import RunHistory
from elasticflow.observe.incidents import note_rows, notes_of
from elasticflow.observe.run_board import doing_in_phase
from elasticflow.observe.runs import find_run
from elasticflow.observe.standbys import in_words
from elasticflow.observe.status import read_status
from elasticflow.observe.terminal.event_lines import of_weights, said_on_stderr, user_frames, values
from elasticflow.observe.terminal.formats import elapsed, local_time, number, percent, plural, took
from elasticflow.observe.terminal.measures import device_rows, parts_of_step, percent_of_peak
from elasticflow.protocol.run_files import GRAD_NORM, resume_command
from elasticflow.run_folder import step_of

if TYPE_CHECKING:
    from elasticflow.observe.status import RunStatus

# `status` shows this many notes of a kind at most; `why` shows all.
_MOST_NOTES = 5


@click.command("status")
@click.argument("run", type=RUN, required=False)
@click.option("-f", "--follow", "is_following", is_flag=True, help="Follow the run until its launch ends.")
@click.option(
    "--exit-code",
    "with_exit_code",
    is_flag=True,
    help="Exit with the run's exit code; 75 while it is not over.",
)
@format_option
def command(run: str | None, form: str, *, is_following: bool, with_exit_code: bool) -> int:
    """Show how RUN is doing.

    RUN is a run folder, a run id, or a job's name; default: the newest run. With --follow, the command shows the newest
    launch from its beginning and then live, like the terminal in which the run was started. Ctrl-C ends the view, not
    the run.

    \b
    elasticflow status
    elasticflow status --follow
    elasticflow status mnist --format json
    elasticflow status mnist --exit-code || echo "not finished"
    """
    folder = find_run(current_project_root(), run, by_hand=True)
    if is_following:
        if form == "json":
            raise click.UsageError("--follow is for people: a program follows events.jsonl in the run folder")
        if isinstance(folder, RunByHand):
            raise click.UsageError(
                f"no supervisor tells what happens to {folder.job} {folder.run_id}: elasticflow logs {run or folder.job} --follow"
            )
        from elasticflow.cli.look.follow import follow

        follow(folder)
        return exit_code_of(read_status(folder)) if with_exit_code else FINISHED
    status = read_status(folder)
    show_damage(folder)
    history = RunHistory.read(folder)
    if form == "json":
        more = {
            "steps_done_again": history.redone,
            "not_held": history.not_held,
            "held_pauses": history.held_pauses,
        }
        print_json({**status.to_json(), **more, **notes_of(history)})
    else:
        _print(status, history)
    return exit_code_of(status) if with_exit_code else FINISHED


def exit_code_of(status: RunStatus) -> int:
    """Return the exit code of a run's newest launch; 75 while it runs, or if it ended without a record."""
    if status.status in {"running", "interrupted"}:
        return INTERRUPTED
    code = (status.verdict or {}).get("ends_with")
    default = (
        FINISHED if status.status == "finished" else ANSWER_IS_NO
    )  # a run of a version that did not record the code
    return code if isinstance(code, int) and code in EXIT_CODES else default


def _print(status: RunStatus, history: RunHistory) -> None:
    folder = status.folder
    click.echo(run_headline(status))
    for name, text in _rows(status, history):
        click.echo(f"  {paint(f'{name:<11}', dim=True)} {text}")
    for label, text in note_rows(history, _MOST_NOTES):
        click.echo(f"  {paint(f'{label:<11}', 'yellow')} {text}")
    _print_failure(status)
    if status.status == "interrupted" and isinstance(folder, RunByHand):
        click.echo("continue with: the command that started it")
    elif status.status == "interrupted":
        click.echo(f"continue with: {resume_command(run_word(folder), status.resume_command)}")


def _rows(status: RunStatus, history: RunHistory) -> list[tuple[str, str]]:
    rows = [] if status.script is None else [("script", status.script)]
    rows += [] if status.has_no_steps else [("step", status.progress)]
    if (doing := status.doing) is None and status.status == "running":
        doing = doing_in_phase(history)  # as before the first worker is there
    if doing is not None:
        rows.append(("now", f"{doing.label}: {doing.lasting(time.time())}"))
    stopped = (status.verdict or {}).get("stopped")
    if stopped is not None:
        rows.append(("stopped by", stopped))
    if status.loss is not None:
        measures = {**status.scalars, GRAD_NORM: status.grad_norm}
        rows.append(("loss", ", ".join([number(status.loss), *parts_of_step(measures)])))
    if status.evaluation:
        best = (
            ""
            if status.best is None
            else f", best {status.best_of or ''} {number(status.best)}".replace("  ", " ")
        )
        metrics = of_weights(status.evaluation, status.weights)
        raw = f"; raw: {values(status.evaluation_raw)}" if status.evaluation_raw else ""
        rows.append(("evaluation", f"{metrics} at step {status.evaluated_step}{best}{raw}"))
    rows += _speed(status)
    if status.snapshot is not None:
        rows.append(("snapshot", f"step {step_of(status.snapshot)}, {status.snapshot}"))
    rows += _in_memory(status, history)
    if status.workers:
        who = ", ".join(f"rank {w.rank} pid {w.pid}" for w in status.workers[:8])
        more = f" and {len(status.workers) - 8} more" if len(status.workers) > 8 else ""
        on = "" if status.device is None else f" on {status.device}"
        rows.append(("workers", f"{plural(len(status.workers), 'worker')}{on}: {who}{more}"))
    rows += [("" if n else "devices", text) for n, text in enumerate(device_rows(status.devices))]
    if status.standbys:
        rows.append(("standbys", in_words(status.standbys)))
    if status.compilation is not None:
        rows.append(("compiler", status.compilation.in_words()))
    rows.append(("launch", _launch(status)))
    rows += [("done again", plural(history.redone, "step"))] * bool(history.redone)
    rows += _times(status)
    rows.append(("folder", shortest_path(status.folder.path)))
    return rows


def _in_memory(status: RunStatus, history: RunHistory) -> list[tuple[str, str]]:
    if status.held is not None:
        rows = [("in memory", f"step {status.held}")]
        if history.held_pauses is not None:
            rows.append(("", f"no later step while a snapshot is being written: {history.held_pauses}"))
        return rows
    if status.status == "running" and history.not_held is not None:
        return [("in memory", f"nothing: {history.not_held}")]
    return []


def _speed(status: RunStatus) -> list[tuple[str, str]]:
    if status.status != "running" or status.samples_per_s is None:
        return []
    left = "" if status.seconds_left is None else f", {elapsed(status.seconds_left).split('.')[0]} left"
    counted = [f"{per_s:,.0f} {name}/s" for name, per_s in status.counted_per_s.items()]
    speed = [f"{status.samples_per_s:,.0f} samples/s", *counted, *percent_of_peak(status.mfu)]
    return [("speed", f"{', '.join(speed)}{left}")]


def _launch(status: RunStatus) -> str:
    if isinstance(status.folder, RunByHand):
        return f"by hand, without a supervisor; generation {status.generation}"
    left = "" if status.budget_left is None else f", {status.budget_left:,} left"
    return (
        f"launch {status.launch}, generation {status.generation}, {plural(status.restarts, 'restart')}{left}"
    )


def _times(status: RunStatus) -> list[tuple[str, str]]:
    rows = [("started", local_time(status.started))]
    if status.launch > 1:
        rows.append(("launched", local_time(status.launched)))
    if status.status != "running":
        rows.append(("ended", local_time(status.updated)))
    if status.lost is not None:
        rows.append(("lost", f"the supervisor ended without a word: {status.lost.known}"))
        rows += [("likely", status.lost.likely)] if status.lost.likely else []
    if status.durations or status.launch_durations:
        of_one = "" if status.durations else " by the newest launch"
        parts = status.durations or status.launch_durations
        rows.append(("took", took(parts, is_blind=status.has_no_steps) + of_one))
        if status.goodput is not None:
            rows.append(("goodput", f"{percent(status.goodput)} of the time trained steps that count"))
    return rows


def _print_failure(status: RunStatus) -> None:
    verdict = status.verdict or {}
    if status.status != "failed":
        return
    failure = status.failure or verdict
    rank = "" if failure.get("rank") is None else f"rank {failure['rank']}: "
    click.echo(f"{paint('error:', 'red', bold=True)} {rank}{failure.get('error')}")
    for line in (*user_frames(str(failure.get("traceback") or "")), *said_on_stderr(failure)):
        click.echo(f"  {line}")
    for text in (failure.get("others"), verdict.get("why")):
        if text:
            click.echo(f"  {text}")
