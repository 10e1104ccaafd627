"""What state.json may say, and that anything else is damage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.snapshots.format import state_json
from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.format.pieces import TensorPlace, whole_tensors
from tests.snapshots.format.test_manifest import HOSTILE, JSON, paths_in

TENSORS = whole_tensors(
    {"model/w": TensorPlace("a", "F32", (2,), 8, 8), "scalars": TensorPlace("a", "F32", (3,), 16, 12)}
)
STATE: dict[str, Any] = {
    "position": {"step": 5, "epoch": 0, "is_epoch_end": False, "cursors": [1, 2]},
    "state": {
        "model": {"w": {"$tensor": "model/w"}, "n": {"$scalar": ["scalars", 2]}},
        "optimizer": {"state": {"$dict": [[0, {"lr": {"$float": "inf"}}], [{"$tuple": [1, 2]}, {"$tuple": [1]}]]}},
        "include.seen": {"$counter": [["a", 3]]},
        "include.kept": {"$ordered": [["a", {"$dict": []}]]},
        "parameters": [["model/w", None]],
    },
}  # fmt: skip


def parse(content: Any) -> dict[str, Any]:
    """Parse what *content* becomes."""
    return state_json.parse(json.dumps(content).encode(), TENSORS)


def test_what_is_written_is_read() -> None:
    """Every mark, with what belongs to it."""
    assert parse(STATE) == STATE


@given(JSON)
def test_nothing_but_damage_comes_of_any_json(content: Any) -> None:
    """Whatever lies there."""
    with pytest.raises(DamagedSnapshotError):
        parse(content)


@given(st.data())
def test_nothing_but_damage_comes_of_a_state_that_was_changed(data: st.DataObject) -> None:
    """One value replaced by a hostile one: it can be decoded, and names tensors that are there; or it is damage."""
    content = json.loads(json.dumps(STATE))
    way = data.draw(st.sampled_from(paths_in(content)))
    inner = content
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = data.draw(HOSTILE)
    try:
        found = parse(content)
    except DamagedSnapshotError:
        return
    decoded = {name: state_json.decode(value) for name, value in found["state"].items()}
    assert {ref.key for _, ref in state_json.refs(decoded)} <= TENSORS.keys()


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"$tensor": "gone"}, "which nothing writes"),
        ({"$scalar": ["scalars", 3]}, "which nothing writes"),
        ({"$scalar": ["scalars", -1]}, "which nothing writes"),
        ({"$dict": [[[1], 2]]}, "which nothing writes"),
        ({"$float": "1e9999999999"}, "which nothing writes"),
    ],
)
def test_marks_without_what_belongs_to_them_are_refused(part: Any, why: str) -> None:
    """A tensor that is not there, an element beyond its vector, a key that is none."""
    with pytest.raises(DamagedSnapshotError, match=why):
        parse({**STATE, "state": {"model": part}})


def test_deep_nesting_is_refused() -> None:
    """What would overrun the stack of whoever reads it."""
    deep: Any = 1
    for _ in range(900):
        deep = [deep]
    with pytest.raises(DamagedSnapshotError, match="nested too deeply"):
        parse({**STATE, "state": {"model": deep}})
    with pytest.raises(DamagedSnapshotError, match="nested too deeply"):
        state_json.parse(b"[" * 100_000, TENSORS)
