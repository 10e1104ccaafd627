"""`elasticflow guide`: the list, a page on a pipe and on a terminal, a word, a topic that is not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from elasticflow.cli.completion_candidates import answer
from elasticflow.cli.main import call, group
from elasticflow.guide import pages


def test_topics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line each: the topic, and what its page is about."""
    assert 0 == call(["guide"])
    lines = capsys.readouterr().out.splitlines()
    for topic, about in pages.topics().items():
        assert f"{topic.ljust(max(map(len, pages.topics())))}  {about}" in lines


def test_on_a_pipe_a_page_is_its_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    """To the letter, for other programs."""
    assert 0 == call(["guide", "snapshots"])
    assert capsys.readouterr().out == pages.text_of("snapshots")


@pytest.mark.parametrize("colour", ["1", ""])
def test_on_a_terminal_a_page_is_laid_out(
    colour: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line is wider than the terminal, no mark of Markdown is left, and colours only where they are wanted."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("LINES", "1000")
    monkeypatch.setenv("FORCE_COLOR", colour)
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    assert 0 == call(["guide", "restarts"])
    shown = capsys.readouterr().out
    assert bool(colour) == ("\x1b[" in shown)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines()
    assert 70 >= max(map(len, lines))
    assert not [line for line in lines if "**" in line or "](" in line]
    assert "(guide machines)" in " ".join(" ".join(lines).split())


def test_a_long_page_goes_through_the_pager(
    tmp_path: Path, real_processes: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The user's own pager gets the whole page where the screen is too small for it."""
    got = tmp_path / "got"
    pager = tmp_path / "pager"
    pager.write_text(f"#!/bin/sh\ncat > {got}\n")
    pager.chmod(0o755)
    monkeypatch.setenv("PAGER", str(pager))
    monkeypatch.setenv("LINES", "24")
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert 0 == call(["guide", "restarts"])
    assert "The budget" in got.read_text()
    assert "" == capfd.readouterr().out


def test_a_word_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """In all pages or in one; a word that is nowhere is the answer no."""
    assert 0 == call(["guide", "--search", "hang_timeout"])
    shown = capsys.readouterr().out
    assert "restarts: Workers\n  " in shown
    assert "job-reference: " in shown
    assert 0 == call(["guide", "restarts", "--search", "hang_timeout"])
    assert "job-reference: " not in capsys.readouterr().out
    assert 1 == call(["guide", "--search", "no such word anywhere"])
    assert "stands in no page" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("snapshotts", "did you mean snapshots?"), ("qqqq", "`elasticflow guide` lists the topics")],
)
def test_a_topic_that_is_not_there_gets_near_names(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage error, with the nearest topics, or where they are listed."""
    assert 2 == call(["guide", typed])
    assert hint in capsys.readouterr().err


def test_a_word_is_not_looked_for_in_a_page_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """That the word is nowhere would be wrong."""
    assert 2 == call(["guide", "restart", "--search", "budget"])
    assert 'there is no page "restart"' in capsys.readouterr().err


def test_another_tools_name_leads_to_the_page_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A word that is nearly a topic is answered with its key, and with the page."""
    assert 0 == call(["guide", "snapshot"])
    told = "snapshot is snapshots in a job file\na page of the guide: elasticflow guide snapshots\n"
    assert told == capsys.readouterr().out


def test_topics_complete() -> None:
    """A shell offers the topics that begin like the word, and what they are about."""
    assert answer("zsh", ["guide", "rest"], group).startswith("restarts\t")
    assert set(answer("fish", ["guide", ""], group).splitlines()) >= {
        f"{topic}\t{about}" for topic, about in pages.topics().items() if len(about) <= 70
    }


def test_a_template_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The example's text, byte for byte; with a topic it is refused."""
    assert call(["guide", "--template", "accelerate"]) == 0
    example = Path(__file__).resolve().parents[3] / "examples/own_loop/train_accelerate.py"
    assert capsys.readouterr().out == example.read_text("utf-8")
    assert call(["guide", "own-loop", "--template", "accelerate"]) == 2
