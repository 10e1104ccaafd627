"""What happened to a run, read from its files by nothing of elasticflow's, and whether its commands tell the same."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.end_to_end.harness import ROOT, read_lines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.otlp_receiver import Received

# Reasons of generations that nobody has failed for.
_NO_FAILURES = {"start", "resume", "resized", "drained", "preempted"}


@dataclass(frozen=True)
class Facts:
    """What events.jsonl and the metrics of a run say.

    Attributes:
        failures: Generations that ended in a failure, and of which class.
        starts: Step that each generation resumed from, by generation.
        kept: Generations of which steps count, in order.
        redone: Steps of each generation that were lost and done again, where there are any.
        step: The last finished one.
        loss: Of that step.
        snapshot: The newest that was committed.
    """

    failures: dict[int, str]
    starts: dict[int, int]
    kept: list[int]
    redone: dict[int, int]
    step: int
    loss: float
    snapshot: str


def facts_of(run: Path) -> Facts:
    """Read them."""
    events = read_lines(run / "events.jsonl")
    begun = [e for e in events if e["event"] == "generation.started"]
    steps = [line for line in read_lines(run / "metrics.jsonl") if "loss" in line]
    redone = [line for line in read_lines(run / "metrics.redone.jsonl") if "loss" in line]
    return Facts(
        {e["generation"] - 1: e["reason"] for e in begun if e["reason"] not in _NO_FAILURES},
        {e["generation"]: e["step"] for e in events if e["event"] == "training.started"},
        list(dict.fromkeys(line["generation"] for line in steps)),
        dict(Counter(line["generation"] for line in redone)),
        steps[-1]["step"],
        steps[-1]["loss"],
        [e["name"] for e in events if e["event"] == "snapshot.committed"][-1],
    )


def require_same_story(root: Path, run: Path) -> None:
    """Make sure that `status`, `why`, `report` and `logs` tell of *run*, in the project at *root*, what its files say."""
    facts = facts_of(run)
    status = json.loads(_told(root, "status", run.name, "--format=json"))
    assert (facts.step, facts.loss, facts.snapshot) == tuple(status[k] for k in ("step", "loss", "snapshot"))
    assert max(facts.starts) == status["generation"]

    incidents: list[dict[str, Any]] = json.loads(_told(root, "why", run.name, "--format=json"))
    assert facts.failures == {each["generation"]: each["kind"] for each in incidents}
    redone = {each["generation"]: each["redone"] for each in incidents if each["redone"]}
    assert facts.redone == redone

    page = run.parent / "report.html"
    _told(root, "report", run.name, f"--output={page}")
    text = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page.read_text("utf-8"))))
    for generation, kind in facts.failures.items():
        assert f"{kind} · generation {generation}" in text
    for generation in facts.kept[1:]:
        first = facts.starts[generation] + 1
        assert f"generation {generation} from step {first}" in text
    for count in facts.redone.values():
        assert f"{count} step{'s' * (count > 1)} done again" in text

    for generation, step in facts.starts.items():
        told = _told(root, "logs", run.name, f"--generation={generation}", "--format=json")
        began = [
            line for line in map(json.loads, told.splitlines()) if line.get("event") == "training.started"
        ]
        assert [(generation, step)] == [(line["generation"], line["step"]) for line in began]


def _told(root: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "elasticflow", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def require_same_story_in_sinks(run: Path, received: Received) -> None:
    """Make sure that what TensorBoard, Prometheus and an OTLP receiver were sent of *run* is what its files say."""
    from prometheus_client.parser import text_string_to_metric_families
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    facts = facts_of(run)
    lines = read_lines(run / "metrics.jsonl")
    steps = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    events = read_lines(run / "events.jsonl")

    reader = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    assert [step for step, _ in steps] == [point.step for point in reader.Scalars("loss")]
    assert [loss for _, loss in steps] == pytest.approx([point.value for point in reader.Scalars("loss")])
    starts = [(e["step"], e["world_size"]) for e in events if e["event"] == "training.started"]
    sizes = [(point.step, point.value) for point in reader.Scalars("elasticflow/world_size")]
    # Two may be of one step, and one may be of an earlier step than the one before.
    assert sorted(starts) == sorted(sizes)
    assert len(facts.failures) == reader.Scalars("elasticflow/restarts")[-1].value

    assert [loss for _, loss in steps] == [value for _, value in received.points["elasticflow.loss"]]
    assert [event["event"] for event in events] == [name for name, _ in received.events]

    text = (run / "prometheus.prom").read_text("utf-8")
    gauges = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert (facts.step, facts.loss) == (
        gauges["elasticflow_step"][0].value,
        gauges["elasticflow_loss"][0].value,
    )
    assert len(facts.failures) == gauges["elasticflow_restarts"][0].value
    [ended] = [e["event"].removeprefix("run.") for e in events[-1:]]
    assert [ended] == [s.labels["state"] for s in gauges["elasticflow_run_state"] if s.value]
