"""`elasticflow cancel` on a run that it can neither signal nor leave word for."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from elasticflow.cli.train import cancel as module
from elasticflow.launcher.journal.run_lock import locked
from elasticflow.run_folder import RunFolder
from elasticflow.system.process_record import ProcessRecord
from tests.observe.hand_made import RUN_ID, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """Yield a run of another user that seems to be running."""

    def not_permitted(*_: object) -> bool:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "pyproject.toml").touch()
    folder = RunFolder(make_run(tmp_path))
    state = json.loads(folder.state.read_text())
    folder.state.write_text(json.dumps(state | {"status": "running"}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ProcessRecord, "send", not_permitted)
    with locked(folder):
        yield folder


def test_word_that_cannot_be_left_is_told(running: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing would stop the run, so nothing is awaited."""
    running.cancel.mkdir()
    assert call(["cancel"]) == 2
    assert f"error: run {RUN_ID} cannot be asked to stop: " in capsys.readouterr().err


def test_another_users_run_is_asked_by_word(
    running: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the run's folder may be written, its supervisor finds the word there."""
    monkeypatch.setattr(module, "is_locked", lambda _: False)
    assert call(["cancel"]) == 0
    assert running.cancel.read_text() == "leave\n"
    assert "on another machine" not in capsys.readouterr().err


def test_a_run_that_was_asked_before_gets_no_second_signal(
    running: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still at its snapshot, which a second signal would cut short; --now says so."""
    sent: list[int] = []

    def send(_: ProcessRecord, number: int) -> bool:
        sent.append(number)
        return True

    monkeypatch.setattr(ProcessRecord, "send", send)
    monkeypatch.setattr(module, "is_locked", lambda _: False)
    assert [call(["cancel"]) for _ in range(2)] == [0, 0]
    assert sent == [signal.SIGTERM]
    assert call(["cancel", "--now"]) == 0
    assert sent == [signal.SIGTERM] * 2
    assert running.cancel.read_text() == "now\n"
