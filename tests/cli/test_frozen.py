"""Commands and their options are a promise: this literal changes on purpose or not at all."""

from __future__ import annotations

import click

from elasticflow.cli.look.runs_group import COMMANDS as OF_RUNS
from elasticflow.cli.main import COMMANDS, group
from elasticflow.cli.more.rendezvous import COMMANDS as OF_RENDEZVOUS
from elasticflow.cli.snapshots.group import COMMANDS as OF_SNAPSHOTS
from elasticflow.cli.train.submit_group import COMMANDS as OF_SUBMIT

PROMISED = {
    "init": {
        *("[MODEL_FILE]", "--output", "--name", "--model", "--dataset", "--loss", "--epochs", "--batch-size"),
        *("--example", "--script", "--args"),
        *("--workers", "--set", "--print", "--pre-commit", "--deep", "--yes"),
    },
    "validate": {
        "[FILE]...",
        "--set",
        "--strict",
        "--format",
        "--deep",
        "--deep-step",
        "--deep-timeout",
    },
    "lint": {"[PATH]...", "--select", "--ignore", "--strict", "--format"},
    "plan": {
        *("JOB", "--case", "--set", "--diff", "--format", "--output", "--force"),
        *("--deep", "--deep-step", "--deep-timeout"),
    },
    "run": {
        "JOB",
        "--set",
        "--run-id",
        "--accept-drift",
        "--simulate-nodes",
        "--scale",
        "--join",
        "--hosts",
        "--node-rank",
        "--on",
        "--case",
        "--all",
        "--dry-run",
        "--log-format",
    },
    "resume": {"[RUN]", "--set", "--accept-drift", "--log-format"},
    "report": {"[RUN]...", "--output", "--sweep"},
    "runs": set(),
    "diff": {"RUN", "RUN|JOB", "--set", "--case", "--sources", "--format"},
    "status": {"[RUN]", "--follow", "--exit-code", "--format"},
    "profile": {
        "[RUN]",
        "--steps",
        "--ranks",
        "--shapes",
        "--memory",
        "--stacks",
        "--sort",
        "--top",
        "--show",
        "--no-wait",
        "--format",
    },
    "metrics": {"[RUN]", "--only", "--tail", "--plot", "--format"},
    "why": {"[RUN]", "--format"},
    "cancel": {"[RUN]", "--now"},
    "logs": {"[RUN]", "--rank", "--generation", "--follow", "--level", "--tail", "--steps", "--format"},
    "snapshots": set(),
    "submit": set(),
    "verify": {
        *("JOB", "--worlds", "--shards", "--faults", "--seed", "--workers"),
        *("--steps", "--case", "--set", "--tolerance", "--keep", "--format"),
    },
    "rendezvous": set(),
    "doctor": {"[JOB]", "--set", "--case", "--format", "--notify"},
    "guide": {"[TOPIC|CODE|NAME]", "--search", "--template", "--schema", "--output"},
    "completion": {"{bash|zsh|fish}", "--install"},
}

_PRINTS = {"--option", "--format", "--json"}
PROMISED_OF_SNAPSHOTS = {
    "list": {"[RUN]", *_PRINTS},
    "show": {"[RUN] [SNAPSHOT]", *_PRINTS},
    "verify": {"[RUN] [SNAPSHOT]...", "--all", "--quarantine", *_PRINTS},
    "pin": {"[RUN] SNAPSHOT...", "--note", "--option"},
    "unpin": {"[RUN] SNAPSHOT...", "--option"},
    "prune": {
        "[RUN]",
        "--keep-last",
        "--keep-best",
        "--keep-every",
        "--keep-within",
        "--dry-run",
        "--yes",
        *_PRINTS,
    },
    "export": {
        "[RUN] [SNAPSHOT]",
        "--format",
        "--output",
        "--part",
        "--tokenizer",
        "--force",
        "--json",
        "--option",
    },
}


PROMISED_OF_RUNS = {
    "list": {"[JOB]", "--format"},
    "rm": {"RUN...", "--dry-run", "--pinned", "--yes"},
    "prune": {"[JOB]", "--keep", "--older-than", "--status", "--dry-run", "--pinned", "--yes"},
    "send": {"[RUN]", "--timeout"},
}
PROMISED_OF_SUBMIT = {
    "slurm": {"JOB", "--print", "--output", "--run-id", "--case", "--set", "--wait"},
    "kubernetes": {"JOB", "--print", "--output", "--form", "--run-id", "--case", "--set"},
}
PROMISED_OF_RENDEZVOUS = {"serve": {"--host", "--port", "--state", "--token-file"}}


def _command(within: click.Group, name: str) -> click.Command:
    found = within.get_command(click.Context(within), name)
    assert found is not None
    return found


def _group(name: str) -> click.Group:
    found = _command(group, name)
    assert isinstance(found, click.Group)
    return found


def _offered(command: click.Command) -> set[str]:
    found = set()
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            found.add(parameter.make_metavar(click.Context(command)))
        else:
            found.add(max(parameter.opts, key=len))
    return found


def test_commands_and_options_are_those_promised() -> None:
    """Every command of the group, each with exactly these arguments and options."""
    assert PROMISED == {name: _offered(_command(group, name)) for name in COMMANDS}


def test_commands_of_snapshots_are_those_promised() -> None:
    """Every command of `elasticflow snapshots`, each with exactly these arguments and options."""
    assert PROMISED_OF_SNAPSHOTS == {
        name: _offered(_command(_group("snapshots"), name)) for name in OF_SNAPSHOTS
    }


def test_commands_of_submit_are_those_promised() -> None:
    """Every command of `elasticflow submit`, each with exactly these arguments and options."""
    assert PROMISED_OF_SUBMIT == {name: _offered(_command(_group("submit"), name)) for name in OF_SUBMIT}


def test_commands_of_runs_are_those_promised() -> None:
    """Every command of `elasticflow runs`, each with exactly these arguments and options."""
    assert PROMISED_OF_RUNS == {name: _offered(_command(_group("runs"), name)) for name in OF_RUNS}


def test_commands_of_rendezvous_are_those_promised() -> None:
    """Every command of `elasticflow rendezvous`, each with exactly these arguments and options."""
    assert PROMISED_OF_RENDEZVOUS == {
        name: _offered(_command(_group("rendezvous"), name)) for name in OF_RENDEZVOUS
    }


def test_every_option_of_every_command_is_explained() -> None:
    """`--help` says something about each option."""
    commands = [_command(group, name) for name in COMMANDS]
    commands += [_command(_group("snapshots"), name) for name in OF_SNAPSHOTS]
    commands += [_command(_group("rendezvous"), name) for name in OF_RENDEZVOUS]
    commands += [_command(_group("submit"), name) for name in OF_SUBMIT]
    commands += [_command(_group("runs"), name) for name in OF_RUNS]
    silent = [
        (command.name, parameter.name)
        for command in commands
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.help
    ]
    assert [] == silent
