from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.sinks.otlp import Otlp, metric_name
from elasticflow.sinks.sink import Point, SinkError
from tests.otlp_receiver import otlp_receiver
from tests.sinks.runs import Written, event_line

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed")
pytestmark = pytest.mark.integration


def test_gauges_and_log_records_arrive_with_their_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values in double precision at the time of their step; events with the names of the conventions; headers as given."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b,authorization=Bearer c")
    with otlp_receiver() as received:
        sink = Otlp({"endpoint": f"{received.endpoint}/"})
        sink.open(Written.under(tmp_path).facts, {})
        sink.points(
            [
                Point(1, 10.5, 1, {"loss": 0.1, "eval/accuracy": 0.25}),
                Point(2, 11.5, 1, {"loss": math.inf}, {"sample": "once"}),
            ]
        )
        sink.events(
            [event_line(events.NODE_LOST, node="n1", reason="gone"), event_line(events.RUN_FINISHED, step=2)]
        )

    assert [(10_500_000_000, 0.1), (11_500_000_000, math.inf)] == received.points["elasticflow.loss"]
    assert [(10_500_000_000, 0.25)] == received.points["elasticflow.eval.accuracy"]
    assert [1.0, 2.0] == [value for _, value in received.points["elasticflow.step"]]
    assert ["elasticflow.text", "node.lost", "run.finished"] == [name for name, _ in received.events]
    assert {"elasticflow.node": "n1", "elasticflow.generation": 1}.items() <= received.events[1][1].items()
    assert ("a b", "Bearer c") == (received.headers["X-Team"], received.headers["Authorization"])
    assert ("elasticflow", "c0ffee") == (received.resource["service.name"], received.resource["git.commit"])


def test_what_a_receiver_refuses_is_said(tmp_path: Path) -> None:
    """The status of the answer, and who gave it."""
    with otlp_receiver() as received:
        received.refuses = 503
        sink = Otlp({"endpoint": received.endpoint})
        sink.open(Written.under(tmp_path).facts, {})
        with pytest.raises(SinkError, match=r"127\.0\.0\.1:\d+ answers 503 Service Unavailable"):
            sink.points([Point(1, 10.5, 1, {"loss": 0.1})])


def test_names_are_dotted() -> None:
    """What is ours already does not get its name twice."""
    assert ["elasticflow.eval.val.loss", "elasticflow.restarts"] == [
        metric_name("eval/val/loss"),
        metric_name("elasticflow/restarts"),
    ]
