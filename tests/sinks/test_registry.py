from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from elasticflow.errors import SinkMissingError
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.logging import SINKS, LoggingTable
from elasticflow.jobfile.tables.notify import NotifyTable
from elasticflow.sinks import registry
from elasticflow.sinks.facts import parameters_of
from elasticflow.sinks.registry import KINDS, check_installed, make_sink, serving_command
from tests.sinks.runs import Collecting


def logging(**keys: Any) -> LoggingTable:
    """Return a table [logging]."""
    return LoggingTable.model_validate(keys)


def test_every_sink_of_the_job_file_is_there() -> None:
    """A class for each name."""
    assert set(SINKS) == set(KINDS)


def test_options_are_those_of_the_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sinks in the list, and of one's own; what is not given is left out."""
    table = logging(
        sinks=["prometheus", "wandb"],
        wandb={"mode": "offline"},
        mlflow={"uri": "sqlite:///a.db"},
        custom={"mine": {"entry": "tests.sinks.runs:Collecting", "args": {"remote": "there"}}},
    )

    assert {
        "prometheus": {},
        "wandb": {"mode": "offline"},
        "mine": {"remote": "there"},
    } == table.chosen_sinks()
    sink = make_sink(table, "mine", {"remote": "there"})
    assert (Collecting, {"remote": "there"}) == (type(sink), sink.options)


def test_what_is_missing_is_named_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it at once, before anything starts."""
    monkeypatch.setattr(registry, "_is_installed", lambda module: module not in {"mlflow", "wandb"})
    check_installed(logging(sinks=["tensorboard", "prometheus"]))
    with pytest.raises(SinkMissingError, match="has mlflow, wandb") as caught:
        check_installed(logging(sinks=["mlflow", "tensorboard", "wandb"]))
    assert "pip install 'elasticflow[mlflow,wandb]'" == caught.value.remedy


def test_an_entry_that_makes_something_else_is_refused() -> None:
    """It is said what it makes."""
    table = logging(custom={"mine": {"entry": "builtins:dict"}})
    with pytest.raises(TypeError, match="builtins:dict makes a dict"):
        make_sink(table, "mine", {})


@pytest.mark.parametrize(
    "uri", ["https://me:secret@host", "mlflow.example.org", "https://host?token=abcdefgh"]
)
def test_secrets_and_bare_names_are_no_uris(uri: str) -> None:
    """Passwords come from the environment; a server has a scheme."""
    with pytest.raises(ValidationError):
        logging(mlflow={"uri": uri})


def test_parameters_hold_no_secrets() -> None:
    """What is called like one is masked, also in lists and URLs; where the run is kept is no parameter."""
    tables = {
        "optimizer": {"args": {"lr": 0.1, "betas": [0.9, 0.99]}},
        "dataset": {"args": {"api_token": "abc", "url": "https://me:secret@host/x", "limit": None}},
        "env": {"PATH": "/bin"},
    }

    assert {
        "optimizer.args.lr": 0.1,
        "optimizer.args.betas": "[0.9, 0.99]",
        "dataset.args.api_token": "***",
        "dataset.args.url": "https://me:***@host/x",
    } == dict(parameters_of(tables))


def test_notify_alone_needs_the_process_beside_the_supervisor() -> None:
    """As a sink does; a job with neither has none."""
    job = Job.model_construct(logging=logging(), notify=None)
    assert () == serving_command(job)
    told = job.model_copy(update={"notify": NotifyTable(command=["true"])})
    assert "elasticflow.sinks.main" in serving_command(told)
