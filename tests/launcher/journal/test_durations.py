"""Where the supervisor says that a launch's time went: every moment in one part."""

from __future__ import annotations

import itertools
import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.launcher.journal import durations as module
from elasticflow.launcher.journal import journal as journal_module
from elasticflow.launcher.journal.durations import Durations, read_parts
from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.journal.post_mortem import Machine
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


# Seconds that pass, and what is heard then.
LIFE: list[tuple[float, dict[str, Any]]] = [
    (0.0, {"event": "run.started", "resumed": False}),
    (6.0, {"event": "training.started", "restore_s": None}),
    (3.0, {"event": "step"}),
    (2.0, {"event": "evaluation", "seconds": 1.5}),
    (1.0, {"event": "worker.failed"}),
    (0.5, {"event": "generation.ended", "class": "crash", "seconds_since_failure": 0.25}),
    (0.5, {"event": "node.awaited"}),
    (9.0, {"event": "generation.started"}),
    (2.0, {"event": "training.started", "restore_s": 1.25}),
    (1.0, {"event": "snapshot.staged", "stall_s": 0.125}),
    (4.0, {"event": "evaluation", "seconds": 0.5}),
    (1.0, {"event": "training.finished"}),
    (0.5, {"event": "generation.ended", "class": "finished"}),
    (0.75, {"event": "run.finished"}),
]
PARTS = {
    "starting": 6.0,
    "restoring": 1.25,
    "training": 10.125,
    "redone": 0.0,
    "stalled": 0.125,
    "evaluating": 2.0,
    "detecting": 0.25,
    "restarting": 1.25,
    "waiting": 9.0,
    "ending": 1.25,
    "outage": 0.0,
}


def lived(durations: Durations, clock: Clock) -> Durations:
    """Have it see the whole life."""
    for seconds, record in LIFE:
        clock.now += seconds
        durations.saw(record)
    return durations


@pytest.mark.parametrize("before", [{}, dict.fromkeys(PARTS, 2.0), None], ids=["first", "later", "unknown"])
def test_every_moment_of_a_launch_is_in_one_part(before: dict[str, float] | None) -> None:
    """They add up to the launch's seconds; with earlier launches' to the run's, where those are known."""
    assert set(PARTS) == set(module.PARTS)
    clock = Clock()
    figures = lived(Durations(before, clock), clock).figures()
    assert figures["durations"] == PARTS
    assert figures["seconds"] == clock.now - 100.0 == sum(PARTS.values())
    later = None if before is None else {name: PARTS[name] + before.get(name, 0.0) for name in PARTS}
    assert figures["run_durations"] == later


def test_a_drain_ends_and_a_resize_begins_again() -> None:
    """What follows the end of a group depends on whether there is another one."""
    for kind, part in (("drained", "ending"), ("resized", "restarting"), ("crash", "restarting")):
        clock = Clock()
        durations = Durations({}, clock)
        durations.saw({"event": "training.started"})
        durations.saw({"event": "generation.ended", "class": kind})
        clock.now += 3.0
        assert durations.of_launch()[part] == 3.0


def test_evaluations_never_take_more_than_there_was() -> None:
    """Clocks of two machines may differ, and a field may be missing: no part is negative."""
    clock = Clock()
    durations = Durations({}, clock)
    durations.saw({"event": "training.started"})
    clock.now += 1.0
    for seconds in (5.0, None, "x", -1.0):
        durations.saw({"event": "evaluation", "seconds": seconds})
    assert durations.of_launch() == {**dict.fromkeys(PARTS, 0.0), "evaluating": 1.0}


def test_a_run_that_goes_on_elsewhere_does_not_guess() -> None:
    """Its earlier launches' files are on another machine."""
    clock = Clock()
    durations = Durations({}, clock)
    durations.saw({"event": "run.started", "resumed": True})
    assert durations.of_run() is None


def test_the_end_is_recorded_once() -> None:
    """The event of a launch's end and the state that is written after it have the same parts."""
    clock = Clock()
    durations = lived(Durations({}, clock), clock)
    told = durations.figures()["durations"]
    clock.now += 0.25
    assert told == durations.of_launch() == durations.of_run()


def test_the_time_after_a_lost_supervisor_is_an_outage(tmp_path: Path) -> None:
    """From its last sign of life to the next launch; the pause after an end that was recorded is no part of the run."""
    folder = RunFolder.of(tmp_path, "job", "r")
    folder.path.mkdir(parents=True)
    for status, least, most in (("running", 100.0, 200.0), ("interrupted", 0.0, 0.0)):
        journal = Journal(folder, 1, lambda _: None)
        journal.update(at_once=True, status=status)
        journal.close()
        state = json.loads(folder.state.read_text())
        state["updated"] = datetime.fromtimestamp(time.time() - 100, UTC).isoformat()
        state["updated_monotonic"] -= 100
        state["durations"]["run"]["outage"] = 0.0
        folder.state.write_text(json.dumps(state))
        journal = Journal(folder, 2, lambda _: None)
        parts = journal.durations.of_run()
        journal.close()
        assert parts is not None
        assert least <= parts["outage"] <= most


def test_an_outage_leaves_out_a_step_of_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was set before the next launch, on the same start of the machine; after another start only that clock tells."""
    monkeypatch.setattr(journal_module, "boot_id", lambda: "this start")
    monkeypatch.setattr(Machine, "here", lambda: Machine("h", boot_id="this start"))
    folder = RunFolder.of(tmp_path, "job", "r")
    folder.path.mkdir(parents=True)
    Journal(folder, 1, lambda _: None).close()
    real = time.time()
    monkeypatch.setattr(time, "time", lambda: real + 10_000)
    parts = journal_module._durations_before(folder)
    assert parts is not None
    assert parts["outage"] < 5_000
    monkeypatch.setattr(journal_module, "boot_id", lambda: "another start")
    parts = journal_module._durations_before(folder)
    assert parts is not None
    assert parts["outage"] > 5_000


def test_launch_and_run_are_of_one_moment() -> None:
    """A first launch and its run are equally long in one record, however much time passes while it is made."""
    seconds = itertools.count(100.0)
    figures = Durations({}, lambda: next(seconds)).figures()
    assert figures["durations"] == figures["run_durations"]


def test_the_next_launch_counts_on(tmp_path: Path) -> None:
    """From what the state file says; without it, or from one of an earlier version, nobody knows the run's time."""
    folder = RunFolder.of(tmp_path, "job", "r")
    folder.path.mkdir(parents=True)
    first: dict[str, float] = {}
    for launch in (1, 2):
        journal = Journal(folder, launch, lambda _: None)
        journal.event(events.RUN_STARTED, resumed=launch > 1)
        journal.close()
        found = json.loads(folder.state.read_text())["durations"]
        assert sum(found["run"].values()) >= sum(found["launch"].values())
        if launch == 1:
            first = found["run"]
            assert found["run"] == found["launch"]
        else:
            assert found["run"]["starting"] == pytest.approx(
                first["starting"] + found["launch"]["starting"], abs=0.002
            )
    for text in ("{", "null", "{}", '{"durations": {"run": {"training": "long"}}}', None):
        folder.state.unlink() if text is None else folder.state.write_text(text)
        journal = Journal(folder, 3, lambda _: None)
        assert journal.durations.of_run() is None
        journal.close()
        folder.state.write_text("")


def test_steps_that_are_done_again_were_lost_in_the_launch_that_did_them() -> None:
    """Time of training, of this launch as far as it has so much, else of those before."""
    clock = Clock()
    durations = Durations({**dict.fromkeys(PARTS, 0.0), "training": 50.0}, clock)
    durations.saw({"event": "training.started"})
    clock.now += 10.0
    durations.saw({"event": "generation.ended", "class": "crash"})
    durations.redone(4.0)
    assert (durations.of_launch()["training"], durations.of_launch()["redone"]) == (6.0, 4.0)
    durations.redone(20.0)
    assert (durations.of_launch()["training"], durations.of_launch()["redone"]) == (0.0, 10.0)
    of_run = durations.of_run()
    assert of_run is not None
    assert (of_run["training"], of_run["redone"]) == (36.0, 24.0)
    durations.redone(1000.0)
    assert sum(of_run.values()) == sum((durations.of_run() or {}).values()) == 60.0


def test_each_group_has_its_parts() -> None:
    """From the end of the one before; together they are the launch's."""
    clock = Clock()
    durations = Durations({}, clock)
    groups = []
    for seconds, record in LIFE:
        clock.now += seconds
        durations.saw(record)
        if record["event"] == "generation.ended":
            groups.append(durations.end_group())
    assert groups[0] == {"starting": 6.0, "training": 4.75, "evaluating": 1.5, "detecting": 0.25}
    rest = durations.end_group()
    assert rest == {"ending": 0.75}
    assert {n: sum(g.get(n, 0.0) for g in (*groups, rest)) for n in PARTS} == PARTS


def test_the_state_of_an_earlier_version_is_read() -> None:
    """Parts that it did not know are 0."""
    assert read_parts({"training": 4.0, "ending": 1}) == {
        **dict.fromkeys(PARTS, 0.0),
        "training": 4.0,
        "ending": 1.0,
    }


@pytest.mark.parametrize("found", [None, [], {}, {**PARTS, "ending": None}, {**PARTS, "ending": -1.0}])
def test_parts_that_are_none_are_not_read(found: Any) -> None:
    """A state file may have been damaged."""
    assert read_parts(found) is None


@pytest.mark.parametrize("has_loop", [False, True])
def test_what_a_script_does_before_its_loop_is_no_training(has_loop: bool) -> None:
    """Its imports, say: those of the first start count as starting, of the next as restarting; of other scripts nobody knows."""
    clock = Clock()
    durations = Durations({}, clock)
    life: list[tuple[float, dict[str, Any]]] = [
        (0.0, {"event": "run.started", "resumed": False}),
        (4.0, {"event": "script.started"}),
        (10.0, {"event": "training.started", "restore_s": 2.0}),
        (6.0, {"event": "generation.ended", "class": "crash", "seconds_since_failure": 1.0}),
        (0.5, {"event": "script.started"}),
        (8.0, {"event": "training.started", "restore_s": None}),
        (3.0, {"event": "training.finished"}),
    ]
    for seconds, record in life:
        clock.now += seconds
        if has_loop or record["event"] != "training.started":
            durations.saw(record)
    parts = durations.of_launch()
    expected = {"starting": 12.0, "restoring": 2.0, "training": 8.0, "restarting": 8.5}
    if not has_loop:
        expected = {"starting": 4.0, "restoring": 0.0, "training": 26.0, "restarting": 0.5}
    assert expected | {"detecting": 1.0} == {name: parts[name] for name in (*expected, "detecting")}
    assert sum(parts.values()) == pytest.approx(31.5)
