"""What a worker tells when training begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from torch import nn

from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.process.context import Moments, Worker
from elasticflow.runtime.process.stopping import Stopped
from elasticflow.runtime.process.votes import LEAVE, Vote

if TYPE_CHECKING:
    from elasticflow.events import Event


@pytest.mark.parametrize(
    ("stopped", "wanted", "by_rule", "reason"),
    [
        (Stopped("enough", 1), None, False, "enough"),
        (Stopped("accuracy above 0.9", None), None, False, None),
        (Stopped(None, 0), LEAVE, False, None),
        (None, "enough", False, "enough"),
        (None, "accuracy above 0.9", True, None),
        (None, LEAVE, False, None),
        (None, None, False, None),
    ],
)
def test_a_snapshot_says_why_the_code_ends_training(
    stopped: Stopped | None, wanted: str | None, reason: str | None, *, by_rule: bool
) -> None:
    """Also before the ranks agree: a hook raised StopTraining, and the step's snapshot may be the last thing before a kill."""
    vote = Vote()
    vote.stop_wanted, vote.stop_is_by_rule = wanted, by_rule
    worker = cast("Worker", SimpleNamespace(stopped=stopped, vote=vote))
    assert reason == Worker.own_reason_to_stop(worker)


def told_at_the_start(
    schedule: IndexSchedule, rank: int = 0, model: nn.Module | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Return the events of one rank that begins to train."""
    events: list[dict[str, Any]] = []

    def event(event: Event, **fields: Any) -> None:
        events.append({"event": event, "level": event.level, **fields})

    stand_in = SimpleNamespace(
        rank=rank, vote=Vote(), device="cpu", world_size=1,
        moments=Moments(), listen=lambda: None, all_true=lambda mine: mine, phase=lambda _: None, event=event,
        generators=SimpleNamespace(rest=lambda: None), leave_if_asked=lambda: None, progress=SimpleNamespace(start=lambda *_, **__: None),
    )  # fmt: skip
    Worker.start_training(
        cast("Worker", stand_in), schedule.start, schedule, model or nn.Linear(1, 1), log_every=1, **options
    )
    return events


@pytest.mark.parametrize(("keeps", "modes"), [(True, [True, False]), (False, [True, True])])
def test_a_script_has_modules_frozen_by_their_modes(keeps: bool, modes: list[bool]) -> None:
    """A job's model is put into training mode as a whole; a script's stays as the script has it."""
    model = nn.Sequential(nn.BatchNorm1d(1))
    model[0].eval()
    told_at_the_start(IndexSchedule(8, 4, epochs=1), model=model, keeps_modes=keeps)
    assert [module.training for module in model.modules()] == modes


def test_a_batch_that_swallows_the_data_is_told_by_the_run() -> None:
    """100,000 of 400 samples are one step: nobody has meant that without a word."""
    first, started = told_at_the_start(IndexSchedule(400, 100_000, epochs=3))
    assert first == {
        "event": "dataset.smaller_than_batch",
        "level": "warning",
        "samples": 400,
        "batch": 100_000,
        "steps": 1,
    }
    assert started["steps"] == 1


@pytest.mark.parametrize(("batch", "rank"), [(400, 0), (399, 0), (100_000, 1)])
def test_a_batch_within_the_data_is_not_worth_a_word(batch: int, rank: int) -> None:
    """All of the data at once is a choice; and one rank tells it for all."""
    events = told_at_the_start(IndexSchedule(400, batch, epochs=3), rank)
    assert "dataset.smaller_than_batch" not in [each["event"] for each in events]
