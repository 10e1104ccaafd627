"""structlog set up once per process: JSON lines, one write per line."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

import structlog

from elasticflow import events
from elasticflow.system.exceptions import describe, of_exc_info
from elasticflow.system.masking import mask_of

if TYPE_CHECKING:
    from collections.abc import Collection, MutableMapping
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger, Processor

    from elasticflow.system.masking import Mask

LEVELS = ("debug", "info", "warning", "error")
MOST_BYTES = 64 << 20
"""Of a worker's log, of one generation, beside events: what a job logs beyond that is counted and left out."""
_JSON = structlog.processors.JSONRenderer(default=str)


class _Lines:
    """The last processor: makes the lines.

    Lines that are no events count against `MOST_BYTES`. Once these are spent, such lines are left out, and the event `log.left_out`
    tells their number: at the first, and whenever it has grown tenfold.
    """

    def __init__(self, mask: Mask, always: Collection[str], most: int) -> None:
        self._mask, self._always, self._left = mask, always, most
        self._pid = os.getpid()
        self._lines = self._bytes = self._told = 0

    def __call__(self, logger: object, name: str, record: MutableMapping[str, Any]) -> str:
        if os.getpid() != self._pid:
            record["process"] = _name_of_process()
        error = of_exc_info(record.pop("exc_info", None))
        if error is not None:
            record["exception"] = describe(error)
        is_event = record["event"] in self._always and record.get("origin") == events.OURS
        try:
            line = cast("str", _JSON(logger, name, self._mask.record(record)))
        except Exception:  # noqa: BLE001  a key that is a tuple, a list in itself, a __repr__ that fails: no log call ends training
            told = {
                key: value if isinstance(value, str | int | float | None) else f"no JSON: {type(value)}"
                for key, value in record.items()
            }
            line = cast("str", _JSON(logger, name, self._mask.record(told)))
        if not is_event:
            self._count(len(line) + 1)
        return line

    def _count(self, size: int) -> None:
        """Count a line; raise `DropEvent` if there is no room for it any more."""
        if self._left >= size:
            self._left -= size
            return
        self._left = 0
        self._lines, self._bytes = self._lines + 1, self._bytes + size
        if self._lines >= 10 * self._told:
            self.tell()
        raise structlog.DropEvent

    def tell(self) -> None:
        """Log how much was left out so far, unless that was told."""
        if self._lines > self._told and events.LOG_LEFT_OUT in self._always:
            self._told = self._lines
            facts = {"stream": "jsonl", "lines": self._lines, "bytes": self._bytes}
            get_logger(events.OURS).warning(events.LOG_LEFT_OUT, **facts)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records of the standard library; those that the line maker drops are left out."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except structlog.DropEvent:
            return
        except Exception:  # noqa: BLE001  a record that cannot be formatted is told on standard error, as logging does
            self.handleError(record)
            return
        try:
            self.stream.write(text + "\n")
            self.flush()
        except OSError:
            self.handleError(record)


_lines: _Lines | None = None


def _add_bound(logger: object, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the bound fields. A callable among them is called; one among the fields of a log call is a value, such as a model."""
    bound = structlog.contextvars.get_contextvars()
    return {key: value() if callable(value) else value for key, value in bound.items()} | {**line}


def _add_place(logger: object, name: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the place of a call that logs a warning, by which warnings are told apart; a captured warning has it in its text."""
    record = line["_record"]
    if record.levelno >= logging.WARNING and record.name != "py.warnings":
        line["place"] = f"{record.pathname}:{record.lineno}"
    return line


def _shared() -> list[Processor]:
    return [
        _add_bound,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def configure(
    stream: TextIO,
    level: str = "info",
    always: Collection[str] = (),
    *,
    most_bytes: int = MOST_BYTES,
    **bound: Any,
) -> None:
    """Send structlog, stdlib logging and warnings of this process as JSON lines to *stream*.

    Each line is one `write` followed by a flush, so lines of several processes never tear
    (structlog's default PrintLogger writes text and newline apart under `python -u`). Processes that this one forks continue
    with it. Secrets of the environment are masked; an exception has no values of variables.

    Args:
        stream: An open text stream, owned by the caller.
        level: A level of `logging`, such as `info`; lines below it are dropped.
        always: Events that are written whatever the level, and however much was written: a program reads them.
        most_bytes: Most bytes of lines that are no events.
        bound: Fields on every line (`run_id`, `generation`, `rank`, ...); a callable is asked for each line.
    """
    global _lines  # noqa: PLW0603  as structlog and logging: one for the process
    number: int = getattr(logging, level.upper())
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)
    _lines = _Lines(mask_of(os.environ), always, most_bytes)
    structlog.configure(
        processors=[_from(number, always), *_shared(), _lines],
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=True,
    )
    handler = _Handler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_shared(), structlog.stdlib.add_logger_name, _add_place],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _lines],
        )
    )
    root = logging.getLogger()
    handler.setLevel(number)
    root.handlers[:] = [handler]
    root.setLevel(number)
    _gather_libraries()
    logging.captureWarnings(capture=True)


def _gather_libraries() -> None:
    """Have loggers that write to the console alone, as torch's and transformers' do, hand their records on to the root."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger) or logger.propagate or not logger.handlers:
            continue
        if all(type(handler) is logging.StreamHandler for handler in logger.handlers):
            logger.handlers.clear()
            logger.propagate = True


def tell_left_out() -> None:
    """Log how much of this process's log was left out, if that was not told; for use when it is about to end."""
    if _lines is not None:
        _lines.tell()


def _from(lowest: int, always: Collection[str]) -> Processor:
    levels = logging.getLevelNamesMapping()

    def dropped(logger: Any, method: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        # Anything may be logged: a dict, nothing.
        record["event"] = str(record.get("event", ""))
        if levels.get(method.upper(), logging.ERROR) < lowest and record["event"] not in always:
            raise structlog.DropEvent
        return record

    return dropped


def _name_of_process() -> str:
    """Return the name of this process, which the process that was set up has forked."""
    data = sys.modules.get("torch.utils.data")
    info = None if data is None else data.get_worker_info()
    return multiprocessing.current_process().name if info is None else f"loader {info.id}"


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
