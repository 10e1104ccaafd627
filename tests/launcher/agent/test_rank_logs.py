"""Following rank logs while they grow."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.launcher.agent.rank_logs import FOLLOWED, RankLog, tail
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run folder."""
    return RunFolder(tmp_path / "runs" / "job" / "run")


@pytest.fixture
def log(folder: RunFolder) -> Iterator[RankLog]:
    """Yield a follower of rank 0 in generation 1; its file does not exist yet."""
    followed = RankLog(folder, 1, 0)
    yield followed
    followed.close()


def _append(folder: RunFolder, data: str | bytes) -> None:
    path = folder.rank_log(1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def _line(event: str, **fields: Any) -> str:
    return json.dumps({"event": event, "origin": events.OURS, **fields}) + "\n"


def test_each_line_comes_once_when_it_is_complete(folder: RunFolder, log: RankLog) -> None:
    """No file, no line; half a line, no line; its other half, one line; then nothing more."""
    assert [] == log.lines()
    line = _line(events.STEP, step=1)
    _append(folder, line + line[:10])
    assert [1] == [r["step"] for r in log.lines()]
    assert [] == log.lines()
    _append(folder, line[10:])
    assert [1] == [r["step"] for r in log.lines()]
    assert [] == log.lines()


def test_half_a_character_waits_for_its_other_half(folder: RunFolder, log: RankLog) -> None:
    """Lines are cut as bytes: a write that ends inside a character loses nothing."""
    data = (
        json.dumps(
            {"event": events.WORKER_RAISED, "origin": events.OURS, "error": "größer"}, ensure_ascii=False
        )
        + "\n"
    ).encode()
    cut = data.index("ß".encode()) + 1
    _append(folder, data[:cut])
    assert [] == log.lines()
    _append(folder, data[cut:])

    assert ["größer"] == [r["error"] for r in log.lines()]


def test_only_what_the_supervisor_needs_is_followed(folder: RunFolder, log: RankLog) -> None:
    """Users' own lines, lines that are no JSON and lines that only mention an event stay in the file.

    So do those of users that are called as ours are: they lack what ours hold.
    """
    _append(folder, "".join(_line(name, origin="user") for name in sorted(FOLLOWED)))
    _append(folder, "".join(json.dumps({"event": name, "logger": "root"}) + "\n" for name in FOLLOWED))
    _append(folder, _line("my.own", text=f"after {events.STEP}"))
    _append(folder, f'not JSON but "{events.STEP}"\n')
    _append(folder, f'["{events.STEP}"]\n')
    _append(folder, b'\xff\xfe "step"\n')
    _append(folder, "".join(_line(name) for name in sorted(FOLLOWED)))

    assert sorted(FOLLOWED) == [r["event"] for r in log.lines()]


def test_worker_that_died_before_it_opened_its_streams_has_said_nothing(tmp_path: Path) -> None:
    """Killed between the fork and that, it leaves no file: no reason for the agent to fail."""
    assert "" == tail(tmp_path / "rank0.stderr")


def test_lines_of_an_exception_come_as_python_writes_them(tmp_path: Path) -> None:
    """A process with a process group has its rank before each of them."""
    path = tmp_path / "rank0.stderr"
    path.write_text(
        'noise\n[rank0]: Traceback (most recent call last):\n[rank0]:   File "a.py"\n[rank0]: KeyError: 1\n'
    )
    assert tail(path) == 'noise\nTraceback (most recent call last):\n  File "a.py"\nKeyError: 1\n'
