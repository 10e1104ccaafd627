"""Silence of the store, told from a pause of one's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elasticflow.launcher.agent import node_heartbeat
from elasticflow.launcher.agent.node_heartbeat import NodeHeartbeat
from elasticflow.launcher.rendezvous import leadership, liveness
from elasticflow.launcher.rendezvous.liveness import Beat
from elasticflow.protocol.store_address import StoreAddress

if TYPE_CHECKING:
    from elasticflow.launcher.rendezvous.supervisor_channel import Outbox


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
        monkeypatch.setattr(liveness, "time", clock)
        monkeypatch.setattr(Beat, "start", lambda _: None)
        address = StoreAddress("head", 29400)
        if request.param == "agent":
            monkeypatch.setattr(node_heartbeat, "os", SimpleNamespace(_exit=_end))
            config: Any = SimpleNamespace(node="n0", store_address=address)
            beat = NodeHeartbeat(config, cast("Outbox", SimpleNamespace(number=1)))._beat
        else:
            monkeypatch.setattr(leadership, "os", SimpleNamespace(_exit=_end))
            beat = leadership._start_beat(address)
        monkeypatch.setattr(beat, "_is_over", clock)
        beat._watch()

    return run


def test_store_that_does_not_answer_ends_the_process(watch: Any) -> None:
    """A request to a host that is cut off never returns, so somebody else has to look."""
    with pytest.raises(_Ended):
        watch([0.25] * 100)


def test_process_that_was_stopped_blames_nobody(watch: Any) -> None:
    """A run that was frozen as a whole, SIGSTOP and SIGCONT, continues where it was."""
    watch([0.25, 3600.0, 0.25, 0.25])
