"""A curve may become smaller, never tamer: its picture is that of all its values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from elasticflow.observe.curves import COLUMNS, SPEED, read_curves

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest

    from elasticflow.observe.curves import Curve


def written(folder: Path, *lines: Mapping[str, Any] | str, name: str = "metrics.jsonl") -> Path:
    """Return a file of these lines."""
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def curves(folder: Path, *lines: Mapping[str, Any] | str) -> dict[str, Curve]:
    """Return the curves of these lines, by name."""
    found = read_curves(written(folder, *lines), folder / "redone")
    return {curve.name: curve for curve in found}


@given(
    st.lists(
        st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=5 * COLUMNS
    ).flatmap(lambda values: st.tuples(st.just(values), st.integers(1, 50), st.integers(1, len(values))))
)
def test_every_column_keeps_its_extremes(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[float], int, int]
) -> None:
    """The lowest and the highest value of each column are there, in order, and no value that was not."""
    values, stride, at = drawn
    folder = tmp_path_factory.mktemp("curves")
    lines = [
        {"step": stride * (i + 1), "generation": 1 + (i >= at), "loss": value}
        for i, value in enumerate(values)
    ]
    curve = curves(folder, *lines)["loss"]
    kept = [point for segment in curve.segments for point in segment.points]
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(kept) <= {(line["step"], line["loss"]) for line in lines}
    assert len(kept) <= 4 * (COLUMNS + 2)
    width = max(1.0, stride * len(values) / COLUMNS)
    columns: dict[int, list[float]] = {}
    shown: dict[int, list[float]] = {}
    for step, value in ((line["step"], line["loss"]) for line in lines):
        columns.setdefault(int(step / width), []).append(value)
    for step, value in kept:
        shown.setdefault(int(step / width), []).append(value)
    assert {c: (min(v), max(v)) for c, v in columns.items()} == {
        c: (min(v), max(v)) for c, v in shown.items()
    }
    assert [segment.generation for segment in curve.segments] == sorted(
        {1 + (i >= at) for i in range(len(values))}
    )


def test_what_was_lost_is_told_apart(tmp_path: Path) -> None:
    """By generation, as in the file beside the metrics."""
    metrics = written(
        tmp_path, *({"step": n, "generation": 1 + n // 3, "loss": 1.0 / n} for n in range(1, 6))
    )
    redone = written(tmp_path, {"step": 3, "generation": 1, "loss": 0.4}, name="redone")
    (loss,) = read_curves(metrics, redone)
    assert [(s.generation, s.points) for s in loss.redone] == [(1, ((3, 0.4),))]
    assert loss.last == 0.2


def test_names_come_in_an_order_that_people_want(tmp_path: Path) -> None:
    """Loss, evaluations, all else; nested tables as words."""
    found = curves(
        tmp_path,
        {"step": 1, "generation": 1, "lr": {"decay": 0.1}, "zeta": 3, "loss": 2.0, "epoch": 0},
        {"step": 1, "generation": 1, "eval": {"accuracy": 0.5}, "eval_raw": {"accuracy": 0.25}, "best": 0.5},
    )
    assert list(found) == ["loss", "eval accuracy", "eval raw accuracy", "lr decay", "zeta"]


def test_numbers_that_are_none_and_damage_are_left_out(tmp_path: Path) -> None:
    """A loss that is not finite is marked; a line that is torn costs itself alone."""
    found = curves(
        tmp_path,
        {"step": 1, "generation": 1, "loss": 1.0},
        '{"step": 2, "generation": 1, "loss": NaN}',
        {"step": 3, "generation": 1, "loss": "inf"},
        {"step": 4, "generation": 1, "loss": None, "absent": None},
        {"step": 4, "generation": 1, "loss": True, "note": "text"},
        '{"step": 5, "gener',
        "[5]",
        '{"step": "6", "loss": 1.0}',
        {"step": 7, "generation": 1, "loss": 3.0},
    )
    assert list(found) == ["loss"]
    assert found["loss"].odd == (2, 3, 4)
    assert [p for s in found["loss"].segments for p in s.points] == [(1, 1.0), (7, 3.0)]
    assert read_curves(tmp_path / "absent", tmp_path / "absent") == []


def test_speed_is_told_within_a_generation(tmp_path: Path) -> None:
    """Over at least a second; what lies between two generations is no speed."""
    lines = [
        {
            "step": n,
            "generation": 1 + n // 6,
            "loss": 1.0,
            "samples": 10 * n,
            "time": 0.5 * n + 100 * (n // 6),
        }
        for n in range(1, 11)
    ]
    speed = curves(tmp_path, *lines)[SPEED]
    assert {value for segment in speed.segments for _, value in segment.points} == {20.0}
