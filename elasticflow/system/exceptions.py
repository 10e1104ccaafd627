"""A raised exception as JSON: type, message, frames; never a value of a variable, which may be a secret."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from elasticflow.errors import chain_of
from elasticflow.system.installation import is_of_installed_package

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
# The generated entry point of a launch.
_ENTRY_POINT = f"{os.sep}launches{os.sep}"
_MOST_FRAMES = 50
# Characters: a message may show all the data it met.
_LONGEST = 20_000


def describe(error: BaseException) -> dict[str, Any]:
    """Return *error* as JSON: `type`, `message`, `frames`, and `causes` if it has any.

    A frame has `path`, `line`, `function`, `code` and `is_own`: True for the user's own code, not a library's. Own frames come
    first, innermost before outermost: a reader looks there first.
    """
    frames = [_frame(frame) for frame in traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]][::-1]
    described: dict[str, Any] = {
        "type": type_name(type(error)),
        "message": _message(error),
        "frames": [*(f for f in frames if f["is_own"]), *(f for f in frames if not f["is_own"])],
    }
    _, *causes = chain_of(error)
    if causes:
        described["causes"] = [f"{type_name(type(cause))}: {_message(cause)}" for cause in causes]
    return described


def is_own_code(path: str) -> bool:
    """Return whether the file at *path* is the user's own: neither a library's, nor elasticflow's, nor a generated entry point."""
    if path.startswith(("<", _PACKAGE, *_LIBRARIES)):
        return False
    return _ENTRY_POINT not in path and not is_of_installed_package(path)


def _frame(frame: traceback.FrameSummary) -> dict[str, Any]:
    return {
        "path": frame.filename,
        "line": frame.lineno,
        "function": frame.name,
        "code": frame.line or None,
        "is_own": is_own_code(frame.filename),
    }


def type_name(kind: type[BaseException]) -> str:
    """Return the name of an exception's class as `describe` has it."""
    return (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  whatever the job's own code raises
        return "its message cannot be made: its __str__ fails"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def of_exc_info(value: object) -> BaseException | None:
    """Return the exception that `exc_info` of a log call stands for, if any."""
    if isinstance(value, BaseException):
        return value
    if isinstance(value, tuple):
        return value[1] if len(value) > 1 and isinstance(value[1], BaseException) else None
    return sys.exc_info()[1] if value else None
