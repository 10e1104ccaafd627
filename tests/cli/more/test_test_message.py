"""`elasticflow doctor JOB --notify`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from tests.cli.small_job import JOB, PIECES
from tests.webhook_receiver import SECRET, webhook

if TYPE_CHECKING:
    from pathlib import Path

NOTIFY = '[notify]\nurl = "${env:HOOK}"\ncommand = ["sh", "-c", "cat >> told.json"]\n'


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with a small job that tells somebody, as the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "pieces.py").write_text(PIECES)
    (tmp_path / "job.toml").write_text(JOB + NOTIFY)
    return tmp_path


@pytest.mark.usefixtures("real_processes")
def test_a_message_goes_out_in_each_way(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and no run is made; what fails is told, the others are tried nevertheless."""
    with webhook(200, 404) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        assert call(["doctor", "job.toml", "--notify", "send"]) == 0
        first = capsys.readouterr()
        assert call(["doctor", "job.toml", "--notify", "send"]) == 1
        second = capsys.readouterr()

    assert first.out == "notify.url: sent\nnotify.command: sent\n"
    assert second.out.startswith("notify.url: 127.0.0.1 answers 404 Not Found: Cannot POST ***\n")
    assert not any(part in second.out + second.err for part in SECRET.split("/"))
    (body,) = hook.bodies
    assert "small test on " in body["text"]
    told = [json.loads(line) for line in (project / "told.json").read_text().splitlines()]
    assert ["test", "test"] == [each["event"] for each in told]
    assert not (project / "runs").exists()


def test_what_would_be_sent_is_shown(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is asked, and the address is not shown."""
    monkeypatch.setenv("HOOK", f"https://chat.example.org/{SECRET}")
    assert call(["doctor", "job.toml", "--notify", "show"]) == 0
    out = capsys.readouterr().out
    assert "notify.url:\n{" in out
    assert '"exit_code": null' in out
    assert SECRET not in out
    assert not (project / "told.json").exists()


@pytest.mark.parametrize("way", ["send", "show"])
def test_a_message_is_no_json(way: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that asks for JSON gets no other text, and nobody is told."""
    assert call(["doctor", "job.toml", "--notify", way, "--format", "json"]) == 2
    out, err = capsys.readouterr()
    assert (out, "--notify tells a person" in err) == ("", True)
    assert not (project / "told.json").exists()


def test_a_job_that_tells_nobody(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said so."""
    (project / "job.toml").write_text(JOB)
    assert call(["doctor", "job.toml", "--notify", "send"]) == 0
    assert "the job has no [notify]" in capsys.readouterr().err
