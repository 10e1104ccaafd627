"""Help: an example for every command, lines that fit, nothing heavy loaded for it; `python -m`; pipes that close."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from elasticflow import __main__
from elasticflow.cli import main
from elasticflow.cli.lazy_group import CommandEntry, LazyGroup
from elasticflow.cli.main import call, group
from elasticflow.cli.more import rendezvous as of_rendezvous
from elasticflow.cli.snapshots import group as of_snapshots
from elasticflow.guide.pages import topics
from tests.forked import Interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]


def _commands(
    within: click.Group, words: tuple[str, ...] = ()
) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = [(words, within)]
    for name in within.list_commands(click.Context(within)):
        command = within.get_command(click.Context(within), name)
        assert command is not None
        if isinstance(command, click.Group):
            found += _commands(command, (*words, name))
        else:
            found.append(((*words, name), command))
    return found


COMMANDS = _commands(group)


def _help(words: tuple[str, ...], command: click.Command) -> str:
    name = " ".join(("elasticflow", *words))
    return command.get_help(click.Context(command, info_name=name, terminal_width=100, max_content_width=100))


@pytest.mark.parametrize(
    ("words", "command"), COMMANDS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_shows_examples_of_itself(words: tuple[str, ...], command: click.Command) -> None:
    """At least one line that can be typed, and no line beyond 100 columns."""
    text = _help(words, command)
    line = re.escape(" ".join(("elasticflow", *words)))
    assert re.search(rf"^  (.*: +)?{line}\b", text, re.MULTILINE), text
    assert [] == [each for each in text.splitlines() if len(each) > 100]


def test_help_leads_to_pages_of_the_guide_that_exist() -> None:
    """The last line of a command's help, for those that the guide has a page about."""
    led = {name: entry.guide for name, entry in main.COMMANDS.items() if entry.guide}
    assert set(led.values()) <= set(topics())
    assert "restarts" == led["run"]
    for (name, *inner), command in [(words, command) for words, command in COMMANDS if words]:
        if name in led and not inner:
            assert _help((name,), command).endswith(f"elasticflow guide {led[name]}")


def test_examples_are_of_commands_and_options_that_exist() -> None:
    """Each example of the help parses: its command, its options and their values."""
    wrong = []
    for words, command in COMMANDS:
        text = re.sub(r" \\\n +", " ", command.help or "")  # lines that continue
        for line in re.findall(r"^ *(?:.*: +)?elasticflow (.*)$", text, re.MULTILINE):
            typed = re.split(r"  +|\s[>|]", line)[0].removesuffix(")")  # what follows is said about it
            try:
                _parse(group, shlex.split(typed))
            except click.ClickException as error:
                wrong.append((words, typed, error.format_message()))
    assert [] == wrong


def _parse(command: click.Command, words: list[str]) -> None:
    context = click.Context(command, info_name=command.name)
    if isinstance(command, click.Group):
        _, inner, rest = command.resolve_command(context, words)
        assert inner is not None
        _parse(inner, rest)
    elif not {"-h", "--help"} & set(words):
        command.make_context(command.name, words)


@pytest.fixture(scope="module")
def interpreter(real_processes: None) -> Iterator[Interpreter]:
    """Yield an interpreter whose forks have imported nothing of elasticflow."""
    started = Interpreter("import click, contextlib, io, json, os, runpy, sys\nsaid = []\n")
    yield started
    started.close()


@pytest.mark.integration
@pytest.mark.parametrize("words", [words for words, _ in COMMANDS], ids=" ".join)
def test_help_loads_the_one_command_and_nothing_heavy(
    interpreter: Interpreter, words: tuple[str, ...]
) -> None:
    """No other command's module, no models, no stores, no torch."""
    code, *found = interpreter.said(f"""
        sys.argv = ["elasticflow", *{words!r}, "--help"]
        leave, os._exit = os._exit, sys.exit
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_module("elasticflow", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            said = [end.code, *sys.modules]
        finally:
            os._exit = leave
    """)
    assert 0 == code
    loaded = set(found)
    assert "elasticflow.cli.main" in loaded
    tops = {name.partition(".")[0] for name in loaded}
    assert tops.isdisjoint({"pydantic", "torch", "numpy", "fsspec", "structlog", "rich", "ruamel"})
    tables: list[dict[str, CommandEntry]] = [main.COMMANDS, of_snapshots.COMMANDS, of_rendezvous.COMMANDS]
    modules = {f"elasticflow.cli.{entry.module}" for table in tables for entry in table.values()}
    own = {f"elasticflow.cli.{table[name].module}" for name in words for table in tables if name in table}
    assert loaded & modules <= own


def test_names_of_other_commands_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    """In groups of commands too, and for options; exit code 2."""
    for words, expected in (
        (["snapshots", "lst"], "Did you mean 'list'?"),
        (["rendezvous", "serv"], "Did you mean 'serve'?"),
        (["runn", "jobs/mnist.toml"], "Did you mean"),
        (["run", "--dryrun", "jobs/mnist.toml"], "'--dry-run'"),
    ):
        assert call(words) == 2
        assert expected in capsys.readouterr().err


def test_groups_are_lazy() -> None:
    """A group that imports its commands at once would load what `--help` does not need."""
    assert all(isinstance(each, LazyGroup) for _, each in COMMANDS if isinstance(each, click.Group))


@pytest.mark.usefixtures("real_processes")
def test_module_and_program_are_the_same() -> None:
    """`python -m elasticflow` names itself as the program does."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticflow", "runn"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: elasticflow [OPTIONS] COMMAND [ARGS]...\n")


@pytest.mark.parametrize(("folder", "expected"), [(str(ROOT), f"{ROOT}:/before"), ("/usr/bin", "/before")])
def test_processes_of_the_module_are_of_the_same_elasticflow(
    monkeypatch: pytest.MonkeyPatch, folder: str, expected: str
) -> None:
    """`python -m elasticflow` in a clone that is not installed, or beside an installed one: they do not look in the working folder."""
    monkeypatch.setattr(sys, "path", [folder, *sys.path])
    monkeypatch.setenv("PYTHONPATH", "/before")
    __main__._name_working_folder()
    assert expected == os.environ["PYTHONPATH"]


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    "words",
    [
        "guide codes",
        "guide --schema job",
        "--help",
        "validate --format full tests/jobfile/gallery/jobs/*.toml",
    ],
)
def test_a_reader_that_leaves_is_no_error_message(words: str) -> None:
    """`| head -1` shows one line and nothing else, however much was to come."""
    line = f'"{sys.executable}" -m elasticflow {words} | head -1'
    done = subprocess.run(
        ["bash", "-c", line], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")


def test_signals_that_the_parent_has_blocked_or_ignored_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing would ask a run to exit, and the ends of workers would not be seen."""
    monkeypatch.setattr(sys, "argv", ["elasticflow"])
    monkeypatch.setattr(main, "run", lambda: None)
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGCHLD)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGCHLD))
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        __main__.main()
        assert (set(), signal.SIG_DFL) == (
            signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            signal.getsignal(signal.SIGCHLD),
        )
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
