"""Run folders on bad days: half written, on a disk that takes nothing, with clocks that jumped, looked at by several.

What only looks answers with what is there, in each of them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.damage import harm, made_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUICK = ("status", "runs", "why", "logs", "metrics", "metrics --plot")
# In this order a launch makes them; several times, the later ones.
BORN = (
    "lock", "launches/0001/sources/jobs/tiny.toml", "launches/0001/job.json", "launches/0001/train.py", "launches/0001/plan.json",
    "JOB.json", "ledger.jsonl", "generations/0001.json", "events.jsonl", "metrics.jsonl", "state.json", "logs/agent.log",
    "logs/g0001/rank0.jsonl", "logs/g0001/rank0.stdout",
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a project with a run that was interrupted after its third snapshot."""
    root = tmp_path_factory.mktemp("odd") / "original"
    with pytest.MonkeyPatch.context() as patch:
        made_run.make(root, patch)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def project(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the project, the working folder."""
    copy = harm.copy_of(original, tmp_path / "copy")
    monkeypatch.chdir(copy)
    return copy


def look(commands: tuple[str, ...] = (*QUICK, "report")) -> dict[str, harm.Answer]:
    """Return what each command answers; none may end in a traceback."""
    answers = {command: made_run.ask(command) for command in commands}
    for command, answer in answers.items():
        assert answer.code is not None, f"{command}: {answer.said}"
        assert "Traceback" not in answer.said, f"{command}: {answer.said}"
    return answers


def test_folder_of_which_a_part_is_there(original: Path, project: Path) -> None:
    """A launch was killed, or is not that far yet: what is there is shown, and logs are said not to be there yet."""
    files = [file for file in harm.files_of(original) if file.as_posix() in BORN]
    files.sort(key=lambda file: BORN.index(file.as_posix()))
    assert len(files) == len(BORN)
    others = [file for file in harm.files_of(original) if file not in files]
    for file in others:
        (project / harm.FOLDER / file).unlink()
    for number, file in reversed(list(enumerate(files))):
        (project / harm.FOLDER / file).unlink()
        answers = look((*QUICK, "report") if number % 5 == 0 else QUICK)
        logs = answers.pop("logs")
        assert {answer.code for answer in answers.values()} == {0}, (file, answers)
        if logs.code:
            assert "no logs yet" in logs.said
        assert "None" not in "".join(answer.said for answer in answers.values())


def _lines(path: Path, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(at, line)) + "\n" for at, line in enumerate(lines)))


@pytest.mark.parametrize("jump", [timedelta(days=-1), timedelta(days=-20_000), timedelta(days=400)])
def test_clock_that_jumped(project: Path, jump: timedelta) -> None:
    """It was set, in the middle of a run, by a day or by decades: nothing has lasted for less than no time."""
    folder = project / harm.FOLDER

    def moved(at: int, line: dict[str, Any]) -> dict[str, Any]:
        if at < 4:
            return line
        if "timestamp" in line:
            line["timestamp"] = (datetime.fromisoformat(line["timestamp"]) + jump).isoformat()
        if "time" in line:
            line["time"] += jump.total_seconds()
        return line

    _lines(folder / "events.jsonl", moved)
    _lines(folder / "metrics.jsonl", moved)
    answers = look()
    assert {answer.code for answer in answers.values()} == {0}
    for command in ("status", "runs", "why"):
        words = answers[command].said.replace("(", " ").split()
        assert not [word for word in words if word[0] == "-" and word[1:2].isdigit()], answers[command].said


def test_two_who_look_at_once(project: Path) -> None:
    """A reader that holds the lock for an instant is taken for no supervisor by another one."""
    with (project / harm.FOLDER / "lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        answers = look(("status", "runs"))
    assert "interrupted" in answers["status"].said.splitlines()[0]
    assert "running" not in answers["runs"].said


class _ReadOnly:
    """A file system that takes nothing below a folder, while it is told so: root may write to any other."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None or event not in {"open", "os.mkdir", "os.rename", "os.remove", "os.truncate"}:
            return
        path, flags = arguments[0], arguments[2] if event == "open" else os.O_WRONLY
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (
            writes
            and isinstance(path, str | os.PathLike)
            and Path(path).absolute().is_relative_to(self.folder)
        ):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))


def test_folder_that_cannot_be_written(project: Path) -> None:
    """All that only looks answers as ever; a report says where it may be written."""
    before = look()
    shutil.rmtree(project / "report.html", ignore_errors=True)
    disk = _ReadOnly()
    disk.folder = project / "runs"
    try:
        after = look()
        here = made_run.ask_with("report", harm.RUN)
        launched = made_run.ask("run --run-id")
    finally:
        disk.folder = None
    assert {command: answer.said for command, answer in before.items()} == {
        command: answer.said for command, answer in after.items()
    }
    for answer in (here, launched):
        assert answer.code == 2, answer.said
        assert "Traceback" not in answer.said
        assert "Read-only file system" in answer.said
        assert "help: " in answer.said
