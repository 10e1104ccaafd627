"""Following rank logs while they grow."""

from __future__ import annotations

import io
import json
import logging
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from elasticflow import events
from elasticflow.launcher.agent.rank_logs import (
    FOLLOWED,
    FoundWarning,
    RankLog,
    WarningLines,
    tail,
    warning_in_log,
)
from elasticflow.launcher.journal.warning_tally import WarningTally
from elasticflow.protocol.messages import Warned
from elasticflow.run_folder import RunFolder
from elasticflow.system import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


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


HERE = "tests/launcher/agent/test_rank_logs.py"


@contextmanager
def _logging_to(stream: io.StringIO) -> Iterator[None]:
    """Have this process log as a worker does, for a while."""
    root, before = logging.getLogger(), (logging.getLogger().handlers[:], logging.getLogger().level)
    logs.configure(stream)
    try:
        yield
    finally:
        logging.captureWarnings(capture=False)
        root.handlers[:], root.level = before
        structlog.reset_defaults()


def _warned(place: str, text: str = "odd", times: int = 1) -> Warned:
    return Warned("n0", 1, 1, "UserWarning", place, text, times)


def test_a_log_tells_its_warnings_with_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's have their class; a logger's have its name, and the place of the call, not of the text; below that nothing counts."""
    monkeypatch.chdir(Path(__file__).parents[3])
    stream = io.StringIO()
    with _logging_to(stream), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)  # anew: `catch_warnings` has put its own back
        warnings.warn("beware:\n of this", RuntimeWarning, stacklevel=1)
        for number in range(2):
            logging.getLogger("mine").warning("number %d", number)
        logging.getLogger("mine").info("nothing")
    found = [each for line in stream.getvalue().splitlines() if (each := warning_in_log(json.loads(line)))]
    (python, place, text), first, second = found
    assert ("RuntimeWarning", "beware: of this") == (python, text)
    assert place.startswith(f"{HERE}:")
    assert ("WARNING mine", "number 0", "number 1") == (first.category, first.text, second.text)
    assert first.place == second.place
    assert first.place.startswith(f"{HERE}:")


def test_standard_error_is_split_into_warnings_and_other_lines() -> None:
    """The source line below a warning goes with it, though it comes later; what a name server does not know is not told at all."""
    lines = WarningLines()
    site = "/venv/lib/python3.12/site-packages"
    found, others = lines.take(
        [
            b"epoch 1",
            f"{site}/torch/optim/lr_scheduler.py:182: UserWarning: call it later".encode(),
        ]
    )
    assert ([FoundWarning("UserWarning", "torch/optim/lr_scheduler.py:182", "call it later")], [b"epoch 1"]) == (found, others)  # fmt: skip
    found, others = lines.take(
        [
            b"  warnings.warn('call it later')",
            b"  indented",
            b"[rank1]:[W1126 18:17:23.123456789 ProcessGroupGloo.cpp:1250] Warning: slow link (function operator())",
            b"[W1126 18:17:23.123456789 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
            b"W1126 18:17:23.123000 4711 torch/_inductor/utils.py:1137] [0/0] Not enough SMs",
            b"WARNING:root:low",
            b"Traceback (most recent call last):",
            b"UserWarning: not one by its form",
        ]
    )
    assert [
        FoundWarning("torch", "ProcessGroupGloo.cpp:1250", "Warning: slow link (function operator())"),
        FoundWarning("torch", "torch/_inductor/utils.py:1137", "[0/0] Not enough SMs"),
        FoundWarning("WARNING root", "", "low"),
    ] == found
    assert [
        b"  indented",
        b"Traceback (most recent call last):",
        b"UserWarning: not one by its form",
    ] == others


def test_a_kind_is_told_at_its_first_time_and_each_time_it_is_ten_times_as_many() -> None:
    """What is told adds up to what was counted; of more than a hundred places the rest is one kind."""
    tally = WarningTally()
    told = [each for number in range(250) if (each := tally.add(_warned("a.py:1", f"step {number}")))]
    assert [1, 9, 90] == [each.times for each in told]
    assert {"step 0"} == {each.text for each in told}
    assert [150] == [each.times for each in tally.rest()]
    assert [] == tally.rest()
    for line in range(500):
        tally.add(_warned(f"b.py:{line}"))
    (rest,) = tally.rest()
    assert ("further places", 500 - 99) == (rest.place, rest.times + 1 + 9 + 90)


def test_a_place_is_looked_for_only_near_the_beginning_of_a_line() -> None:
    """A line of 64 KiB would keep the agent, its signs of life included, for half a minute."""
    line = b"W1 " + b"a." * 1500 + b"c:1] text"
    assert ([], [line]) == WarningLines().take([line])
    long = b"WARNING:job:" + b"word " * 1000
    [found], [] = WarningLines().take([long])
    assert found.text.startswith("word word")
    assert found.text.endswith(" ...")
