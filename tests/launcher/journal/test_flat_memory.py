"""A run of many quick steps does not make its supervisor larger."""

from __future__ import annotations

import gc
import io
import sys
import threading
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.launcher.journal.display_thread import DisplayThread
from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.journal.metrics import Metrics
from elasticflow.launcher.supervisor.ingest import EnvironmentRecord, Ingest
from elasticflow.observe.live_view import LiveView
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

STEPS, FIRST, AT_ONCE = 40_000, 10_000, 20
# Blocks of memory: one for ten steps would be too many.
MOST = (STEPS - FIRST) // 10


class _Nowhere(io.StringIO):
    """A terminal that keeps nothing."""

    def write(self, text: str) -> int:
        """Forget *text*."""
        return len(text)


def _step(number: int) -> dict[str, Any]:
    return {
        "origin": events.OURS, "event": events.STEP, "timestamp": "2026-11-22T03:41:39.006495Z", "level": "info", "rank": 0,
        "node": "n0", "run_id": "r", "job": "j", "generation": 1, "world_size": 1, "step": number, "epoch": number // 100,
        "in_epoch": number // 100 + 1, "samples": 8 * number, "loss": 1 / number, "lr": 0.1, "time": 1e9 + number / 1000,
        "seconds": 0.001,
    }  # fmt: skip


def test_many_quick_steps_leave_it_as_small_as_it_was(tmp_path: Path) -> None:
    """What is written and shown is forgotten: journal, metrics, state and the live view."""
    folder = RunFolder(tmp_path / "runs" / "j" / "r")
    view = LiveView(_Nowhere(), tty=True, colour=True)
    seen = threading.Event()

    def show(record: dict[str, Any]) -> None:
        view.show(record)
        if record.get("step") == awaited[0]:
            seen.set()

    awaited, display = [0], DisplayThread(show, view.tick)
    journal, metrics = Journal(folder, 1, display), Metrics(folder)
    ingest = Ingest(journal, metrics, EnvironmentRecord(folder.launch(1)))
    journal.event(events.RUN_STARTED, launch=1, resumed=False, pid=1, torch="2", uri="u", endpoint=None)
    journal.event(events.TRAINING_FIRST_STEP, step=1, seconds_since_failure=None)

    def train(first: int, last: int) -> int:
        for number in range(first, last, AT_ONCE):
            if number % 1000 == 1:  # no more waits to be shown than in a real run
                seen.clear()
                awaited[0] = number + AT_ONCE - 1
                ingest.lines([_step(each) for each in range(number, number + AT_ONCE)])
                assert seen.wait(60)
            else:
                ingest.lines([_step(each) for each in range(number, number + AT_ONCE)])
        gc.collect()
        return sys.getallocatedblocks()

    before = train(1, FIRST)
    after = train(FIRST + 1, STEPS)
    assert display.close()
    journal.close()
    metrics.close()
    assert metrics.last_step() == STEPS
    assert after - before < MOST
