"""Former names of commands work, and name the present command."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click
import pytest

from elasticflow.cli.completer import complete
from elasticflow.cli.former_names import now_called
from elasticflow.cli.main import call, group

if TYPE_CHECKING:
    from pathlib import Path

NAMES = {
    "adopt train.py": "lint train.py",
    "adopt --diff train.py": "lint train.py",
    "explain EF101": "guide EF101",
    "explain": "guide codes",
    "schema -o x.json": "guide --schema job -o x.json",
    "schema --events": "guide --schema events",
    "compile a.toml -o build --force": "plan a.toml -o build --force",
    "render slurm a.toml": "submit slurm --print a.toml",
    "render kubernetes a.toml -o a.yaml": "submit kubernetes --print a.toml -o a.yaml",
    "verify-elastic a.toml --worlds 1,2": "verify a.toml --worlds 1,2",
    "chaos a.toml": "verify --faults 5 a.toml",
    "chaos a.toml --seed 7": "verify --faults 5 a.toml --seed 7",
    "chaos a.toml --faults 3": "verify a.toml --faults 3",
    "chaos a.toml --plan=x.toml": "verify a.toml --faults=x.toml",
    "chaos --plan x.toml a.toml": "verify --faults x.toml a.toml",
    "sinks test a.toml --dry-run": "doctor --notify show a.toml",
    "sinks test a.toml": "doctor --notify send a.toml",
    "sinks send mnist": "runs send mnist",
    "sinks": "runs --help",
    "render": "submit",
}


@pytest.mark.parametrize(("former", "present"), NAMES.items())
def test_a_former_name_is_the_present_command(
    former: str, present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its options are options of the present command, which a line on standard error shows."""
    assert shlex.split(present) == now_called(shlex.split(former))

    context = click.Context(group)
    _, command, rest = group.resolve_command(context, shlex.split(former))
    while isinstance(command, click.Group) and rest and "--help" not in rest:
        _, command, rest = command.resolve_command(context, rest)
    assert command is not None
    if rest and "--help" not in rest:
        command.make_context(command.name, rest)
    told = f"`elasticflow {former.split(maxsplit=1)[0]}` is `elasticflow {present}` now\n"
    assert told == capsys.readouterr().err


def test_present_names_are_not_changed() -> None:
    """A present command is no former name, whatever its words."""
    for name in group.list_commands(click.Context(group)):
        assert [name, "--plan", "explain"] == now_called([name, "--plan", "explain"])


def test_a_former_name_does_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Output and exit code; help and completion show present names only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "hangs.py").write_text(
        "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
    )
    for former, present in (("explain EF101", "guide EF101"), ("adopt hangs.py", "lint hangs.py")):
        code = call(present.split())
        told = capsys.readouterr()
        assert code == call(former.split())
        assert told.out == capsys.readouterr().out
    assert call(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in {line.split()[0] for line in NAMES}:
        assert f"  {name} " not in shown
        assert [] == complete([], name, group)
