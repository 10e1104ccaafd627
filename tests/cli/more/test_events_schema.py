"""The schema of events: made from one table, printed by a command, and able to tell a wrong line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator

from elasticflow import events
from elasticflow.cli.main import call
from elasticflow.cli.more import events_schema as schema
from elasticflow.events import FIELDS, SCHEMA_VERSION
from elasticflow.protocol.worker_environment import DeviceUsage
from tests import run_folders

if TYPE_CHECKING:
    from pathlib import Path

HEAD = {"timestamp": "2026-11-23T03:00:00.000001Z", "job": "j", "run_id": "r", "generation": 1}
STARTED: dict[str, Any] = {
    **HEAD,
    "level": "info",
    "event": "run.started",
    "launch": 1,
    "resumed": False,
    "pid": 7,
    "torch": "2.13.0",
    "uri": "/r",
    "endpoint": None,
    "resume_command": None,
    "schema": SCHEMA_VERSION,
}
LOST: dict[str, Any] = {**HEAD, "level": "warning", "event": "node.lost", "node": "n1", "reason": "silent"}
OF_RANK_0 = {"origin": "elasticflow", "node": "n0", "rank": 0, "world_size": 1, "step": 3}
COMMITTED: dict[str, Any] = {
    **HEAD,
    "level": "info",
    "event": "snapshot.committed",
    "name": "s",
    "bytes": 1,
    "seconds": 0.1,
    "trigger": "end",
}


def test_every_field_of_an_event_has_a_type_and_a_meaning_and_no_other_has() -> None:
    """The table of fields is complete, and none stands in it that nobody writes."""
    of_events = {name for event in events.EVENTS.values() for name in event.fields}
    of_lines = {*events.COMMON_FIELDS, *events.WORKER_FIELDS, "origin", "logger", "process", "exception"}
    assert set(FIELDS) == of_events | of_lines | {"count", "grad_norm", "mfu", *DeviceUsage._fields}
    assert all(field.type.removesuffix("?") in schema.TYPES and field.meaning for field in FIELDS.values())


@pytest.mark.parametrize(
    "line", [STARTED, LOST, COMMITTED, {**COMMITTED, **OF_RANK_0}, {**COMMITTED, "step": 4}]
)
def test_right_lines_are_right(line: dict[str, Any]) -> None:
    """As the supervisor and workers write them; the whole schema and the definition of the event agree."""
    assert [] == list(Draft202012Validator(schema.events_schema()).iter_errors(line))
    assert [] == list(run_folders.validators()[line["event"]].iter_errors(line))


WRONG = {
    "a name nobody knows": {**LOST, "event": "node.went"},
    "a field nobody knows": {**LOST, "colour": "red"},
    "a field is missing": {k: v for k, v in LOST.items() if k != "reason"},
    "a common field is missing": {k: v for k, v in LOST.items() if k != "run_id"},
    "a text that is a number": {**LOST, "reason": 3},
    "a number that is a text": {**COMMITTED, "bytes": "1"},
    "a flag that is a number": {**STARTED, "resumed": 1},
    "null where something is to say": {**LOST, "reason": None},
    "another level": {**LOST, "level": "info"},
    "no time": {**LOST, "timestamp": "yesterday"},
    "half of a worker's fields": {**COMMITTED, "origin": "elasticflow", "rank": 0},
    "what stays in rank logs": {**HEAD, "level": "error", "event": "worker.raised"},
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_wrong_lines_are_found(line: dict[str, Any], tmp_path: Path) -> None:
    """By the schema, and by what looks at the run folders of all tests that start runs."""
    assert [] != list(Draft202012Validator(schema.events_schema()).iter_errors(line))

    run = tmp_path / "runs" / "j" / "r"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (STARTED, line)))
    assert len(run_folders.violations(tmp_path)) >= 1
    (run / "events.jsonl").write_text(json.dumps(STARTED) + "\n")
    assert run_folders.violations(tmp_path) == []


def test_lines_of_workers_and_metrics_are_looked_at_too(tmp_path: Path) -> None:
    """Metrics, logs and what hooks logged."""
    run = tmp_path / "runs" / "j" / "r"
    for folder in ("logs/g0001", "logged"):
        (run / folder).mkdir(parents=True)
    (run / "events.jsonl").write_text(json.dumps(STARTED) + "\n")
    step = dict.fromkeys(("step", "epoch", "in_epoch", "samples", "generation", "world_size", "seconds"), 1)
    good = step | {"loss": None, "lr": {"a": 0.1}, "time": 1.5, "tokens_per_s": 3.0, "my_own": None}
    (run / "metrics.jsonl").write_text(json.dumps(good) + "\n")
    assert run_folders.violations(tmp_path) == []

    (run / "metrics.jsonl").write_text(json.dumps(good | {"my_own": "text"}) + "\n")
    (run / "logs/g0001/rank0.jsonl").write_text(
        json.dumps({**HEAD, **OF_RANK_0, "level": "info", "event": "training.begun"}) + "\n"
    )
    (run / "logged/g0001-rank0.jsonl").write_text(json.dumps({"step": 1, "kind": "sound"}) + "\n")
    assert 3 == len({text.partition(":")[0] for text in run_folders.violations(tmp_path)})


def test_runs_of_earlier_versions_are_left_alone(tmp_path: Path) -> None:
    """Their `run.started` tells no schema."""
    run = tmp_path / "runs" / "j" / "r"
    run.mkdir(parents=True)
    old = {k: v for k, v in STARTED.items() if k != "schema"}
    (run / "events.jsonl").write_text(
        json.dumps(old) + "\n" + json.dumps(LOST | {"event": "node.went"}) + "\n"
    )
    assert run_folders.violations(tmp_path) == []


def test_the_command_prints_a_valid_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps to the rules of its own draft, and takes right lines alone.

    It is the schema that the lines of every run of the tests are checked against: `tests/run_folders.py`.
    """
    assert call(["guide", "--schema", "events"]) == 0
    printed = json.loads(capsys.readouterr().out)

    Draft202012Validator.check_schema(printed)
    assert printed == schema.events_schema()
    assert printed["$id"] == f"urn:elasticflow:events:{SCHEMA_VERSION}"
    validator = Draft202012Validator(printed)
    assert [validator.is_valid(line) for line in (STARTED, *WRONG.values())] == [True] + [False] * len(WRONG)
