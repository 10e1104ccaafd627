from __future__ import annotations

import datetime as dt
import json
import math

import pytest

from elasticflow.compiler.provenance.job_json import job_digest, job_from_json, job_to_json
from elasticflow.errors import JobRefusedError
from elasticflow.jobfile.type_checks.annotations import DatasetValue
from tests.compiler.jobs import make_job


def test_a_job_goes_to_json_and_back() -> None:
    """A job read back from strict JSON is the same job, infinities included."""
    job = make_job(model__args={"a": math.inf, "b": [-math.inf, {"c": None}]}, optimizer__clip_grad_norm=2.5)
    text = json.dumps(job_to_json(job), allow_nan=False)
    assert job_from_json(json.loads(text)) == job


def test_nan_survives() -> None:
    """A NaN argument is NaN again after JSON."""
    values = json.loads(json.dumps(job_to_json(make_job(model__args={"a": math.nan})), allow_nan=False))
    assert math.isnan(job_from_json(values).model.args["a"])


def test_equal_jobs_have_equal_digests() -> None:
    """The order of keys does not count, a value does."""
    one = make_job(model__args={"a": 1, "b": 2})
    assert job_digest(one) == job_digest(make_job(model__args={"b": 2, "a": 1}))
    assert job_digest(one) != job_digest(make_job(model__args={"a": 1, "b": 3}))


def test_dates_are_refused() -> None:
    """A TOML date in args names its key."""
    with pytest.raises(JobRefusedError) as caught:
        job_digest(make_job(model__args={"start": dt.date(2026, 11, 20)}))
    assert caught.value.message == "[model] args.start: a date cannot be an argument"


def test_a_value_of_the_data_is_no_text() -> None:
    """`"${dataset.size}"`, and the text itself, are two jobs, in JSON as in Python."""
    named = make_job(model__args={"width": DatasetValue("size"), "all": [{"of": DatasetValue("a.b")}]})
    text = json.dumps(job_to_json(named), allow_nan=False)
    assert job_from_json(json.loads(text)) == named
    assert job_from_json(json.loads(text)).model.args["all"] == [{"of": DatasetValue("a.b")}]
    written = make_job(model__args={"width": "${dataset.size}"})
    assert job_digest(make_job(model__args={"width": DatasetValue("size")})) != job_digest(written)


def test_a_key_that_came_later_is_left_out_where_it_says_nothing() -> None:
    """So that the digest of a job without it is what it was, and records of before are read."""
    tables = job_to_json(make_job())
    assert "groups" not in tables["optimizer"]
    assert job_from_json(tables) == make_job()
    of_set = job_to_json(make_job(evaluation__entry="pieces:digits"))["evaluation"]
    assert not {"samples", "collate"} & of_set.keys()
    grouped = make_job(optimizer__groups=[{"ndim": [0, 1], "args": {"lr": 1.0}}])
    assert job_from_json(job_to_json(grouped)) == grouped


def test_a_variable_that_is_declared_no_secret_stays_one() -> None:
    """A run that is resumed from its record, again and again, keeps it: what stands in a record is no secret."""
    job = make_job(env__PUBLIC_KEY={"value": "abc", "secret": False}, env__API_KEY="hidden", env__A="1")
    again = job_from_json(job_to_json(job))
    assert job_to_json(again) == job_to_json(job)
    assert again.env is not None
    assert again.env.values() == {"PUBLIC_KEY": "abc", "A": "1"}
    assert again.env.secrets() == frozenset()
