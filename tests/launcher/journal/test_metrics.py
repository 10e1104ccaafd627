"""metrics.jsonl stays without gaps and repeats, whatever was killed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow import events
from elasticflow.launcher.journal.metrics import Metrics
from elasticflow.run_folder import RunFolder
from elasticflow.system.json_lines import AppendedLines

if TYPE_CHECKING:
    from pathlib import Path


def _line(step: int, generation: int = 1, event: str = "step") -> dict[str, Any]:
    return {"event": event, "step": step, "generation": generation, "rank": 0, "loss": 1 / step}


def _evaluation(step: int, generation: int = 1) -> dict[str, Any]:
    return {"event": "evaluation", "step": step, "generation": generation, "eval": {"accuracy": 0.5}}


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return an empty run folder."""
    return RunFolder(tmp_path / "runs" / "job" / "run")


def test_steps_that_were_lost_move_to_the_redone_file(folder: RunFolder) -> None:
    """Going on from step 3 after 5 leaves steps 1 to 3, and keeps 4 and 5 apart."""
    metrics = Metrics(folder)
    metrics.add([_line(step) for step in range(1, 6)])
    metrics.settle(3)
    metrics.add([_line(step, 2) for step in range(4, 7)])
    metrics.close()

    assert [1, 2, 3, 4, 5, 6] == [r["step"] for r in _read(folder.metrics)]
    assert [4, 5] == [r["step"] for r in _read(folder.metrics_redone)]


def test_steps_that_a_node_tells_late_count_where_they_count(folder: RunFolder) -> None:
    """It was cut off after step 5; the snapshot of 4 was taken, of which it had told 2 steps. 5 and 6 are done again."""
    metrics = Metrics(folder)
    metrics.add([_line(1), _evaluation(1), _line(2)])
    metrics.settle(4, 2)
    metrics.add([_line(step, 2) for step in (5, 6)])
    metrics.add([_line(2), _line(3), _evaluation(3), _line(4), _line(5)])
    metrics.add([_line(7, 2)])
    metrics.close()

    counted = [(r["step"], r["generation"], "eval" in r) for r in _read(folder.metrics)]
    plain, evaluated = [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (6, 2), (7, 2)], [(1, 1), (3, 1)]
    assert plain == [(step, generation) for step, generation, is_evaluation in counted if not is_evaluation]
    assert evaluated == [(step, generation) for step, generation, is_evaluation in counted if is_evaluation]
    assert sorted(counted) == counted
    assert [(5, 1)] == [(r["step"], r["generation"]) for r in _read(folder.metrics_redone)]


def test_evaluation_of_the_snapshot_step_stays(folder: RunFolder) -> None:
    """An evaluation at the step that is restored is kept, a later one is redone."""
    metrics = Metrics(folder)
    metrics.add([_line(1), _evaluation(1), _line(2), _evaluation(2)])
    metrics.settle(1)
    metrics.close()

    assert [(1, False), (1, True)] == [(r["step"], "eval" in r) for r in _read(folder.metrics)]
    assert [(2, False), (2, True)] == [(r["step"], "eval" in r) for r in _read(folder.metrics_redone)]


def test_lines_the_supervisor_did_not_live_to_write_come_from_the_rank_logs(folder: RunFolder) -> None:
    """A supervisor killed between a step and its line leaves no gap: the newest generation's line is taken.

    What the job's own code logged under the same name is no line of ours.
    """
    for generation, steps in ((1, range(1, 6)), (2, range(3, 8))):
        log = folder.rank_log(generation, 0)
        log.parent.mkdir(parents=True)
        own = [{**_line(step, generation), "origin": events.OURS} for step in steps]
        theirs = {"event": "evaluation", "step": 4, "rank": 0, "origin": "user", "loss": 1.0}
        log.write_text("".join(json.dumps(line) + "\n" for line in [*own, theirs]))
    metrics = Metrics(folder)
    metrics.add([_line(1), _line(2)])
    metrics.settle(6)
    metrics.close()

    expected = [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]
    assert expected == [(r["step"], r["generation"]) for r in _read(folder.metrics)]


def test_lines_in_another_machines_rank_log_come_in_once_it_has_sent_that(folder: RunFolder) -> None:
    """Rank 0 was on that machine, which could not tell of steps 2 and 3 before its agent ended."""
    metrics = Metrics(folder)
    metrics.add([_line(1)])
    metrics.settle(0, 1)
    metrics.add([_line(1)])
    metrics.settle(3, 2)
    metrics.add([_line(4, 2)])
    assert [1] == list(metrics.missing_of)
    log = AppendedLines(folder.rank_log(1, 0))
    log.append([{**_line(step), "origin": events.OURS} for step in range(1, 5)])
    log.close()
    metrics.complete()
    metrics.close()

    assert [(1, 1), (2, 1), (3, 1), (4, 2)] == [(r["step"], r["generation"]) for r in _read(folder.metrics)]


@pytest.mark.parametrize("is_late", [False, True], ids=["from the rank log", "from a node that tells late"])
def test_several_evaluations_of_one_step_all_come_back(folder: RunFolder, *, is_late: bool) -> None:
    """A script may evaluate on several sets after a step: each has its line, in a file that lacked all of them."""
    lines = [_line(2), *({**_evaluation(2), "eval": {f"{name}.loss": 0.5}} for name in ("val", "test"))]
    if not is_late:
        log = AppendedLines(folder.rank_log(1, 0))
        log.append([{"origin": events.OURS, **line} for line in lines])
        log.close()
    metrics = Metrics(folder)
    metrics.add([_line(1)])
    metrics.settle(2, 2)
    metrics.add(lines if is_late else [])
    metrics.close()

    assert [1, 2, 2, 2] == [line["step"] for line in _read(folder.metrics)]
    assert {"val.loss", "test.loss"} == {
        name for line in _read(folder.metrics) for name in line.get("eval", {})
    }


def test_torn_last_line_is_cut(folder: RunFolder) -> None:
    """A line torn by a crash does not swallow the next one."""
    folder.path.mkdir(parents=True)
    folder.metrics.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    metrics = Metrics(folder)
    metrics.add([_line(2)])
    metrics.close()

    assert [1, 2] == [r["step"] for r in _read(folder.metrics)]


def _run_with_logs(folder: RunFolder, steps: int) -> None:
    """Leave a metrics file and rank 0's log of that many steps, each evaluated after every fifth."""
    lines = [
        line
        for step in range(1, steps + 1)
        for line in (_line(step), _evaluation(step))[: 2 - (step % 5 > 0)]
    ]
    log = folder.rank_log(1, 0)
    log.parent.mkdir(parents=True)
    log.write_text("".join(json.dumps({**line, "origin": events.OURS}) + "\n" for line in lines))
    metrics = Metrics(folder)
    metrics.add(lines)
    metrics.close()


def _spoil(path: Path, harm: str) -> None:
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    match harm:
        case "the last 300 bytes zeroed":
            path.write_bytes(data[:-300] + bytes(300))
        case "cut, its newline kept":
            path.write_bytes(data[:-20] + b"\n")
        case "lines of other kinds":
            path.write_bytes(b"".join([*lines[:-2], b"null\n", b"[1]\n", b'{"step": "x"}\n', *lines[-2:]]))
        case "a line in between is lost":
            path.write_bytes(b"".join([*lines[:9], b"\xff\n", *lines[12:]]))
        case _:
            raise AssertionError(harm)


@pytest.mark.parametrize(
    "harm",
    [
        "the last 300 bytes zeroed",
        "cut, its newline kept",
        "lines of other kinds",
        "a line in between is lost",
    ],
)
def test_what_damage_took_comes_back_from_the_rank_logs(folder: RunFolder, harm: str) -> None:
    """Bad lines are moved aside and said; resuming from step 18 of 20, every line up to it stands once and in order."""
    _run_with_logs(folder, 20)
    expected = [r for r in _read(folder.metrics) if r["step"] <= 18]
    _spoil(folder.metrics, harm)
    metrics = Metrics(folder)
    assert metrics.damage is not None
    assert "metrics.jsonl.damaged" in metrics.damage.why
    metrics.settle(18)
    metrics.close()

    assert expected == _read(folder.metrics)
    assert folder.metrics.with_name("metrics.jsonl.damaged").stat().st_size > 0
    again = Metrics(folder)
    assert again.damage is None
    again.close()


def test_damage_without_logs_costs_no_more_than_the_bad_lines(folder: RunFolder) -> None:
    """A launch on another machine has no rank logs: what is whole stays."""
    _run_with_logs(folder, 20)
    _spoil(folder.metrics, "a line in between is lost")
    folder.rank_log(1, 0).unlink()
    metrics = Metrics(folder)
    metrics.settle(20)
    metrics.close()

    steps = [r["step"] for r in _read(folder.metrics) if "eval" not in r]
    assert sorted(steps) == steps
    assert {*range(1, 9), *range(12, 21)} <= set(steps)


@given(data=st.lists(st.integers(1, 12), max_size=8))
def test_any_history_of_restarts_gives_each_step_once(
    data: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever steps generations reach and go on from, the file ends as one unbroken row."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    metrics = Metrics(folder)
    reached = 0
    for generation, length in enumerate(data, 1):
        start = max(0, reached - length // 2)
        metrics.settle(start)
        metrics.add([_line(step, generation) for step in range(start + 1, start + length + 1)])
        reached = start + length
    metrics.close()

    assert list(range(1, reached + 1)) == [r["step"] for r in _read(folder.metrics)]


def test_appended_lines_survive_reopening(tmp_path: Path) -> None:
    """A second writer continues behind the first one's lines."""
    for number in (1, 2):
        lines = AppendedLines(tmp_path / "lines.jsonl")
        lines.append([{"n": number}])
        lines.close()

    assert [{"n": 1}, {"n": 2}] == _read(tmp_path / "lines.jsonl")
