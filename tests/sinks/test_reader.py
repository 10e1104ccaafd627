from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.sinks.reader import Position, Reader
from tests.sinks.runs import Written, event_line, losses, step_line

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.sinks.sink import Point


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Return an empty run folder."""
    return Written.under(tmp_path)


def read_all(written: Written, position: Position, most: int = 500) -> tuple[list[Point], Position]:
    """Return all points behind *position*, and the position behind them, which went through JSON each time."""
    reader = Reader(written.folder)
    points: list[Point] = []
    while (batch := reader.after(position, most)).end != position:
        points += batch.points
        position = from_json(Position, json.loads(to_json(batch.end)))
    return points, position


def test_lines_become_points_with_flat_names(written: Written) -> None:
    """Numbers of a step, of several evaluation sets and of parameter groups; what says where it is, is left out."""
    written.metrics(
        [
            step_line(1, lr={"body": 0.1, "head": 0.2}, gap=None, tokens_per_s=5.0, stop=False),
            {
                "generation": 1,
                "step": 1,
                "eval": {"val": {"accuracy": 0.5}, "test": {"loss": "inf"}},
                "weights": "ema",
                "best": None,
                "seconds": 0.5,
                "time": 7.5,
            },
        ]
    )

    (step, evaluation), _ = read_all(written, Position())

    gap = step.values["gap"]
    assert math.isnan(gap)
    assert {
        "epoch": 0.0,
        "samples": 6.0,
        "loss": 1.001,
        "lr/body": 0.1,
        "lr/head": 0.2,
        "gap": gap,
        "tokens_per_s": 5.0,
    } == step.values
    assert (1, 1_700_000_001.0, 1) == (step.step, step.time, step.generation)
    assert {"eval/val/accuracy": 0.5, "eval/test/loss": math.inf} == evaluation.values


def test_steps_done_again_give_no_second_point(written: Written) -> None:
    """Steps 4 and 5 were read, cut off and done again: 6 comes next, and with it all that was never read."""
    written.metrics(step_line(step) for step in range(1, 6))
    before, position = read_all(written, Position(), most=2)
    written.cut_metrics(3)
    written.metrics(step_line(step, generation=2) for step in range(4, 9))

    after, _ = read_all(written, position, most=2)

    assert [(1, 1.001), (2, 2.001), (3, 3.001), (4, 4.001), (5, 5.001)] == losses(before)
    assert [(6, 6.002), (7, 7.002), (8, 8.002)] == losses(after)


def test_each_evaluation_of_a_step_is_a_point_once(written: Written) -> None:
    """A script may evaluate on several sets after one step; in any order, with restarts between, and where some were done again."""

    def evaluation(name: str, step: int = 1) -> dict[str, object]:
        return {"generation": 1, "step": step, "eval": {f"{name}.loss": 0.5}, "time": 7.5}

    written.metrics([step_line(1), evaluation("val"), evaluation("test")])
    first, position = read_all(written, Position(), most=1)
    written.cut_metrics(1)
    written.metrics(
        [evaluation("test"), evaluation("extra"), evaluation("val"), step_line(2), evaluation("val", 2)]
    )
    second, _ = read_all(written, position, most=1)

    assert ["eval/val.loss", "eval/test.loss"] == [name for point in first[1:] for name in point.values]
    assert ["eval/extra.loss"] == list(second[0].values)
    assert [1, 2, 2] == [point.step for point in second]


def test_restarts_and_world_sizes_are_points(written: Written) -> None:
    """One at each begin of training; a resize is no restart, and the count resumes from the position."""
    started = events.TRAINING_STARTED
    written.events(
        event_line(started, 1, step=0, world_size=2),
        event_line(events.GENERATION_ENDED, 1, **{"class": "crash", "step": 5}),
        event_line(started, 2, step=3, world_size=2),
    )
    first, position = read_all(written, Position(), most=1)
    written.events(
        event_line(events.GENERATION_ENDED, 2, **{"class": "resized", "step": 9}),
        event_line(started, 3, step=9, world_size=4),
    )
    second, _ = read_all(written, position)

    figures = [
        (p.step, *(p.values[f"elasticflow/{name}"] for name in ("restarts", "generation", "world_size")))
        for p in (*first, *second)
    ]
    assert [(0, 0, 1, 2), (3, 1, 2, 2), (9, 1, 3, 4)] == figures


def test_what_hooks_log_comes_once(written: Written) -> None:
    """Numbers, texts and images; a call that was cut short is made again, and what it had logged does not come twice."""
    image = written.folder.path / "logged" / "images" / "cat.png"

    def point(step: int, kind: str, name: str, value: object) -> dict[str, object]:
        return {"step": step, "hook": "on_step", "kind": kind, "name": name, "time": 1.5, "value": value}

    written.logged(
        1, [{"from": 0, "rank": 0}, point(1, "scalar", "norm", 0.5), point(2, "scalar", "norm", None)]
    )
    first, position = read_all(written, Position())
    image.parent.mkdir()
    image.write_bytes(b"png")
    written.logged(1, [point(3, "scalar", "norm", 0.3)])
    written.logged(
        2,
        [
            {"from": 2, "rank": 0},
            point(3, "scalar", "norm", 0.33),
            point(3, "text", "sample", "once upon"),
            point(3, "image", "cat", "logged/images/cat.png"),
            point(3, "image", "gone", "logged/images/gone.png"),
        ],
    )

    second, _ = read_all(written, position, most=1)

    assert 0.5 == first[0].values["norm"]
    assert math.isnan(first[1].values["norm"])
    assert [{"norm": 0.3}, {}, {}] == [point.values for point in second]
    assert [{}, {"sample": "once upon"}, {}] == [point.texts for point in second]
    assert {"cat": image} == second[2].images


def test_points_are_counted_without_being_given(written: Written) -> None:
    """What is left behind a position: points, and events where a sink takes them."""
    written.metrics(step_line(step) for step in range(1, 1002))
    written.events(event_line(events.RUN_STARTED), event_line(events.RUN_FINISHED))
    reader = Reader(written.folder)

    assert 1001 == reader.count(Position(), with_events=False)
    assert 1003 == reader.count(Position(), with_events=True)
