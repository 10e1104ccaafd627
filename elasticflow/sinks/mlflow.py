"""MLflow: one run of an experiment, continued by its id.

Guarantee: MLflow has each point once. A metric of MLflow is a row of key, value, step and time, so a row that is sent
again after a crash changes nothing. A run whose id was lost is found again by its tags `elasticflow.run_id` and
`elasticflow.job`.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.observe.history import is_taken_over
from elasticflow.sinks.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.events import EventRecord
    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts

_MOST_METRICS, _MOST_PARAMETERS, _MOST_TAGS = 1000, 100, 100  # limits of a call to MLflow's REST API
_WRONG = re.compile(r"[^\w\-. :/]")
_ENDS: dict[str, str] = {
    events.RUN_FINISHED: "FINISHED",
    events.RUN_FAILED: "FAILED",
    events.RUN_INTERRUPTED: "KILLED",
}
# The follower retries by itself; MLflow's own retries would last for minutes.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "GIT_PYTHON_REFRESH": "quiet",
}


class MLflow(Sink):
    """Logs to an MLflow tracking server, or to a database that MLflow opens."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._Client: Any = MlflowClient
        self._Metric, self._Param, self._Tag = Metric, Param, RunTag
        self._run_id = ""

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Continue the run, or create it; parameters that changed are set as tags."""
        given = self.options.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        own, artifacts = (
            f"sqlite:///{run.project_root / 'mlflow.db'}",
            (run.project_root / "mlartifacts").as_uri(),
        )
        self._client = self._Client(tracking_uri=given or own)
        experiment = self._experiment(self.options.get("experiment") or run.job, None if given else artifacts)
        self._run_id = remembered.get("run_id") or self._found(experiment, run) or self._made(experiment, run)
        known = self._client.get_run(self._run_id).data.params
        new = [self._Param(key, str(value)) for key, value in run.parameters.items() if key not in known]
        changed = [
            self._Tag(f"elasticflow.now.{key}", str(value))
            for key, value in run.parameters.items()
            if key in known and known[key] != str(value)
        ]
        for begin in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self._run_id, params=new[begin : begin + _MOST_PARAMETERS])
        for begin in range(0, len(changed), _MOST_TAGS):
            self._client.log_batch(self._run_id, tags=changed[begin : begin + _MOST_TAGS])
        self._client.update_run(self._run_id, status="RUNNING")

    def remember(self) -> Remembered:
        """Return the id of MLflow's run."""
        return {"run_id": self._run_id}

    def points(self, batch: Sequence[Point]) -> None:
        """Log numbers as metrics, texts and images as artifacts named by their step."""
        metrics = [
            self._Metric(_WRONG.sub("_", name), value, round(1000 * point.time), point.step)
            for point in batch
            for name, value in point.values.items()
        ]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[begin : begin + _MOST_METRICS])
        for point in batch:
            for name, text in point.texts.items():
                self._client.log_text(self._run_id, text, f"texts/{name}/{point.step:09d}.txt")
            for name, path in point.images.items():
                self._client.log_artifact(self._run_id, str(path), f"images/{name}")

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Set the run's status as launches begin and end."""
        for record in batch:
            name = str(record.get("event"))
            if name == events.RUN_STARTED:
                self._client.update_run(self._run_id, status="RUNNING")
            elif name in _ENDS and not is_taken_over(record):
                self._client.set_terminated(self._run_id, _ENDS[name])

    def _experiment(self, name: str, artifacts: str | None) -> str:
        """Return the id of the experiment *name*; create the experiment if there is none."""
        if (experiment := self._client.get_experiment_by_name(name)) is None:
            return str(self._client.create_experiment(name, artifact_location=artifacts))
        return str(experiment.experiment_id)

    def _found(self, experiment: str, run: RunFacts) -> str | None:
        # Runs of several jobs may have one id, and jobs may share an experiment.
        own = f"tags.`elasticflow.run_id` = '{run.run_id}' and tags.`elasticflow.job` = '{run.job}'"
        runs = self._client.search_runs([experiment], own, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _made(self, experiment: str, run: RunFacts) -> str:
        tags = dict(run.tags)
        if "git.commit" in tags:
            tags["mlflow.source.git.commit"] = tags["git.commit"]
        made = self._client.create_run(experiment, tags=tags, run_name=run.run_id)
        return str(made.info.run_id)
