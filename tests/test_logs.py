"""One write per line, levels, and what is written whatever the level."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from elasticflow import events, get_logger, logs

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
