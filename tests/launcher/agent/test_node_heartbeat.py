"""Silence of the store, told from a pause of one's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticflow.launcher.agent import node_heartbeat
from elasticflow.launcher.rendezvous import liveness


class _Ended(BaseException):
    """The process would have ended."""


class _Clock:
    """Time passes while somebody waits: as long as *pauses* says, then not any more."""

    def __init__(self, pauses: list[float]) -> None:
        self._now, self._pauses = 1000.0, list(pauses)

    def monotonic(self) -> float:
        return self._now

    def wait(self, _: float) -> bool:
        if not self._pauses:
            return True
        self._now += self._pauses.pop(0)
        return False

    def is_set(self) -> bool:
        return False


def _end(_: int) -> None:
    raise _Ended


@pytest.fixture(params=["agent", "supervisor"])
def watch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what watches a store that never answers, with pauses between its looks."""

    def run(pauses: list[float]) -> None:
        clock = _Clock(pauses)
        module: Any = node_heartbeat if request.param == "agent" else liveness
        kind: Any = module.NodeHeartbeat if request.param == "agent" else module.SupervisorHeartbeat
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "os", SimpleNamespace(_exit=_end))
        watching = kind.__new__(kind)
        watching._is_over, watching._is_gone, watching._answered = clock, False, clock.monotonic()
        watching._address = SimpleNamespace(endpoint="head:29400")
        watching._watch()

    return run


def test_store_that_does_not_answer_ends_the_process(watch: Any) -> None:
    """A request to a host that is cut off never returns, so somebody else has to look."""
    with pytest.raises(_Ended):
        watch([0.25] * 100)


def test_process_that_was_stopped_blames_nobody(watch: Any) -> None:
    """A run that was frozen as a whole, SIGSTOP and SIGCONT, goes on where it was."""
    watch([0.25, 3600.0, 0.25, 0.25])
