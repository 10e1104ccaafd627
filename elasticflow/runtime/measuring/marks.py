"""Names for the parts of a step, in traces: `elasticflow: forward`. Outside of a trace they cost nothing that can be measured."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

PREFIX = "elasticflow: "
"""What their names in a trace begin with."""

_NOTHING: AbstractContextManager[None] = nullcontext()


class _Recording:
    is_on = False


def record(*, is_on: bool) -> None:
    """Have marks be recorded from now on, or no more."""
    _Recording.is_on = is_on


def mark(name: str) -> AbstractContextManager[Any]:
    """Return a context that gives the code inside it the name *name* while a trace is recorded."""
    if not _Recording.is_on:
        return _NOTHING
    from torch.profiler import record_function

    return record_function(PREFIX + name)
