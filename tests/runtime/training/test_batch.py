"""Batch mode beside a plain backward over the whole batch, in real worker groups."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.e2e

ROUNDING, ROUNDING_OF_BF16 = 1e-5, 0.05


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_the_whole_batch(groups: Callable[..., Any], world_size: int) -> None:
    """Uneven parts and micro-batches, means and sums over tokens (on some ranks none), each option, checkpoints.

    A rank without samples takes part, dropout draws the same numbers where a block is run again, and every rank knows
    the same metrics and the same best.
    """
    group = groups("batch", "train_batch.py")
    assert group.run(world_size).codes == [0] * world_size
    ranks: list[dict[str, Any]] = json.loads((group.folder.path / "found.json").read_text())
    assert ranks == [ranks[0]] * world_size
    found = ranks[0]
    evaluation, dropout = found.pop("evaluation"), found.pop("dropout")
    assert {
        key: worst
        for key, worst in found.items()
        if worst > (ROUNDING_OF_BF16 if "bf16" in key else ROUNDING)
    } == {}
    assert dropout == [0.0, 0.0]
    assert evaluation["best"] == min(evaluation["first"]["loss"], evaluation["second"]["loss"])
    assert evaluation["at"] == evaluation["second"]["loss"]
