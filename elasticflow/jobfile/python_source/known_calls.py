"""What is known of the job's entry points, so that many cases cost what one does."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from elasticflow.jobfile.python_source.definitions import NoAttributeError, UnreadableModuleError
from elasticflow.jobfile.python_source.modules import CannotTellError, NoModuleError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.jobfile.python_source.resolve import Resolver

_Result = TypeVar("_Result")
_ANSWERS = (CannotTellError, NoModuleError, NoAttributeError, UnreadableModuleError)


def content_of(value: object) -> object:
    """Return what is equal for equal values only, types included."""
    try:
        return repr(value)
    except ValueError:  # a number of thousands of digits
        return object()


class KnownCalls:
    """What was found out while the jobs of one file were checked.

    Attributes:
        resolvers: By the folders of the jobs' own code.
        clean: Calls of entry points with nothing to say about.
    """

    def __init__(self) -> None:
        self.resolvers: dict[tuple[Path, ...], Resolver] = {}
        self.clean: set[object] = set()
        self._results: dict[tuple[object, ...], object] = {}

    def once(self, make: Callable[[], _Result], *key: object) -> _Result:
        """Return what *make* returns, or raise what it finds wrong: it is called once for each key."""
        if key not in self._results:
            try:
                self._results[key] = make()
            except _ANSWERS as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, Exception):
            raise result.with_traceback(None)
        return result  # type: ignore[return-value]  # what it was asked for by this key
