"""What an agent says of its workers while they are at it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from elasticflow.launcher.agent import reporter as reporter_module
from elasticflow.launcher.agent.reporter import Reporter
from elasticflow.launcher.agent.worker_heartbeats import WorkerActivity
from elasticflow.protocol.messages import Activity
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_what_lasts_is_told_once_and_that_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over in a moment is not told at all; a job that compiles is said to compile."""
    posted: list[Any] = []
    at: dict[str, Any] = {"now": 100.0, "awaited": None}
    monkeypatch.setattr(
        reporter_module, "time", SimpleNamespace(monotonic=lambda: at["now"], time=lambda: at["now"])
    )
    outbox = cast("Any", SimpleNamespace(post=posted.append))
    heartbeats = cast("Any", SimpleNamespace(awaited=lambda: at["awaited"]))
    folder = RunFolder(tmp_path)
    reporter = Reporter(outbox, "n0", folder, cast("Any", None), heartbeats, compiles=True)

    def tell(awaited: WorkerActivity | None, exits: dict[int, tuple[int, float]] | None = None) -> list[Any]:
        posted.clear()
        at["now"] += 1.0
        at["awaited"] = awaited
        reporter.activity(exits or {})
        return list(posted)

    assert [] == tell(None)
    assert [] == tell(WorkerActivity("build", 0, 0.5))
    assert [Activity("n0", "build", "", 0, 1.5)] == tell(WorkerActivity("build", 0, 1.5))
    assert [] == tell(WorkerActivity("build", 0, 2.5))
    assert [Activity("n0", "compile", "torch.compile", 0, 3.0)] == tell(WorkerActivity("compile", 0, 3.0))
    assert [Activity("n0", "")] == tell(WorkerActivity("step", 1, 0.1))
    assert [] == tell(WorkerActivity("step", 2, 0.1))
    assert [Activity("n0", "step", "", 2, 1.0)] == tell(WorkerActivity("step", 2, 1.0))
    assert [Activity("n0", "step", "", 3, 1.0)] == tell(WorkerActivity("step", 3, 1.0))

    reporter._ranks = {0: 4, 1: 5}
    ended = {1: (0, at["now"] + 0.5)}
    assert [Activity("n0", "")] == tell(WorkerActivity("step", 4, 0.1), ended)
    assert [Activity("n0", "linger", "rank 4 to end, as rank 5 did", 0, 1.5)] == tell(None, ended)
    assert [] == tell(WorkerActivity("leave", 4, 9.0), ended)
