"""structlog set up once per process: JSON lines, one write per line."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TextIO, cast

import structlog

if TYPE_CHECKING:
    from collections.abc import Collection, MutableMapping
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger, Processor

LEVELS = ("debug", "info", "warning", "error")


def _ask_live(logger: object, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in line.items():
        if callable(value):
            line[key] = value()
    return line


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        _ask_live,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        # Local variables may hold secrets, so tracebacks are plain text without them.
        structlog.processors.format_exc_info,
    ]


def configure(stream: TextIO, level: str = "info", always: Collection[str] = (), **bound: Any) -> None:
    """Send structlog, stdlib logging and warnings of this process as JSON lines to *stream*.

    Each line is one `write` followed by a flush, so lines of several processes never tear
    (structlog's default PrintLogger writes text and newline apart under `python -u`).

    Args:
        stream: An open text stream, owned by the caller.
        level: One of LEVELS; lines below it are dropped.
        always: Events that are written whatever the level: a program reads them.
        bound: Fields on every line (`run_id`, `generation`, `rank`, ...); a callable is asked for each line.
    """
    number: int = getattr(logging, level.upper())
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)
    structlog.configure(
        processors=[_from(number, always), *_shared(), structlog.processors.JSONRenderer(default=str)],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_shared(), structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    logging.captureWarnings(capture=True)


def _from(lowest: int, always: Collection[str]) -> Processor:
    levels = logging.getLevelNamesMapping()

    def dropped(logger: Any, method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if levels.get(method.upper(), logging.ERROR) < lowest and record["event"] not in always:
            raise structlog.DropEvent
        return record

    return dropped


def open_log(path: Path) -> TextIO:
    """Return *path* open for appending, line-buffered, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1, encoding="utf-8")


def bind(**fields: Any) -> None:
    """Add *fields* to every later line of this process."""
    structlog.contextvars.bind_contextvars(**fields)


def get_logger(name: str) -> FilteringBoundLogger:
    """Return a logger; every call gives one event: `log.info("snapshot.committed", step=10)`."""
    return cast("FilteringBoundLogger", structlog.get_logger(origin=name))
