from __future__ import annotations

import json
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow.sinks.notify.command import run
from elasticflow.sinks.notify.message import object_of
from elasticflow.sinks.notify.moments import Moment
from elasticflow.sinks.sink import RunFacts, SinkError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")


def message(root: Path) -> dict[str, object]:
    """Return what a command is told."""
    return object_of(
        Moment(None, "2026-11-23T03:00:00Z", "is a test"),
        RunFacts("r1", "toy", root / "runs" / "toy" / "r1", root),
    )


def test_a_command_has_the_story_on_its_input_and_in_its_environment(tmp_path: Path) -> None:
    """In the project root, without a shell."""
    line = 'cat > told.json; echo "$ELASTICFLOW_EVENT $ELASTICFLOW_JOB $ELASTICFLOW_RUN_ID [$ELASTICFLOW_EXIT_CODE] $1" > told.txt'
    told = message(tmp_path)

    run(["sh", "-c", line, "sh", "$HOME;"], told, tmp_path, 60.0)

    assert told == json.loads((tmp_path / "told.json").read_text())
    assert "test toy r1 [] $HOME;\n" == (tmp_path / "told.txt").read_text()


def test_a_command_that_fails_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it prints goes to the log; secrets of the environment in neither."""
    monkeypatch.setenv("MAIL_PASSWORD", "correct-horse")
    line = 'echo first; echo "cannot log in with $MAIL_PASSWORD" >&2; exit 3'
    with pytest.raises(SinkError, match=r"^sh: exit code 3: cannot log in with \*\*\*$"):
        run(["sh", "-c", line], message(tmp_path), tmp_path, 60.0)
    assert "sh: first\nsh: cannot log in with ***\n" == capsys.readouterr().out


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    """It is said so."""
    with pytest.raises(SinkError, match=r"^no-such-program: exit code 127: it cannot be run: No such file"):
        run(["no-such-program"], message(tmp_path), tmp_path, 60.0)


def test_a_command_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    """It may ignore being asked."""
    line = f"trap '' TERM; sleep 600 & echo $! > {shlex.quote(str(tmp_path / 'pid'))}; wait"
    with pytest.raises(SinkError, match=r"^sh has not ended within 2 s$"):
        run(["sh", "-c", line], message(tmp_path), tmp_path, 2.0)
    with suppress(psutil.NoSuchProcess, FileNotFoundError):  # slow machines come no further
        child = psutil.Process(int((tmp_path / "pid").read_text()))
        child.wait(60)
