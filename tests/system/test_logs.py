"""One write per line, levels, and what is written whatever the level."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from elasticflow import events, get_logger
from elasticflow.system import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Leave logging as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


class _Writes(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, text: str) -> int:
        self.calls.append(text)
        return super().write(text)


def _records(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_line_is_one_write() -> None:
    """Text and newline go out together: two processes that share a file never tear each other's lines."""
    stream = _Writes()
    logs.configure(stream, rank=1)
    get_logger().info("user.says", loss=1.5)

    assert 1 == len(stream.calls)
    assert stream.calls[0].endswith("\n")


def test_a_callable_is_asked_if_it_is_bound_and_a_value_if_it_is_logged() -> None:
    """A model in a call of the user's is not called: its forward wants a batch."""
    stream = io.StringIO()
    logs.configure(stream, step=lambda: 7)

    def forward(batch: object) -> object:
        raise AssertionError

    get_logger().info("user.says", model=forward)
    [line] = _records(stream)
    assert 7 == line["step"]
    assert line["model"] == str(forward)


def test_whatever_is_logged_no_call_fails() -> None:
    """What is no text as the event, and what JSON lacks; the other fields of the line are there."""
    stream = io.StringIO()
    logs.configure(stream, "info", events.EVENTS, rank=1)
    endless: list[object] = []
    endless.append(endless)
    log = get_logger()
    log.info({"loss": 0.5})  # type: ignore[arg-type]
    log.debug([1])  # type: ignore[arg-type]
    log.info(None)  # type: ignore[arg-type]
    log.info("user.counts", table={(1, 2): 3}, loss=1.5)
    log.info("user.counts", table=endless)

    lines = _records(stream)
    assert ["{'loss': 0.5}", "", "user.counts", "user.counts"] == [line["event"] for line in lines]
    assert ("no JSON: <class 'dict'>", 1.5, 1) == tuple(lines[2][key] for key in ("table", "loss", "rank"))


def test_lines_below_the_level_are_left_out_but_never_events() -> None:
    """`logging.level` is for what people read; the supervisor's events are written at any level."""
    stream = io.StringIO()
    logs.configure(stream, "warning", events.EVENTS, rank=0)
    log = logs.get_logger("test")
    log.info("user.says")
    log.warning("user.warns")
    log.info(events.TRAINING_FINISHED, step=3)
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").error("trouble")

    assert ["user.warns", "training.finished", "trouble"] == [r["event"] for r in _records(stream)]


def test_records_of_libraries_bear_the_same_fields() -> None:
    """Stdlib logging and structlog give one kind of line, in UTC, with what was bound."""
    stream = io.StringIO()
    logs.configure(stream, rank=2, run_id="x")
    logging.getLogger("library").warning("trouble with %s", "disk")
    [record] = _records(stream)

    assert ("trouble with disk", "warning", 2, "x") == tuple(
        record[k] for k in ("event", "level", "rank", "run_id")
    )
    assert record["timestamp"].endswith("Z")


def test_tracebacks_never_show_local_variables() -> None:
    """A password in a frame stays there."""
    stream = io.StringIO()
    logs.configure(stream)
    secret = "hunter" + "2"
    try:
        [][len(secret)]
    except IndexError:
        get_logger().exception("user.failed")

    assert "IndexError" in stream.getvalue()
    assert secret not in stream.getvalue()


def test_an_exception_is_an_object_and_so_is_one_of_the_standard_library() -> None:
    """Type, message and frames, whoever logged it."""
    stream = io.StringIO()
    logs.configure(stream)
    try:
        int("bad label")
    except ValueError:
        get_logger().exception("user.failed")
        logging.getLogger("library").exception("it failed")
    ours, theirs = _records(stream)

    assert ours["exception"] == theirs["exception"]
    assert "ValueError" == ours["exception"]["type"]
    assert "'bad label'" in ours["exception"]["message"]
    assert "exc_info" not in ours


def test_warnings_and_loggers_that_write_to_the_console_alone_end_here() -> None:
    """As torch's do: once, with the logger's name, and by the level that was asked for."""
    stream, console = io.StringIO(), io.StringIO()
    library = logging.getLogger("library.alone")
    library.propagate, library.handlers[:] = False, [logging.StreamHandler(console)]
    logs.configure(stream, "warning", rank=1)
    library.setLevel(logging.DEBUG)
    library.warning("trouble")
    library.info("chatter")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old way", DeprecationWarning, stacklevel=1)
    first, second = _records(stream)

    assert ("trouble", "library.alone", 1) == (first["event"], first["logger"], first["rank"])
    assert "py.warnings" == second["logger"]
    assert "DeprecationWarning: old way" in second["event"]
    assert console.getvalue() == ""


def test_secrets_are_masked_whoever_logs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """In messages, fields, exceptions, warnings; passwords in URLs even if nobody knows them."""
    monkeypatch.setenv("SOME_TOKEN", "hunter22")
    stream = io.StringIO()
    logs.configure(stream)
    get_logger().info("login hunter22", user={"auth": ["hunter22"]}, password="unknown")
    logging.getLogger("library").warning("got %r", {"t": "hunter22"})
    logging.getLogger("library").warning("https://me:unknown@host/")
    try:
        int("hunter22")
    except ValueError:
        logging.getLogger("library").exception("x")

    assert 4 == len(_records(stream))
    assert "hunter22" not in stream.getvalue()
    assert "unknown" not in stream.getvalue()


def test_a_flood_is_bounded_and_counted_and_events_go_on() -> None:
    """Of 10,000 lines those that fit stay; an event tells of the others at the first and each tenfold, and at the end."""
    stream = io.StringIO()
    logs.configure(stream, "info", events.EVENTS, most_bytes=20_000, rank=0)
    log = logs.get_logger(events.OURS)
    for number in range(5000):
        get_logger().info("user.says", number=number)
        logging.getLogger("library").warning("again %d", number)
    log.info(events.TRAINING_FINISHED)
    logs.tell_left_out()
    logs.tell_left_out()
    records = _records(stream)
    told = [r for r in records if r["event"] == events.LOG_LEFT_OUT]
    kept = [r for r in records if r["event"] == "user.says" or "logger" in r]

    assert sum(len(json.dumps(r)) + 1 for r in kept) <= 20_000
    assert events.TRAINING_FINISHED in {r["event"] for r in records}
    assert [1, 10, 100, 1000] == [r["lines"] for r in told[:-1]]
    assert 10_000 == told[-1]["lines"] + len(kept)
    assert {"jsonl"} == {r["stream"] for r in told}
    assert told[-1]["bytes"] > 20_000


def test_a_process_that_was_forked_says_so(real_processes: None) -> None:
    """A loader's lines have its name, and the worker's fields."""
    stream = io.StringIO()
    logs.configure(stream, rank=3)
    context = multiprocessing.get_context("fork")
    read, write = context.Pipe(duplex=False)

    def child() -> None:
        get_logger().info("loader.says")
        write.send(stream.getvalue())

    process = context.Process(target=child, name="reader")
    process.start()
    text = read.recv()
    process.join()

    assert ("reader", 3) == tuple(json.loads(text)[key] for key in ("process", "rank"))
