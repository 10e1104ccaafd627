"""Workers that stand by in a run whose modules no fork can have: told, replaced, called, gone with the run."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.disturbed import Outcome, Series

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project
    from tests.end_to_end.tiny_job import Reference

_THREAD = """
import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_killed_workers_are_replaced_by_their_standbys(project: Project, tiny_reference: Reference) -> None:
    """A standby that is killed is replaced; `status` names them; the next workers are they; no bit is another."""
    tiny_job.write_standard(project)
    code = project.root / "obedient.py"
    code.write_text(code.read_text() + _THREAD)
    series = Series(project, "stood-by", job="tiny", TINY_PAUSE_S="0.1")
    killed = _ready(series, 1, [])
    os.kill(killed[1], signal.SIGKILL)
    standbys = _ready(series, 1, killed)
    assert standbys[0] == killed[0]
    assert standbys[1] != killed[1]

    status = project.start("status", "stood-by", run_id="stood-by", job="tiny")
    assert status.end() == 0
    assert f"2 ready (pid {standbys[0]}, {standbys[1]}), " in status.output.read_text()

    os.kill(series.running.pid_of(1), signal.SIGKILL)
    generation = series.trains(1)
    assert standbys == [series.running.pid_of(rank) for rank in (0, 1)]
    assert standbys != _ready(series, generation, [])

    tiny_job.hurry(project)
    outcome = Outcome("worker", "step")
    series.finish(tiny_reference.found, outcome)
    assert [] == outcome.problems


def _ready(series: Series, generation: int, but: list[int]) -> list[int]:
    """Return the standbys of *generation* by local rank, once they are ready and others than *but*."""

    def found() -> list[int]:
        ready = [e for e in series.named(events.STANDBYS_READY) if e["generation"] == generation]
        return list(ready[-1]["pids"]) if ready and ready[-1]["pids"] != but else []

    return list(series.wait("standbys", found))
