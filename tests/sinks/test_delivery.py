from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow import events
from elasticflow.sinks import delivery as the_delivery
from elasticflow.sinks.delivery import Delivery, record_path
from elasticflow.sinks.sink import SinkError
from tests.sinks.runs import Collecting, Remote, Written, event_line, losses, step_line

if TYPE_CHECKING:
    from pathlib import Path

Told = list[tuple[str, dict[str, Any]]]


def delivery_of(
    written: Written, remote: Remote, told: Told, options: dict[str, Any] | None = None
) -> Delivery:
    """Return a delivery to *remote*, as a new process makes it, that is to end once all is delivered."""

    def report(event: str, /, **fields: Any) -> None:
        told.append((event, fields))

    made = Delivery(
        "mine", lambda: Collecting({"remote": remote}), options or {}, written.facts, written.folder, report
    )
    made.finish()
    return made


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have deliveries try again at once."""
    monkeypatch.setattr(the_delivery, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(the_delivery, "_PAUSE_AT_END_S", 0.0)


def test_a_failing_sink_is_told_once_and_catches_up(tmp_path: Path) -> None:
    """Three calls fail: one warning, one word when it works again, and each point once."""
    written, remote = Written.under(tmp_path), Remote(failures=3)
    told: Told = []
    written.metrics(step_line(step) for step in range(1, 4))
    written.events(event_line(events.RUN_STARTED), event_line(events.RUN_FINISHED))

    delivery_of(written, remote, told).run()

    assert [(1, 1.001), (2, 2.001), (3, 3.001)] == losses(remote.points)
    assert ["run.started", "run.finished"] == remote.events
    assert ["sink.failed", "sink.recovered"] == [event for event, _ in told]
    assert {"sink": "mine", "error": "ConnectionError: nobody answers at all"} == told[0][1]


def test_the_next_process_continues_with_what_was_remembered(tmp_path: Path) -> None:
    """A second process opens the sink with what the first one left, and sends what is new."""
    written, remote = Written.under(tmp_path), Remote()
    written.metrics(step_line(step) for step in range(1, 4))
    delivery_of(written, remote, []).run()
    written.cut_metrics(2)
    written.metrics(step_line(step, generation=2) for step in range(3, 6))

    delivery_of(written, remote, []).run()

    assert [{}, {"count": 3}] == remote.opened
    assert [(1, 1.001), (2, 2.001), (3, 3.001), (4, 4.002), (5, 5.002)] == losses(remote.points)


def test_another_place_gets_everything(tmp_path: Path) -> None:
    """A sink whose options changed is another one: nothing was sent there."""
    written, first, second = Written.under(tmp_path), Remote(), Remote()
    written.metrics([step_line(1)])
    delivery_of(written, first, [], {"uri": "a"}).run()

    delivery_of(written, second, [], {"uri": "b"}).run()

    assert [{}] == second.opened
    assert losses(first.points) == losses(second.points)


def test_a_damaged_record_begins_anew(tmp_path: Path) -> None:
    """Rather twice than never."""
    written, remote = Written.under(tmp_path), Remote()
    written.metrics([step_line(1)])
    delivery_of(written, remote, []).run()
    path = record_path(written.folder, "mine")
    for damaged in ("{torn", path.read_text().replace('"metrics": {', '"metrics": 3, "other": {')):
        path.write_text(damaged)
        delivery_of(written, remote, []).run()

    assert [1, 1, 1] == [point.step for point in remote.points]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=8))
@settings(max_examples=80)
def test_nothing_is_lost_and_only_what_was_not_recorded_comes_again(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[int, int, bool]]
) -> None:
    """Processes are killed between a delivery and its record: then that batch comes again, and nothing else does."""
    root = tmp_path_factory.mktemp("project")
    written, remote = Written.under(root), Remote()
    told: Told = []
    step, again = 0, 0
    for generation, (steps, back, is_killed) in enumerate(story, 1):
        begin = max(0, step - back)
        written.cut_metrics(begin) if written.folder.metrics.exists() else None
        written.metrics(step_line(number, generation) for number in range(begin + 1, step + steps + 1))
        step += steps
        before = len(remote.points)
        delivery = delivery_of(written, remote, told)
        if is_killed:
            _deliver_without_record(delivery)
            again += len(remote.points) - before
        else:
            delivery.run()
    delivery_of(written, remote, told).run()

    steps_sent = [point.step for point in remote.points]
    assert set(steps_sent) == set(range(1, step + 1))
    assert len(steps_sent) <= step + again
    assert told == []


def _deliver_without_record(delivery: Delivery) -> None:
    """Do what a process does that is killed after the first delivery and before its record."""
    sink = delivery._make()
    sink.open(delivery._run, delivery._record.remembered)
    sink.points(delivery._reader.after(delivery._record.position).points)


def test_what_is_left_is_counted(tmp_path: Path) -> None:
    """What a sink has not got, for the word about it at the end of a launch."""
    written, remote = Written.under(tmp_path), Remote()
    written.metrics([step_line(1)])
    delivery_of(written, remote, []).run()
    written.metrics([step_line(2), step_line(3)])

    assert 2 == delivery_of(written, remote, []).unsent()
    record = json.loads(record_path(written.folder, "mine").read_text())
    assert ("mine", {"count": 1}) == (record["sink"], record["remembered"])


def test_who_asks_for_a_pause_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end of a launch, where others are tried twice a second."""
    written, remote = Written.under(tmp_path), Remote()
    written.events(event_line(events.RUN_STARTED))
    slept: list[float] = []
    monkeypatch.setattr("elasticflow.sinks.delivery.time.sleep", slept.append)
    failures = [SinkError("too many", 7.0), SinkError("down")]

    def make() -> Collecting:
        if failures:
            raise failures.pop(0)
        return Collecting({"remote": remote})

    told: Told = []
    delivery = delivery_of(written, remote, told)
    monkeypatch.setattr(delivery, "_make", make)
    delivery.run()
    first, second = slept
    assert 6.0 < first <= 7.0
    assert second == 0.0
    assert "too many" == told[0][1]["error"]


def test_a_sink_is_closed_though_its_first_record_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk: the next try opens the sink anew, which may need the port that the first one holds."""
    written, remote = Written.under(tmp_path), Remote()
    written.metrics([step_line(1)])
    closed: list[Collecting] = []

    def close(sink: Collecting) -> None:
        closed.append(sink)

    monkeypatch.setattr(Collecting, "close", close)
    write, failures = the_delivery.write_record, [OSError(errno.ENOSPC, "No space left on device")]

    def write_or_fail(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        write(*arguments)

    monkeypatch.setattr(the_delivery, "write_record", write_or_fail)
    delivery_of(written, remote, []).run()
    assert len(closed) == len(set(map(id, closed))) == 2
