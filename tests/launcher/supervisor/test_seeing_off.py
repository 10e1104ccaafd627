"""The supervisor's wait for its agents, whose writers may still be writing the last snapshot."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import errors, events
from elasticflow.launcher.supervisor.commands import Verdict
from elasticflow.launcher.supervisor.leave_requests import CancelMark, Hurry, LeaveRequests
from elasticflow.launcher.supervisor.supervisor import Supervisor
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from tests.launcher.lifecycle_trial import Trial


@pytest.mark.parametrize("signals", [0, 1, 2])
def test_one_signal_does_not_cut_the_last_snapshot_of_a_finished_run_short(
    tmp_path: Path, signals: int
) -> None:
    """It came while the last step was trained; the verdict stays, and only a second one ends the wait."""
    asked = LeaveRequests()
    asked.numbers = [signal.SIGINT] * signals
    looks_left = [False] * 3
    agents = type("Agents", (), {"are_gone": property(lambda _: not looks_left or looks_left.pop())})()
    verdict = Verdict("finished", errors.FINISHED, events.RUN_FINISHED, {})
    launch = SimpleNamespace(plan=SimpleNamespace(restarts=SimpleNamespace(grace_s=60.0)))
    supervisor: Any = SimpleNamespace(
        _asked=asked, _agents=agents, _launch=launch, _lifecycle=SimpleNamespace(verdict=verdict)
    )
    is_hurried = Hurry(asked, CancelMark(tmp_path / "cancel"), signals)
    assert verdict == Supervisor._see_off(supervisor, lambda _: None, verdict, is_hurried)
    assert bool(looks_left) is (signals == 2)


def test_launch_that_ends_at_once_stops_its_workers_on_other_machines(tmp_path: Path) -> None:
    """A worker that hangs there notices nothing, and a store of its own lives on: its machine would never be free."""
    told: list[tuple[str, object]] = []
    channel: Any = SimpleNamespace(
        request=lambda what, generation: told.append((what, generation)),
        stop=lambda code, is_cancelled: told.append(("end", (code, is_cancelled))),
        await_notice=lambda *_: None,
        take=list,
    )
    verdict = Verdict("interrupted", errors.INTERRUPTED, events.RUN_INTERRUPTED, {})
    supervisor: Any = SimpleNamespace(
        _asked=LeaveRequests(),
        _cancel=CancelMark(tmp_path / "cancel"),
        _heeded=0,
        _launch=SimpleNamespace(
            store=SimpleNamespace(outlive_store=lambda: None),
            request=SimpleNamespace(folder=RunFolder(tmp_path)),
        ),
        _lifecycle=SimpleNamespace(is_idle=False, generation=SimpleNamespace(number=3)),
        _agents=SimpleNamespace(end=lambda: None, nodes=set()),
        _conclude=lambda verdict: verdict.exit_code,
    )

    assert 75 == Supervisor._close(supervisor, channel, lambda _: None, verdict)
    assert [("stop", 3), ("end", (75, False))] == told
    (tmp_path / "cancel").touch()
    Supervisor._close(supervisor, channel, lambda _: None, verdict)
    assert ("end", (75, True)) == told[-1]


@pytest.mark.parametrize(
    ("status", "code", "ends"), [("finished", 0, 1), ("failed", 3, 1), ("interrupted", 75, 75)]
)
def test_end_of_a_run_is_for_the_launch_that_has_taken_it_over_to_say(
    trial: Trial, tmp_path: Path, status: str, code: int, ends: int
) -> None:
    """This process was stopped after the last step, and another machine leads by now: of two that say "finished" one is too many."""
    verdict = Verdict(status, code, events.RUN_FINISHED, {})
    trial.lifecycle.verdict = verdict
    supervisor: Any = SimpleNamespace(
        _asked=LeaveRequests(),
        _cancel=CancelMark(tmp_path / "cancel"),
        _heeded=0,
        _launch=SimpleNamespace(
            store=SimpleNamespace(outlive_store=lambda: None, is_led_anew=lambda: True),
            request=SimpleNamespace(folder=RunFolder(tmp_path)),
        ),
        _lifecycle=trial.lifecycle,
        _agents=SimpleNamespace(end=lambda: None, nodes=set()),
        _conclude=lambda verdict: verdict.exit_code,
    )
    channel: Any = SimpleNamespace(stop=lambda *_, **__: None, await_notice=lambda *_: None, take=list)

    assert ends == Supervisor._close(supervisor, channel, trial.on, verdict)
    assert ("taken_over" == trial.verdict.fields.get("class")) is (status != "interrupted")
