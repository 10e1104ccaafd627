"""The work of validating a job file grows with the file, not with the file times its mistakes. Calls are counted, not seconds."""

from __future__ import annotations

import cProfile
import gc
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
from elasticflow.jobfile.diagnostics.positions import line_and_column, offsets_of
from elasticflow.jobfile.diagnostics.render_text import render
from elasticflow.jobfile.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable

JOB = """\
[job]
name = "x"
[optimizer]
entry = "torch.optim:SGD"
args = { lr = 1e-3 }
[dataset]
entry = "model:data"
global_batch_size = 64
[train]
epochs = 5
"""
MODEL = '[model]\nentry = "model:%s"\nloss = "torch.nn.functional:cross_entropy"\n'


def _lines(count: int, line: str) -> str:
    return "\n".join(line.replace("#", str(number)) for number in range(count)) + "\n"


def _list(count: int, value: str, between: str = ", ") -> str:
    return f"[{between.join(value.replace('#', str(number)) for number in range(count))}]\n"


FILES: dict[str, Callable[[int], str]] = {
    "arguments": lambda n: JOB + MODEL % "Net" + "[model.args]\n" + _lines(n, "a# = #"),
    "objects": lambda n: (
        JOB + MODEL % "Net" + "[model.args]\n" + _lines(n, 'a# = { entry = "model:Net", args = { x = # } }')
    ),
    "unknown arguments": lambda n: JOB + MODEL % "Strict" + "[model.args]\n" + _lines(n, "a# = #"),
    "near arguments": lambda n: JOB + MODEL % "Wide" + "[model.args]\n" + _lines(n, "alpa# = #"),
    "arguments of a wrong type": lambda n: JOB + MODEL % "Wide" + "[model.args]\n" + _lines(n, 'alpha# = "x"'),
    "unknown keys": lambda n: JOB + _lines(n, "epochz# = #") + MODEL % "Net",
    "unknown tables": lambda n: JOB + MODEL % "Net" + _lines(n, "[wrong#]\na = #"),
    "wrong variables": lambda n: JOB + MODEL % "Net" + "[env]\n" + _lines(n, "A# = #"),
    "wrong references": lambda n: JOB + MODEL % "Net" + "[env]\n" + _lines(n, 'A# = "${nothing.at_all}"'),
    "wrong elements": lambda n: JOB + MODEL % "Net" + "[snapshots]\nevery = " + _list(n, '"# mim"'),
    "wrong elements, a line each": lambda n: (
        JOB + MODEL % "Net" + "[snapshots]\nevery = " + _list(n, '"# mim"', ",\n")
    ),
    "long list": lambda n: JOB + MODEL % "Net" + "[model.args]\na = " + _list(n, "#"),
    "deep tables": lambda n: JOB + MODEL % "Net" + _lines(n, "[model.args.a#.b.c.d.e.f]\nx = 1"),
    "sets": lambda n: JOB + MODEL % "Net" + _lines(n, '[evaluation.s#]\nentry = "model:data"\nevry = "1 epoch"'),
    "metrics": lambda n: (
        JOB + MODEL % "Net" + '[evaluation]\nentry = "model:data"\n[evaluation.metrics]\n' + _lines(n, 'm# = "model:none#"')
    ),
    "groups": lambda n: JOB + MODEL % "Net" + _lines(n, '[[optimizer.groups]]\nmatchh = "x#"'),
    "no TOML": lambda n: JOB + MODEL % "Net" + "[model.args]\n" + _lines(n, "a# = #") + "b = True\n",
}  # fmt: skip


def _empty_caches() -> None:
    re.purge()
    for module in [module for name, module in sys.modules.items() if name.startswith("elasticflow.")]:
        for each in vars(module).values():
            if isinstance(each, type(offsets_of)):
                each.cache_clear()


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Return what counts the calls, of Python and of C, that validating a file takes, and showing its findings."""
    wide = ", ".join(f"alpha{number}: int = 0" for number in range(200))
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "model.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self, **kwargs): super().__init__()\n"
        "class Strict(nn.Module):\n    def __init__(self, width=1): super().__init__()\n"
        f"class Wide(nn.Module):\n    def __init__(self, {wide}): super().__init__()\n"
        "def data(): return [1]\n"
    )
    monkeypatch.chdir(tmp_path)

    def compare(one: Diagnostic, other: object) -> bool:
        return tuple.__eq__(one, other)

    # A comparison is a call that counts: else a search through a list of findings would not.
    monkeypatch.setattr(Diagnostic, "__eq__", compare)

    def count(text: str) -> int:
        Path("job.toml").write_text(text)
        _empty_caches()  # else files and tests before this one count: caches hold less than 200 lines need
        profile = cProfile.Profile()
        gc.disable()  # else finalizers of what earlier tests left count, too
        profile.enable()
        found = load_job(Path("job.toml")).diagnostics
        render(found)
        profile.disable()
        gc.enable()
        return sum(each.callcount for each in profile.getstats())

    return count


@pytest.mark.parametrize("kind", FILES)
def test_twice_the_file_is_twice_the_work(calls: Callable[[str], int], kind: str) -> None:
    """A hundred more lines take twice the calls of fifty more."""
    make = FILES[kind]
    calls(make(25))  # what is kept for later files is there
    few, some, many = (calls(make(count)) for count in (50, 100, 200))
    assert many - some < 2.1 * (some - few) + 2000


def test_text_is_read_once_for_all_findings(tmp_path: Path) -> None:
    """Places of thousands of findings are looked up in one list of line ends."""
    offsets_of.cache_clear()
    (tmp_path / "job.toml").write_text(FILES["unknown keys"](500))
    assert len(load_job(tmp_path / "job.toml").diagnostics) >= 500
    assert offsets_of.cache_info().misses <= 3


@pytest.mark.parametrize("end", ["b = True\n", "b = 3\n", "b = [1,\n", "<<<<<<< HEAD\n"])
def test_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Ten thousand lines of it, right or wrong."""
    (tmp_path / "job.toml").write_text(
        JOB + MODEL % "Net" + "[model.args]\n" + _lines(10_000, "a# = #") + end
    )
    loads, parsed = tomli.loads, []

    def counted(text: str) -> object:
        parsed.append(len(text))
        return loads(text)

    monkeypatch.setattr(tomli, "loads", counted)
    load_job(tmp_path / "job.toml")
    assert len([size for size in parsed if size > 100_000]) == 1


@given(st.text(st.sampled_from("ab\n\"'"), max_size=30), st.integers(0, 30))
def test_line_and_column_are_counted_from_one(text: str, at: int) -> None:
    """As by counting all line ends before."""
    at = min(at, len(text))
    assert line_and_column(text, at) == (text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
