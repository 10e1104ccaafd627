"""What went wrong in a run, read from its events."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.launcher.journal.post_mortem import Machine
from elasticflow.observe.incidents import incidents, log_of, to_json
from elasticflow.run_folder import RunFolder
from tests.observe.hand_made import SIGKILLED, START, event, story_of_a_kill

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.observe.history import Stop


def told(run: Path, *records: dict[str, Any]) -> list[Stop]:
    """Return the incidents of a run with these events."""
    (run / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return incidents(RunFolder(run))


def test_killed_worker_and_what_it_cost(run: Path) -> None:
    """The rank, its end, the charge, the steps done again, the time until training continued, and its log."""
    [found] = told(run, *[record for record in story_of_a_kill() if "event" in record])

    folder = RunFolder(run)
    assert {
        "generation": 1,
        "at": "2026-11-20T10:00:05.000Z",
        "kind": "crash",
        "error": SIGKILLED,
        "step": 47,
        "rank": 1,
        "node": "n0",
        "pid": 4711,
        "phase": None,
        "traceback": None,
        "others": "1 other rank: connection closed by peer",
        "log": str(folder.rank_log(1, 1, "stderr")),
        "charged": True,
        "left": 4,
        "back_s": 0.27,
        "redone": 7,
        "verdict": None,
        "stderr": (),
        "likely": None,
        "script_again_s": None,
        "dumps": (),
    } == to_json(found, folder)
    assert (f"rank 1: {SIGKILLED}", ("training", 0.27)) == (found.headline, found.again)


def test_run_without_a_failure(run: Path) -> None:
    """Drains and resizes are no failures; a run without events has none."""
    ended = [event(5, "generation.ended", class_=kind, reason="", step=4) for kind in ("drained", "resized")]

    assert [] == told(run, *ended)
    (run / "events.jsonl").unlink()
    assert [] == incidents(RunFolder(run))


def test_lost_node_is_named(run: Path) -> None:
    """No worker failed first: the node did."""
    [found] = told(
        run,
        event(4, "node.lost", node="n3", reason="it has given no sign of life"),
        event(5, "generation.ended", class_="node_lost", reason="it has given no sign of life", step=4),
    )

    assert ("n3", None, "it has given no sign of life") == (found.node, found.rank, found.error)


def test_hang_names_its_phase_and_stacks(run: Path) -> None:
    """What the rank was doing, and where its stacks are; and NCCL's dumps, which older versions do not tell."""
    dumps = {"dumps": ["/r/flight_recorder/rank_0", "/r/flight_recorder/rank_1"]}
    hang = {"rank": 1, "phase": "evaluating", "seconds": 600, "stacks": "/r/rank1.stderr"}
    ends = (
        event(5, "worker.failed", rank=1, node="n0", class_="hang", error="no progress"),
        event(5, "generation.ended", class_="hang", reason="no progress", step=4),
    )
    [older] = told(run, event(4, "hang.detected", **hang), *ends)
    assert () == older.dumps
    [found] = told(
        run,
        event(4, "hang.detected", **hang, **dumps),
        *ends,
    )

    assert ("evaluating", "/r/rank1.stderr") == (found.phase, log_of(found, RunFolder(run)))
    assert dumps["dumps"] == list(found.dumps)


@pytest.mark.parametrize("has_generation", [True, False])
def test_verdict_belongs_to_the_last_failure(run: Path, *, has_generation: bool) -> None:
    """A launch that gives up says why, with the generation it gave up after, or alone if there was none."""
    ended = event(5, "generation.ended", class_="user_error", reason="ValueError: no", step=0)
    failed = event(
        6, "run.failed", class_="user_error", error="ValueError: no", why="it would come again", step=0
    )
    [found] = told(run, *([ended] if has_generation else []), failed)

    assert ("user_error", "ValueError: no", "it would come again") == (found.kind, found.error, found.verdict)


def test_last_words_of_a_worker_stand_with_its_failure(run: Path) -> None:
    """What it wrote to its standard error before it was gone, under a head; nothing where it wrote nothing."""
    said = ["terminate called after throwing an instance of 'gloo::EnforceNotMet'", "  what():  sizes differ"]
    fields = {"rank": 0, "exit_code": -6, "error": "killed by SIGABRT: sizes differ", "class_": "user_error"}
    ended = event(5, "generation.ended", class_="user_error", reason="", step=4)
    [loud] = told(run, event(4, "worker.failed", **fields, stderr=said), ended)
    [silent] = told(run, event(4, "worker.failed", **fields), ended)

    assert ("standard error ended with:", *(f"  {line}" for line in said)) == loud.stderr
    assert () == silent.stderr
    log = RunFolder(run).rank_log(1, 0, "stderr")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    assert log_of(silent, RunFolder(run)) is None, "an empty file tells nobody anything"
    log.write_text("Killed")
    assert log_of(silent, RunFolder(run)) == str(log)


def test_supervisor_that_was_killed_is_told_with_its_step(run: Path) -> None:
    """As long as nobody continued, from its state; afterwards from what the next launch found, whose failure is its own."""
    state = {
        "status": "running",
        "step": 427,
        "generation": 2,
        "machine": asdict(Machine.here()),
        "pid": 1,
    }
    (run / "state.json").write_text(json.dumps(state))
    (run / "metrics.jsonl").unlink(missing_ok=True)
    [now] = told(run)
    assert ("supervisor_lost", 427, 2) == (now.kind, now.step, now.generation)
    assert now.error.startswith("the supervisor ended without a word after step 427: ")
    assert now.likely

    (run / "state.json").unlink()
    fields = {"launch": 1, "step": 427, "kind": "killed", "known": "the machine runs", "likely": "killed"}
    fields |= {"last_seen": START + 3, "in_generation": 2}
    before, after = told(
        run,
        event(9, "supervisor.lost", **fields),
        event(
            9.5, "run.failed", class_="user_error", error="ValueError: no", why="it would come again", step=0
        ),
    )
    assert ("the machine runs", None) == (before.error.rpartition(": ")[2], before.verdict)
    assert "it would come again" == after.verdict
    assert (START + 3, 2) == (before.at, before.generation), "the loss, not the launch that found it out"
