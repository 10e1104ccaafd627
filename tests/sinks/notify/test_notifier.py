"""[notify] beside a run folder that is written by hand: told once, late rather than not at all, and without its secret."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.jobfile.tables.notify import NotifyTable
from elasticflow.sinks import delivery as the_delivery
from elasticflow.sinks.delivery import Delivery
from elasticflow.sinks.notify.moments import Moments
from elasticflow.sinks.notify.notifier import Notifier, wanted_of
from tests.sinks.runs import Written, event_line
from tests.webhook_receiver import SECRET, Webhook, webhook

if TYPE_CHECKING:
    from pathlib import Path

Told = list[tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have deliveries try again at once."""
    monkeypatch.setattr(the_delivery, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(the_delivery, "_PAUSE_AT_END_S", 0.0)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return a run of three launches: two that were interrupted, and one that finished."""
    run = Written.under(tmp_path)
    for generation, end in enumerate(
        [events.RUN_INTERRUPTED, events.RUN_INTERRUPTED, events.RUN_FINISHED], 1
    ):
        start = event_line(events.RUN_STARTED, generation, launch=generation)
        run.events(start, event_line(end, generation, step=generation))
    return run


def delivery_of(written: Written, told: Told, **keys: Any) -> Delivery:
    """Return a delivery of the one way that [notify] with *keys* has, which is to end once all is delivered."""

    def report(event: str, /, **fields: Any) -> None:
        told.append((event, fields))

    ((name, options),) = NotifyTable.model_validate(keys).ways().items()
    moments = Moments(written.folder, budget=3)
    wanted = partial(wanted_of, options=options, moments=moments)
    made = Delivery(
        name, partial(Notifier, options, moments), {}, written.facts, written.folder, report, wanted
    )
    made.finish()
    return made


def tell(written: Written, hook: Webhook, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> Told:
    """Deliver all that is there to *hook*; return what was reported."""
    told: Told = []
    monkeypatch.setenv("HOOK", hook.url)
    delivery_of(written, told, url="${env:HOOK}", **keys).run()
    return told


def test_a_message_gets_through_in_the_end_and_once(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """500, 429 and no answer at all: one warning, one word when it works again, one message. No file has the secret."""
    with webhook(500, 429, 0) as hook:
        told = tell(written, hook, monkeypatch, timeout="3 s")  # of the answer that never comes
        assert 4 == hook.asked
        assert [] == tell(written, hook, monkeypatch)

    (body,) = hook.bodies
    assert " finished with 3 steps\n" in body["text"]
    assert ["sink.failed", "sink.recovered"] == [event for event, _ in told]
    assert {
        "sink": "notify.url",
        "error": "127.0.0.1 answers 500 Internal Server Error: Cannot POST ***",
    } == told[0][1]
    texts = [path.read_text() for path in written.folder.path.rglob("*") if path.is_file()]
    assert not any(part in text for part in SECRET.split("/") for text in [*texts, str(told)])


def test_what_was_before_the_launch_is_not_told(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds [notify] to a run that continues is told of what comes; other options tell nothing again."""
    with webhook() as hook:
        tell(written, hook, monkeypatch, on=["interrupted", "finished"])
        tell(written, hook, monkeypatch, on=["interrupted"], format="json")
        # A machine whose clock is late leads on.
        at = "2026-11-23T01:00:00.000000Z"
        written.events(
            event_line(events.RUN_STARTED, 4, launch=4, timestamp=at),
            event_line(events.RUN_INTERRUPTED, 4, step=4, timestamp=at),
        )
        tell(written, hook, monkeypatch, on=["interrupted"], format="json")
    assert 2 == len(hook.bodies)
    assert ("interrupted", 4) == (hook.bodies[1]["event"], hook.bodies[1]["step"])


def test_what_is_left_is_counted_in_messages(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in events."""
    monkeypatch.delenv("HOOK", raising=False)
    delivery = delivery_of(written, [], url="${env:HOOK}")
    assert (1, "message") == (delivery.unsent(), delivery.unit)


def test_a_variable_that_is_gone_is_named(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a resume from another shell; what was not told is told once it is there."""
    monkeypatch.setenv("HOOK", "")
    told: Told = []
    delivery = delivery_of(written, told, url="${env:HOOK}")
    with webhook() as hook:

        def set_it(event: str, /, **_: Any) -> None:
            told.append((event, _))
            monkeypatch.setenv("HOOK", hook.url)

        monkeypatch.setattr(delivery, "_report", set_it)
        delivery.run()
    assert {"sink": "notify.url", "error": "notify.url: the variable HOOK is not set"} == told[0][1]
    assert 1 == len(hook.bodies)


@pytest.mark.usefixtures("real_processes")
def test_a_command_is_a_way_of_its_own(written: Written) -> None:
    """With a record of its own: where one of two ways fails, the other tells nothing twice."""
    told: Told = []
    delivery_of(written, told, command=["sh", "-c", 'echo "$ELASTICFLOW_EVENT" >> told.txt']).run()
    assert "finished\n" == (written.facts.project_root / "told.txt").read_text()
    assert ["notify.command.json"] == [path.name for path in (written.folder.path / "sinks").iterdir()]
