"""The command line: one group whose commands are imported only when they are used."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from elasticflow.cli.lazy_group import CommandEntry, LazyGroup
from elasticflow.errors import (
    FINISHED,
    INTERRUPTED,
    KILLED_BY_USER,
    NOT_STARTED,
    ElasticflowError,
    JobRefusedError,
)
from elasticflow.system.installation import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

_OUTPUT_IS_LOST = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
# Name to the line shown in --help: known without importing the command's module.
COMMANDS: dict[str, CommandEntry] = {
    "init": CommandEntry(
        "write.init", "Write a job file for a model, a script, or an example.", guide="adopting"
    ),
    "validate": CommandEntry(
        "write.validate", "Check job files; nothing is run and torch is not needed.", guide="job-files"
    ),
    "lint": CommandEntry(
        "write.lint", "Find code that a kill, a restart or a resize breaks.", guide="adopting"
    ),
    "plan": CommandEntry(
        "write.plan", "Show what a run of a job file would do; write its train.py.", guide="job-files"
    ),
    "run": CommandEntry("train.run", "Train a job, or continue its run.", guide="restarts"),
    "resume": CommandEntry("train.resume", "Continue a run from its newest good snapshot.", guide="restarts"),
    "cancel": CommandEntry("train.cancel", "Stop a run after its step, with a snapshot.", guide="restarts"),
    "submit": CommandEntry(
        "train.submit_group", "Give a job to Slurm or Kubernetes, or print what they take.", guide="machines"
    ),
    "runs": CommandEntry(
        "look.runs_group", "List runs; remove them; send what sinks have missed.", guide="observability"
    ),
    "status": CommandEntry("look.status", "Show how a run is doing.", guide="observability"),
    "why": CommandEntry(
        "look.why", "Show what went wrong in a run, root cause first.", guide="troubleshooting"
    ),
    "logs": CommandEntry("look.logs", "Show a run's logs by rank and generation.", guide="observability"),
    "metrics": CommandEntry(
        "look.metrics", "Show a run's measurements, as a table or curves.", guide="observability"
    ),
    "report": CommandEntry(
        "look.report", "Write a run, or several side by side, as one HTML file.", guide="observability"
    ),
    "diff": CommandEntry(
        "look.diff", "Compare a run with another one, or with a job file.", guide="restarts"
    ),
    "profile": CommandEntry(
        "look.profile", "Trace a few steps of a run with torch's profiler.", guide="observability"
    ),
    "snapshots": CommandEntry(
        "snapshots.group", "List, check, keep, prune and export a run's snapshots.", guide="snapshots"
    ),
    "verify": CommandEntry(
        "prove.verify", "Train a job briefly, resized or with faults, and compare.", guide="exactness"
    ),
    "doctor": CommandEntry(
        "more.doctor", "Check this machine, also for the needs of one job.", guide="troubleshooting"
    ),
    "guide": CommandEntry("more.guide", "Show a page of the guide, or explain a code such as EF101."),
    "completion": CommandEntry(
        "more.completion", "Make a shell complete commands, files, runs and keys.", guide="commands"
    ),
    "rendezvous": CommandEntry(
        "more.rendezvous", "Serve a rendezvous store for the machines of runs.", guide="machines"
    ),
}

# Title of a section of `--help` to the first command under it.
SECTIONS = {
    "Write a job": "init",
    "Train it": "run",
    "Look at runs": "runs",
    "More": "verify",
}

# Commands that only read and print: garbage collection would cost them more than it frees.
SHORT = ("validate", "lint", "guide")
# Commands that end with a snapshot and exit code 75 when a signal comes.
TRAINING = ("run", "resume")


@click.group(
    cls=LazyGroup,
    table=COMMANDS,
    sections=SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(VERSION, prog_name="elasticflow", message="%(prog)s %(version)s")
def group() -> None:
    """Turn a job file into a distributed PyTorch run that survives what happens to it.

    \b
    elasticflow init model.py                write a job file for your model
    elasticflow init train.py                or for your training script as it is
    elasticflow validate jobs/mnist.toml     check it, in a fifth of a second
    elasticflow run jobs/mnist.toml          train it
    elasticflow resume mnist                 continue after an interruption
    elasticflow guide                        read about all of it
    """
    from elasticflow.observe.terminal.colours import colour_choice

    # All commands below inherit it.
    click.get_current_context().color = colour_choice(os.environ)


def call(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; errors go to standard error."""
    try:
        code = group.main(args=arguments, prog_name="elasticflow", standalone_mode=False)
    except click.ClickException as error:
        _show(error)
        if isinstance(error, click.NoSuchOption) and (hint := _as_key(error, arguments)):
            click.echo(f"help: {hint}", err=True)
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return KILLED_BY_USER
    except JobRefusedError as error:
        # The message is rendered diagnostics, which begin with "error" themselves.
        click.echo(error.message, err=True)
        return error.exit_code
    except ElasticflowError as error:
        from elasticflow.system.records import printable

        # A message may quote a file of unknown origin.
        click.echo(f"error: {printable(error.message)}", err=True)
        if error.remedy is not None:
            click.echo(f"help: {printable(error.remedy)}", err=True)
        return error.exit_code
    except OSError as error:
        # An error with a file's name is not about the output; a pipe whose reader exits is no error (click ends with 1 then).
        if error.filename is not None or error.errno not in _OUTPUT_IS_LOST:
            raise
        return _tell_lost_output(error)
    return code if isinstance(code, int) else FINISHED


def _show(error: click.ClickException) -> None:
    """Show an error of click's, which would begin it with a capital letter, as all other errors begin."""
    shown = io.StringIO()
    error.show(shown)
    text = shown.getvalue()
    start = text.rfind("Error: ")
    click.echo(f"{text[:start]}error: {text[start:].removeprefix('Error: ')}", nl=False, err=True)


def _tell_lost_output(error: OSError) -> int:
    """Report that the output cannot be written, and return the exit code."""
    with contextlib.suppress(OSError):
        click.echo(f"error: the output cannot be written: {error.strerror}", err=True)
    return NOT_STARTED


def _as_key(error: click.NoSuchOption, arguments: Sequence[str] | None) -> str | None:
    """Return the `--set` for a job key that was given as an option; None if it is no key, or the command has no `--set`."""
    parameters = () if error.ctx is None else error.ctx.command.params
    if all(parameter.name != "overrides" for parameter in parameters):
        return None
    from elasticflow.jobfile.wording.unknown_keys import flag_for

    words = list(sys.argv[1:] if arguments is None else arguments)
    value = ""
    for number, word in enumerate(words):
        name, equals, given = word.partition("=")
        if name == error.option_name:
            following = words[number + 1 : number + 2]
            value = given if equals else next((text for text in following if not text.startswith("-")), "")
    return flag_for(error.option_name, value)


def _leave_before_it_began(number: int, frame: object) -> None:
    """Exit on a signal while the command is read and checked; the supervisor has handlers of its own."""
    text = f"\n{signal.Signals(number).name} before anything began: the same command starts again\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(INTERRUPTED)


def run() -> NoReturn:
    """Run the command line and exit the process with its exit code."""
    if shell := os.environ.get("_ELASTICFLOW_COMPLETE"):
        from elasticflow.cli.completion_candidates import answer

        sys.stdout.write(answer(shell, sys.argv[1:], group))
        sys.stdout.flush()
        os._exit(FINISHED)
    if sys.argv[1:2] and sys.argv[1] in TRAINING:
        from elasticflow.system.processes import leave_signals

        for number in leave_signals():
            signal.signal(number, _leave_before_it_began)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:2] and sys.argv[1] in SHORT:
        gc.disable()
        # pydantic searches all installed packages for plugins, which takes a tenth of the time of `validate`; none is
        # needed. With --deep the job's own code would inherit the setting.
        if not any(word.startswith("--deep") for word in sys.argv):
            os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # signs that the locale lacks, and names that are no text
    code = call()
    try:
        sys.stdout.flush()
    except OSError as error:
        # The reader of a pipe may have exited.
        if error.errno in _OUTPUT_IS_LOST:
            code = code or _tell_lost_output(error)
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # Freeing every object one by one takes a fifth of `validate`, and half a second once torch is loaded.
    os._exit(code)
