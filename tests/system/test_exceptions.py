"""Exceptions as JSON: frames of the user's code first, causes, and never a value of a variable."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from elasticflow.system.exceptions import describe, is_own_code, of_exc_info


def _fails(depth: int) -> None:
    secret = "hunter" + "2"
    if depth:
        _fails(depth - 1)
    json.loads("{" + secret[:0])


def _error(depth: int = 0) -> BaseException:
    try:
        _fails(depth)
    except ValueError as error:
        return error
    raise AssertionError


def test_own_frames_come_first_and_hold_no_values() -> None:
    """The innermost of the user's own before those of libraries, in which it was raised."""
    described = describe(_error())
    frames = described["frames"]

    assert described["type"] == "json.decoder.JSONDecodeError"
    assert [True, True] == [frame["is_own"] for frame in frames[:2]]
    assert "_fails" == frames[0]["function"]
    assert 'json.loads("{" + secret[:0])' == frames[0]["code"]
    assert {False} == {frame["is_own"] for frame in frames[2:]}
    assert "hunter2" not in json.dumps(described)


def test_frames_of_a_deep_recursion_are_few() -> None:
    """The innermost stay."""
    assert len(describe(_error(200))["frames"]) == 50


def test_causes_are_told_and_circles_end() -> None:
    """`raise ... from`, and what was being handled."""
    first, second = ValueError("first"), KeyError("second")
    second.__cause__ = first
    first.__context__ = second
    assert ["ValueError: first"] == describe(second)["causes"]
    second.__cause__, second.__suppress_context__ = None, True
    assert "causes" not in describe(second)


def test_an_exception_that_cannot_be_told_is_told_so() -> None:
    """Its own `__str__` fails."""

    class BadError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert "cannot be made" in describe(BadError())["message"]


def test_whose_code_it_is() -> None:
    """Libraries, elasticflow itself and the generated entry point are not the user's."""
    import pytest

    import elasticflow

    assert is_own_code("/home/me/project/model.py")
    for path in (
        pytest.__file__,
        elasticflow.__file__,
        json.__file__,
        "<string>",
        "/r/launches/0001/train.py",
    ):
        assert not is_own_code(str(Path(path) if path[0] != "<" else path)), path


def test_what_a_log_call_means() -> None:
    """`exc_info` as True, as an exception, as a tuple."""
    error = ValueError("x")
    assert of_exc_info(error) is error
    assert of_exc_info((ValueError, error, None)) is error
    assert of_exc_info(None) is of_exc_info(()) is None
    try:
        raise error
    except ValueError:
        assert of_exc_info(value=True) is error
    assert sys.exc_info()[1] is None
