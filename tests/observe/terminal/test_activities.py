"""What a run is at, in words."""

from __future__ import annotations

import pytest

from elasticflow.observe.terminal.activities import awaited_of, doing_of


@pytest.mark.parametrize(
    ("phase", "subject", "has_stepped", "words"),
    [
        ("import", "datasets", False, "starting: importing datasets, 3 s"),
        ("start", "", False, "starting: the workers come up, 3 s"),
        ("build", "", False, "starting: building model and data, 3 s"),
        ("compile", "", False, "starting: the first step, 3 s"),
        ("compile", "torch.compile", False, "starting: compiling the model, 3 s"),
        ("compile", "", True, "training: compiling the model, 3 s"),
        ("evaluate", "", True, "evaluating: after step 41, 3 s"),
        ("data", "", True, "waiting: for the data of step 42, 3 s"),
        ("step", "", True, "training: in step 42, 3 s"),
        (
            "linger",
            "rank 1 to end, as rank 0 did",
            True,
            "ending: waiting for rank 1 to end, as rank 0 did, 3 s",
        ),
        ("of a later version", "", True, "busy: of a later version, 3 s"),
    ],
)
def test_phases_in_words(phase: str, subject: str, words: str, *, has_stepped: bool) -> None:
    """Each phase that workers report has words of its own; an unknown one is named."""
    doing = doing_of({"phase": phase, "subject": subject, "step": 41, "since": 10.0}, has_stepped=has_stepped)
    assert doing is not None
    assert words == f"{doing.label}: {doing.lasting(13.9)}"


def test_clock_that_was_set_back_is_no_negative_time() -> None:
    """A machine's clock may jump."""
    doing = doing_of({"phase": "evaluate", "step": 1, "since": 100.0}, has_stepped=True)
    assert doing is not None
    assert "after step 1, 0 s" == doing.lasting(50.0)
    assert "after step 1, 1 h 40 min" == doing.lasting(6100.0)


def test_the_others_wait_in_a_step() -> None:
    """Of several nodes the one counts that is at something else, and of these the one that began first."""
    nodes: dict[str, dict[str, object]] = {
        "n0": {"phase": "step", "step": 7, "since": 1.0},
        "n1": {"phase": "data", "step": 7, "since": 5.0},
        "n2": {"phase": "evaluate", "step": 7, "since": 4.0},
        "n3": {"phase": "hook", "since": None},
    }
    awaited = awaited_of(nodes, has_stepped=True)
    assert awaited is not None
    assert "evaluating" == awaited.label
    nodes["n1"] = {"phase": "linger", "subject": "node n2 to end, as node n1 did", "since": 6.0}
    awaited = awaited_of(nodes, has_stepped=True)
    assert awaited is not None
    assert "ending" == awaited.label
    assert awaited_of({}, has_stepped=True) is None
