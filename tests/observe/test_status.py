from __future__ import annotations

import fcntl
import json
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.observe.run_state import RunningWorker
from elasticflow.observe.standbys import NodeStandbys, in_words
from elasticflow.observe.status import is_locked, read_status
from elasticflow.run_folder import RunFolder
from tests.observe.hand_made import START, evaluation, event, step

if TYPE_CHECKING:
    from pathlib import Path


def change(run: Path, **fields: Any) -> None:
    """Write these fields into the run's state.json."""
    path = run / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_run_that_was_interrupted(run: Path) -> None:
    """Every fact of the folder is found: state, metrics, evaluation, speed, snapshot."""
    status = read_status(RunFolder(run))
    assert (status.status, status.launch, status.generation, status.step, status.steps) == (
        "interrupted",
        1,
        2,
        47,
        60,
    )
    assert (status.loss, status.restarts, status.workers, status.pid) == (0.0426, 1, (), None)
    assert (status.evaluation, status.evaluated_step, status.best) == (
        {"loss": 0.1, "accuracy": 0.95},
        40,
        0.96,
    )
    assert status.snapshot == "000000000040-0002-0a1b2c3d"
    assert status.samples_per_s == pytest.approx(1280)
    assert (status.started, status.updated, status.seconds_left) == (START, START + 6, None)


def test_an_evaluation_long_ago_is_still_the_newest(run: Path) -> None:
    """Epochs may have thousands of steps, each with its line."""
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(step(4, number)) + "\n" for number in range(48, 3000))
    status = read_status(RunFolder(run))
    assert (status.step, status.evaluated_step, status.best) == (2999, 40, 0.96)
    assert status.evaluation == {"loss": 0.1, "accuracy": 0.95}


def test_all_evaluations_of_the_newest_step_are_shown(run: Path) -> None:
    """A script may evaluate on several sets after a step; only one of their lines may have a best value."""
    ranked = evaluation(4, 47, 0.97, 0.97)
    more = [
        {**ranked, "eval": {f"{name}.loss": value}, "best": None} for name, value in (("a", 0.2), ("b", 0.3))
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"\n{json.dumps(line)}" for line in (ranked, *more))
    status = read_status(RunFolder(run))
    assert {"loss": 0.1, "accuracy": 0.97, "a.loss": 0.2, "b.loss": 0.3} == status.evaluation
    assert (47, 0.97) == (status.evaluated_step, status.best)


def test_running_with_a_held_lock_is_running(run: Path) -> None:
    """While a supervisor holds the lock, its workers, its process id and the time left are shown."""
    change(run, status="running")
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(RunFolder(run))
        status = read_status(RunFolder(run))
    assert (status.status, status.pid, status.workers) == ("running", 9, (RunningWorker(0, 11, "n0"),))
    assert status.seconds_left == pytest.approx(13 / 20 + 0.25, rel=0.01), "13 steps and the last evaluation"


def test_what_is_held_in_memory_goes_with_the_launch(run: Path) -> None:
    """While a run runs its status has the newest step in memory, and afterwards none; old runs never said."""
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        change(run, status="running")
        assert read_status(RunFolder(run)).held is None
        change(run, held=46)
        assert read_status(RunFolder(run)).held == 46
    assert read_status(RunFolder(run)).held is None


def test_standbys_are_shown_while_the_run_runs(run: Path) -> None:
    """With their process ids and their memory; afterwards they are gone."""
    ready = event(7, "standbys.ready", 2, node="n0", pids=[7, 8], seconds=5.1, memory=33_000_000)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(ready) + "\n")
    change(run, status="running")
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        standbys = read_status(RunFolder(run)).standbys
        assert (NodeStandbys("n0", (7, 8), 5.1, 33_000_000),) == standbys
    assert "2 ready (pid 7, 8), 33.0 MB" == in_words(standbys)
    without = NodeStandbys("n1", (9,), 5.1, 33_000_000, without_device="900 MiB of its memory are free")
    expected = "1 ready (pid 9), 33.0 MB; a GPU is not opened on n1: 900 MiB of its memory are free"
    assert expected == in_words([without])
    assert () == read_status(RunFolder(run)).standbys


def test_running_with_a_free_lock_is_interrupted(run: Path) -> None:
    """A supervisor that was killed could not write so; its lock is free, and its workers are gone."""
    change(run, status="running")
    (run / "lock").touch()
    status = read_status(RunFolder(run))
    assert (status.status, status.workers, status.pid) == ("interrupted", (), None)


def test_a_run_that_ends_while_it_is_looked_at(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is read, it finishes and frees the lock: it is finished, not interrupted."""
    change(run, status="running", pid=1)

    def ends(folder: RunFolder) -> bool:
        change(run, status="finished", step=60)
        return False

    monkeypatch.setattr("elasticflow.observe.status.is_locked", ends)
    status = read_status(RunFolder(run))
    assert (status.status, status.step, status.lost) == ("finished", 60, None)


def test_step_and_loss_are_of_one_line(run: Path) -> None:
    """A supervisor that is killed may have written steps after its last state."""
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(step(5, 50)) + "\n")
    status = read_status(RunFolder(run))
    assert (status.step, status.epoch, status.loss) == (50, 2, 0.04)


def test_looking_leaves_the_lock_free(run: Path) -> None:
    """After a look the supervisor can take the lock."""
    (run / "lock").touch()
    assert not is_locked(RunFolder(run))
    with (run / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_failed_run_has_its_root_cause(run: Path) -> None:
    """The newest failed worker belongs to the verdict."""
    change(run, status="failed", verdict={"exit_code": 1, "why": "no"})
    status = read_status(RunFolder(run))
    assert status.failure is not None
    assert (status.failure["rank"], status.verdict) == (1, {"exit_code": 1, "why": "no"})


def test_a_folder_with_next_to_nothing_in_it(tmp_path: Path) -> None:
    """A launch that died in its first millisecond can be looked at."""
    folder = tmp_path / "runs" / "mnist" / "a"
    (folder / "launches" / "0002").mkdir(parents=True)
    status = read_status(RunFolder(folder))
    assert (status.status, status.launch, status.step, status.steps) == ("interrupted", 2, 0, None)
    assert (status.started, status.snapshot, status.evaluation) == (None, None, {})


def test_odd_content_is_no_error(run: Path) -> None:
    """Half a state.json and fields of other types do not break a look."""
    (run / "state.json").write_text('{"status": "run')
    assert read_status(RunFolder(run)).status == "finished"  # as events.jsonl tells
    (run / "state.json").write_text(json.dumps({"status": 3, "workers": [1], "step": "x", "started": "soon"}))
    (run / "events.jsonl").write_text(json.dumps(event(3, "run.started")) + "\n")
    status = read_status(RunFolder(run))
    assert (status.step, status.started) == (47, START + 3)
