"""The page says what the trials say, and names those who are better; it is made of the raw data that lie beside it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.measured.peers import page
from tests.measured.peers.__main__ import TRIALS, VERSIONS, plan
from tests.measured.peers.peers import PEERS, SCRIPTS

CALM = {"first_step_s": 3.0, "steps_per_s": 100.0, "stall_ms": 5.0}


def trial(peer: str, fault: str = "worker", **facts: Any) -> dict[str, Any]:
    """Return the record of a trial after which all is right."""
    right = {"lost": 0, "repeated": 0, "is_whole": True, "replicas_agree": True, "ended": True}
    about = {
        "peer": peer,
        "variant": "as documented",
        "fault": fault,
        "model": "mlp",
        "workers": 2,
        "number": 0,
    }
    more = {"load": 1.0, "when": "2026-11-27T03:00:00Z", "machine": "2 cores"}
    return {**about, **more, **right, "pause_s": 1.0, "redone": 3, "same_bits": True, **facts}


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        ({}, "same", "same bits"),
        ({"same_bits": False, "difference": 2e-6}, "close", "differs by 2e-06"),
        ({"same_bits": False, "difference": 0.4}, "weights", "differs by 0.4"),
        ({"replicas_agree": False}, "weights", "replicas differ"),
        ({"lost": 3}, "samples", "3 lost, 0 repeated"),
        ({"repeated": 2}, "samples", "0 lost, 2 repeated"),
        ({"is_whole": False}, "samples", "0 lost, 0 repeated"),
    ],
)
def test_outcome_of_a_run_that_ended(facts: dict[str, Any], kind: str, words: str) -> None:
    """Samples first, then replicas, then bits."""
    assert page.outcome(trial("torchrun", **facts)) == (kind, words)


@pytest.mark.parametrize(
    ("facts", "kind", "words"),
    [
        ({"ended": True}, "stopped", "stopped"),
        ({"ended": True, "resumed_from": 50, "reached": 90}, "stopped", "stopped at step 90"),
        ({"ended": False}, "stopped", "no further step"),
        ({"ended": False, "resumed_from": 50}, "stopped", "too slow"),
        # The step that was under way when the fault came was the last.
        (
            {"ended": False, "resumed_from": 90, "reached": 91, "reached_before": 91},
            "stopped",
            "no further step",
        ),
        ({"ended": False, "note": "step 200 was not reached"}, "none", "never had all workers"),
    ],
)
def test_outcome_of_a_run_that_did_not_end(facts: dict[str, Any], kind: str, words: str) -> None:
    """A run without final weights is no failure of samples, and its pause before it stopped is no figure."""
    record = {name: value for name, value in trial("torchrun").items() if name != "lost"} | facts
    assert page.outcome(record) == (kind, words)
    assert page.cell(record) == words
    assert page.outcome(None).kind == "none"


def test_those_who_are_better_are_named() -> None:
    """Where the data are right, and by more than 5 %."""
    ours = "elasticflow, job file"
    trials = [trial(ours, "none", **CALM), trial(ours, pause_s=1.0)]
    trials += [trial("torchrun", "none", **{**CALM, "steps_per_s": 120.0, "stall_ms": 4.9})]
    trials += [trial("torchrun", pause_s=0.5, redone=0), trial("torchft", pause_s=0.1, lost=4)]
    trials += [trial("Ray Train", pause_s=0.1, lost=4)]
    better = page.others_are_better(page.newest(trials, "mlp", 2))
    assert better == [
        "- steps per second: torchrun 120; elasticflow 100",
        "- time without a step, kill: torchft (loses samples) 0.1 s, torchrun 0.5 s; elasticflow 1 s",
        "- steps made again, kill: torchrun 0; elasticflow 3",
    ]


def test_the_newest_trial_counts() -> None:
    """Of the same model and number of workers."""
    trials = [trial("torchrun", pause_s=9.0), trial("torchrun", pause_s=2.0), trial("torchrun", workers=3)]
    found = page.newest(trials, "mlp", 2)
    assert [record["pause_s"] for record in found.values()] == [2.0]


def test_quiet_trials_go_before_busy_ones() -> None:
    """A busy trial counts alone where a cell has no quiet one, and has a star; the share of others decides where the load is our own."""
    quiet = [trial("torchrun", number=number, pause_s=float(number)) for number in range(3)]
    busy = [trial("torchrun", number=number, pause_s=50.0, load=9.0) for number in range(5)]
    [found] = page.newest([*quiet, *busy], "mlp", 2).values()
    assert found["pause_s"] == 1.0
    assert "*" not in page.cell(found)
    [starred] = page.newest(busy, "mlp", 2).values()
    assert page.cell(starred) == "50 s\\*, 3 again; same bits"
    [own] = page.newest(
        [*busy, trial("torchrun", pause_s=2.0, load=4.0, others_percent=5.0)], "mlp", 2
    ).values()
    assert page.cell(own) == "2.00 s, 3 again; same bits"


def test_only_busy_cells_make_the_page_speak_of_a_busy_machine() -> None:
    """And a cell without a trial says why."""
    quiet = [trial("Ray Train", "none", **CALM), trial("Ray Train")]
    assert "busy machine" not in (text := page.page(quiet, {}))
    assert "| - | - | not promised | not promised | not promised | not promised | - | - |" in text
    assert "of a busy machine" in page.page([*quiet, trial("torchft", load=5.0)], {})


def test_bits_that_were_not_compared_are_not_called_the_same() -> None:
    """The undisturbed run was missing."""
    record = {name: value for name, value in trial("torchrun").items() if name != "same_bits"}
    assert page.outcome(record) == ("none", "all samples once, bits not compared")


def test_several_trials_are_one_cell() -> None:
    """Medians of the times, the worst outcome, and how many had each."""
    trials = [trial("torchrun", number=number, pause_s=float(number)) for number in range(3)]
    stopped = {name: v for name, v in trial("torchrun", number=3, pause_s=None).items() if name != "lost"}
    [found] = page.newest([*trials, stopped], "mlp", 2).values()
    assert found["pause_s"] == 1.0
    assert page.outcome(found) == ("stopped", "3 of 4 same bits; 1 of 4 stopped")
    [same] = page.newest(trials, "mlp", 2).values()
    assert page.cell(same) == "1.00 s, 3 again; same bits"


def test_everybody_has_a_script_and_a_name_of_its_own() -> None:
    """Each fault has a column."""
    assert len({peer.key for peer in PEERS}) == len(PEERS)
    assert all((SCRIPTS / peer.script).is_file() for peer in PEERS)
    assert ("none", *page.SHORT) == tuple(plan().faults)


def test_the_page_is_made_of_the_trials() -> None:
    """No figure of it was written by hand: `python -m tests.measured.peers page` makes it again."""
    records = page.read(TRIALS)
    trials = page.newest(records, "mlp", 2)
    made = {
        "compared.md": page.page(records, json.loads(VERSIONS.read_text())),
        f"pictures/{page.BARS}": page.bars(trials),
        f"pictures/{page.GRID}": page.grid(trials),
    }
    assert made == {name: (page.GUIDE / name).read_text("utf-8") for name in made}
