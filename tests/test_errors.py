"""Failures and their exit codes."""

from __future__ import annotations

import inspect

from elasticflow import errors


def test_exit_codes_are_those_promised() -> None:
    """The set of exit codes, and their numbers, are frozen."""
    promised = {
        "FINISHED": 0,
        "ANSWER_IS_NO": 1,
        "NOT_STARTED": 2,
        "BUDGET_SPENT": 3,
        "INTERRUPTED": 75,
        "KILLED_BY_USER": 130,
    }

    assert promised == {name: getattr(errors, name) for name in promised}
    assert sorted(promised.values()) == sorted(errors.EXIT_CODES)


def test_every_failure_has_an_exit_code_of_the_table_and_says_when_it_happens() -> None:
    """Each class ends a command with a code of the table, and its docstring says when."""
    found = {each for _, each in inspect.getmembers(errors, inspect.isclass)}
    for failure in found - {errors.StopTraining}:  # which is no failure
        assert issubclass(failure, errors.ElasticflowError)
        assert failure.exit_code in errors.EXIT_CODES
        assert failure.__doc__


def test_message_and_remedy_are_shown_together() -> None:
    """The text of an error ends with what to do about it."""
    assert "port 1 is taken\n  help: use another" == str(
        errors.PortTakenError("port 1 is taken", "use another")
    )
    assert "it is running" == str(errors.RunLockedError("it is running"))
