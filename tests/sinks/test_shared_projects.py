"""Jobs whose runs have one id may share a project of a tracker: each run stays its own."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from elasticflow import events
from elasticflow.sinks.mlflow import MLflow
from elasticflow.sinks.sink import RunFacts
from elasticflow.sinks.trackio import Trackio

FACTS = [RunFacts("nightly", job, Path("/p/runs"), Path("/p")) for job in ("a", "b")]


@pytest.mark.parametrize(
    ("options", "names"), [({"project": "team"}, ["a-nightly", "b-nightly"]), ({}, ["nightly", "nightly"])]
)
def test_trackio_knows_runs_by_name(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], names: list[str]
) -> None:
    """In a project of the job's own, the run's id suffices."""
    trackio = MagicMock()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for facts in FACTS:
        sink = Trackio(options)
        sink.open(facts, {})
        sink.points([])
    assert [call.kwargs["name"] for call in trackio.init.call_args_list] == names


def test_mlflow_finds_a_run_again_by_job_and_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id alone would continue the run of another job of the experiment."""
    mlflow = MagicMock()
    mlflow.MlflowClient.return_value.search_runs.return_value = []
    mlflow.MlflowClient.return_value.get_run.return_value.data.params = {}
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    sink = MLflow({"experiment": "team"})
    sink.open(FACTS[0], {})
    _, query = mlflow.MlflowClient.return_value.search_runs.call_args.args
    assert query == "tags.`elasticflow.run_id` = 'nightly' and tags.`elasticflow.job` = 'a'"
    ended = mlflow.MlflowClient.return_value.set_terminated
    sink.events([{"event": events.RUN_FAILED, "class": "taken_over"}])  # another machine goes on with it
    ended.assert_not_called()
    sink.events([{"event": events.RUN_FAILED, "class": "crash"}])
    assert ended.call_args.args[1] == "FAILED"
