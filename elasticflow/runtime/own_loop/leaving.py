"""How a loop of the script's own ends before its time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.runtime import worker as life
from elasticflow.runtime.process import stopping

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker


class EndsHereIfAsked:
    """`with` it, a process that was asked to leave before it trained ends there: nothing is lost by that."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, stopping.Leaving):
            life.leave_untrained(self._worker)
