from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.sinks.prometheus import Prometheus, exposition
from elasticflow.sinks.sink import Point
from tests.servers import free_port
from tests.sinks.runs import Written, event_line

if TYPE_CHECKING:
    from pathlib import Path

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")


def families(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return what Prometheus' own parser reads: samples by name, each with its labels."""
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in parser.text_string_to_metric_families(text)
    }


def test_the_newest_values_are_what_prometheus_reads(tmp_path: Path) -> None:
    """Names are made fit, values stay, labels tell the run; a state for each that a run may be in."""
    written = Written.under(tmp_path)
    sink = Prometheus({"textfile": "collected/training.prom"})
    sink.open(written.facts, {})
    sink.points(
        [
            Point(1, 10.0, values={"loss": 2.5, "eval/accuracy": 0.25}),
            Point(2, 11.0, values={"loss": math.nan, "elasticflow/restarts": 3.0, "tokens_per_s": math.inf}),
        ]
    )
    sink.events([event_line(events.RUN_STARTED), event_line(events.RUN_FAILED)])

    found = families((tmp_path / "collected" / "training.prom").read_text())

    labels = {"job_name": "toy", "run_id": "r1"}
    assert [(labels, 2.0)] == found["elasticflow_step"]
    assert [(labels, 0.25)] == found["elasticflow_eval_accuracy"]
    assert [(labels, 3.0)] == found["elasticflow_restarts"]
    assert [(labels, math.inf)] == found["elasticflow_tokens_per_s"]
    assert math.isnan(found["elasticflow_loss"][0][1])
    states = {labels["state"]: value for labels, value in found["elasticflow_run_state"]}
    assert {"running": 0, "finished": 0, "failed": 1, "interrupted": 0} == states


def test_a_new_process_begins_with_the_values_before(tmp_path: Path) -> None:
    """A value that does not come again, of an evaluation for instance, stays."""
    written = Written.under(tmp_path)
    first = Prometheus({})
    first.open(written.facts, {})
    first.points([Point(5, 10.0, values={"eval/accuracy": 0.25, "loss": -math.inf})])
    second = Prometheus({})
    second.open(written.facts, json.loads(json.dumps(first.remember())))
    second.points([Point(6, 11.0, values={"loss": 1.0})])

    text = (written.folder.path / "prometheus.prom").read_text()
    values = {name: found[0][1] for name, found in families(text).items() if name != "elasticflow_run_state"}

    assert {
        "elasticflow_step": 6.0,
        "elasticflow_last_point_timestamp_seconds": 11.0,
        "elasticflow_eval_accuracy": 0.25,
        "elasticflow_loss": 1.0,
    } == values


def test_labels_are_quoted() -> None:
    """A name with quotes, backslashes and line ends is read as it was."""
    odd = 'a"b\\c\nd'
    (labels, _), *_ = families(exposition({"loss": 1.0}, "running", {"job_name": odd}))["elasticflow_loss"]
    assert odd == labels["job_name"]


@pytest.mark.integration
def test_the_same_is_served_to_scrapes(tmp_path: Path) -> None:
    """At /metrics, as Prometheus wants it; nothing elsewhere, and nobody there once the sink is closed."""
    url = f"127.0.0.1:{free_port()}"
    sink = Prometheus({"listen": url})
    sink.open(Written.under(tmp_path).facts, {})
    sink.points([Point(7, 10.0, values={"loss": 0.125})])
    with urllib.request.urlopen(f"http://{url}/metrics", timeout=60) as answer:
        text, kind = answer.read().decode(), answer.headers["Content-Type"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{url}/", timeout=60)
    sink.close()

    assert 0.125 == families(text)["elasticflow_loss"][0][1]
    assert "text/plain; version=0.0.4; charset=utf-8" == kind
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://{url}/metrics", timeout=60)
