"""Replicas are compared: a bit that flips on one rank is found, and healed from a snapshot of before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow.runtime.process.position import Position
from elasticflow.runtime.snapshot import replicas
from elasticflow.runtime.snapshot.replicas import Sums, difference
from elasticflow.snapshots.client.writer_process import WriterStart, start_writer
from tests.command_line import forks
from tests.runtime.test_trajectory import assert_same
from tests.snapshots.in_pieces import state_of

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("ranks", "astray", "expected"),
    [
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}], [1], "rank 1 has another b than the 2 other ranks"),
        (
            [{"a": 1, "b": 2}] + [{"a": 1, "b": 2}] * 3 + [{"a": 4, "b": 5}] * 2,
            [4, 5],
            "ranks 4 and 5 have another a (and 1 more tensor) than the 4 other ranks",
        ),
        (
            [{"a": 1}, {"a": 2}],
            [0, 1],
            "the ranks 0 and 1 have each another a: which is right cannot be told",
        ),
        (
            [{"a": 1}, {"a": 1}, {"a": 2}, {"a": 3}],
            [0, 1, 2, 3],
            "the ranks 0, 1, 2 and 3 have each another a: which is right cannot be told",
        ),
    ],
)  # fmt: skip
def test_the_minority_is_astray(ranks: list[Sums], astray: list[int], expected: str) -> None:
    """More than half of the ranks are right; without such a majority nobody can tell."""
    error = difference(7, ranks)
    assert astray == error.ranks
    assert f"after step 7 {expected}" == error.message


def test_small_held_state_on_the_cpu_counts_at_once(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold is compared before the next step begins, a snapshot beside it: what is killed in that step loses no held step."""
    me.world_size = 2
    compared: list[str] = []

    class Exchange:
        def __init__(self, *texts: str) -> None:
            compared.extend(texts)

        def are_equal(self) -> bool:
            return True

    monkeypatch.setattr(replicas, "DigestComparison", Exchange)
    captured = state_of({"w": torch.ones(100)})
    check = replicas.ReplicaCheck(me, SimpleNamespace(optimizers={}), None, is_exact=True)  # type: ignore[arg-type]
    counted: list[int] = []
    check.start(Position(1, 4, 0, 4, is_epoch_end=False), captured, lambda: counted.append(1), soon=True)
    assert ([1], False) == (counted, check.is_pending)
    check.start(Position(2, 8, 0, 8, is_epoch_end=False), captured, lambda: counted.append(2))
    assert ([1], True) == (counted, check.is_pending)
    check.finish()
    assert [1, 2] == counted
    large = state_of({"w": torch.ones(1 << 21)})
    check.start(Position(3, 12, 0, 12, is_epoch_end=False), large, lambda: counted.append(3), soon=True)
    assert check.is_pending
    assert compared[0] == compared[1] != repr({})


@pytest.mark.e2e
@pytest.mark.parametrize(
    "memory", [(), ("--memory", "1 step")], ids=["behind the next step", "held in memory"]
)
def test_flipped_bit_is_found_and_healed(groups: Callable[[str], Any], memory: tuple[str, ...]) -> None:
    """Found before the next snapshot is committed: the astray rank alone fails, and nothing in memory is resumed from.

    From the snapshot before, training ends as if nothing had been.
    """
    whole, parts = groups("whole"), groups("parts")
    assert whole.run(3).codes == [0] * 3
    with forks():
        writer = start_writer(WriterStart(str(parts.folder.path), "test"))
    parts.environment = {"ELASTICFLOW_WRITER": writer.address}
    arguments = ("--every", "3 steps", *memory, "--compare", "1000 steps")
    try:
        assert 1 == parts.run(3, *arguments, "--flip-at", "5", ends=False).codes[1]
        assert [0] * 3 == parts.run(3, *arguments).codes
    finally:
        writer.close()
    (raised,) = parts.lines("worker.raised", rank=1)
    assert "diverged" == raised["class"]
    text = "after step 6 rank 1 has another model/0.weight than the 2 other ranks"
    assert raised["error"].startswith(text)
    assert "diverged" not in {line["class"] for line in parts.lines("worker.raised", rank=0)}
    (started,) = parts.lines("training.started", generation=2)
    assert (3, False) == (started["step"], started["from_memory"])
    assert_same(whole.newest(), parts.newest())
