"""Scalars of a step: means over the global batch, the same however it is cut, and what they may be called."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from elasticflow.errors import StepResultError
from elasticflow.runtime.training.scalars import MOST, Scalars, scalars_in

if TYPE_CHECKING:
    from collections.abc import Sequence

Step = list[dict[str, float]]  # what each shard returned, `count` among it
SHARDS = 8


class Ranks:
    """Scalars of several ranks, which take their shards of a step and meet."""

    def __init__(self, world_size: int, names: Sequence[str] = ()) -> None:
        self.world_size = world_size
        self.names = [[*names] for _ in range(world_size)]
        self._texts = [""] * world_size
        self._meeting = threading.Barrier(world_size)
        self.gathered = 0
        self.votes = [SimpleNamespace(names_wanted=False, names=False) for _ in range(world_size)]
        workers: list[Any] = [
            SimpleNamespace(vote=vote, gather_text=self._gather(rank), scalar_names=names)
            for rank, (vote, names) in enumerate(zip(self.votes, self.names, strict=True))
        ]
        self._ranks = [Scalars(worker, SHARDS) for worker in workers]

    def _gather(self, rank: int) -> Any:
        def gather(text: str) -> list[str]:
            self._texts[rank] = text
            self._meeting.wait(10)
            self.gathered += rank == 0
            found = list(self._texts)
            self._meeting.wait(10)
            return found

        return gather

    def step(self, step: Step) -> list[dict[str, float]]:
        """Return each rank's means."""
        leaves = []
        for rank, scalars in enumerate(self._ranks):
            scalars.begin()
            for shard in range(rank * SHARDS // self.world_size, (rank + 1) * SHARDS // self.world_size):
                scalars.add(shard, step[shard], step[shard]["count"])
                leaves.append(torch.tensor(scalars.numbers(shard), dtype=torch.float32))
        while len(leaves) > 1:
            leaves = [left + right for left, right in zip(leaves[::2], leaves[1::2], strict=True)]
        any_new = any(vote.names_wanted for vote in self.votes)
        means: list[dict[str, float]] = [{}] * self.world_size

        def meet(rank: int) -> None:
            self.votes[rank].names = any_new
            means[rank] = self._ranks[rank].means(leaves[0].tolist())

        threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return means


NUMBERS = st.floats(-1e6, 1e6, width=32)
STEPS = st.lists(
    st.lists(
        st.fixed_dictionaries(
            {"count": st.integers(0, 9).map(float)}, optional={"kl": NUMBERS, "rec": NUMBERS, "aux": NUMBERS}
        ),
        min_size=SHARDS,
        max_size=SHARDS,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(STEPS, st.integers(0, 3))
def test_the_same_bits_on_every_rank_of_any_number_and_after_a_restart(steps: list[Step], lost: int) -> None:
    """Whichever shards have a scalar; a restart, which has to learn the names again, changes no bit either."""
    groups = {world_size: Ranks(world_size) for world_size in (1, 2, 4)}
    for number, step in enumerate(steps):
        if number == lost:
            groups[2] = Ranks(2)
        found = [means for ranks in groups.values() for means in ranks.step(step)]
        assert all(means == found[0] for means in found)
        for name in ("kl", "rec", "aux"):
            with_it = [shard for shard in step if name in shard and shard["count"] > 0]
            assert (name in found[0]) == bool(with_it)
            if with_it:
                expected = sum(s[name] * s["count"] for s in with_it) / sum(s["count"] for s in with_it)
                assert found[0][name] == pytest.approx(expected, rel=1e-4, abs=1)


def test_the_ranks_meet_for_new_names_only() -> None:
    """The first step and that of a latecomer cost a meeting; every other rides with the loss."""
    ranks = Ranks(2)
    plain: Step = [{"count": 1.0, "kl": float(n)} for n in range(SHARDS)]
    late = [*plain[:-1], {"count": 1.0, "kl": 7.0, "late": 2.5}]
    assert [ranks.step(plain)[0] for _ in range(3)] == [{"kl": 3.5}] * 3
    assert ranks.gathered == 1
    assert [ranks.step(late)[1] for _ in range(3)] == [{"kl": 3.5, "late": 2.5}] * 3
    assert ranks.gathered == 2
    assert ranks.step(plain) == [{"kl": 3.5}] * 2  # this step has none of the other


def test_names_of_a_snapshot_have_their_places() -> None:
    """A run that continues sums the values of its first step as one that was never interrupted: on their way."""
    step: Step = [{"count": 1.0, "kl": 0.1 * n, "aux": 3.0} for n in range(SHARDS)]
    before = Ranks(2)
    before.step(step)
    after = Ranks(2, before.names[0])
    assert after.step(step) == before.step(step)
    assert (after.gathered, before.gathered) == (0, 1)


def test_names_that_the_code_has_no_more_give_up_their_places() -> None:
    """There is room for what the job returns now, whatever it returned before it was changed."""
    ranks = Ranks(2, [f"old{n}" for n in range(MOST)])
    step: Step = [{"count": 1.0, "old3": 1.0, "new": 2.0}] * SHARDS
    assert [ranks.step(step)[1] for _ in range(2)] == [{"old3": 1.0, "new": 2.0}] * 2
    assert ranks.names == [["old3", "new"]] * 2


def test_what_is_not_finite_is_that_of_its_own_step() -> None:
    """And spoils no other scalar."""
    ranks = Ranks(2)
    for _ in range(2):
        (found, _) = ranks.step(
            [{"count": 1.0, "a": math.nan if n == 3 else 1.0, "b": 2.0} for n in range(8)]
        )
        assert math.isnan(found["a"])
        assert found["b"] == 2.0
    assert ranks.step([{"count": 1.0, "a": 1.0, "b": 2.0}] * 8)[0] == {"a": 1.0, "b": 2.0}


def test_scalars_are_numbers_and_tensors_without_dimensions() -> None:
    """Logits of a model's outputs are none, nor is a vector that happens to have one element."""
    result: dict[Any, Any] = {
        "loss": torch.tensor(1.0), "count": 3, "kl": torch.tensor(2.0), "accuracy": 0.5, "is_hard": True,
        "logits": torch.ones(2, 3), "losses": torch.ones(1), "aux": None, "name": "x", 3: 4.0,
        "wave": torch.tensor(1j),
    }  # fmt: skip
    assert list(scalars_in(result)) == ["kl", "accuracy", "is_hard"]


def one() -> Scalars:
    """Return the scalars of one rank without shards."""
    vote = SimpleNamespace(names_wanted=False, names=True)
    worker: Any = SimpleNamespace(vote=vote, gather_text=lambda text: [text], scalar_names=[])
    return Scalars(worker, 1)


@pytest.mark.parametrize("name", ["lr", "grad_norm", "samples_per_s", "eval", "step"])
def test_a_field_of_ours_is_refused_with_what_to_do(name: str) -> None:
    """Its line would say two things under one name."""
    with pytest.raises(StepResultError) as refused:
        one().add(0, {"loss": Tensor(), name: 1.0}, 4)
    assert f"a scalar `{name}`, and metrics.jsonl has a field of that name" in refused.value.message
    assert "model.step" in str(refused.value.remedy)


@pytest.mark.parametrize("name", ["", 'a"b', "1st", "x" * 101, "a b"])
def test_what_is_no_name_is_refused(name: str) -> None:
    """It would have to be quoted wherever it is read."""
    with pytest.raises(StepResultError, match="no name for a field"):
        one().add(0, {"loss": Tensor(), name: 1.0}, 4)


def test_there_is_room_for_so_many() -> None:
    """One more is refused, where all ranks do."""
    scalars = one()
    scalars.add(0, {"loss": Tensor(), **{f"s{n}": 1.0 for n in range(MOST + 1)}}, 1)
    with pytest.raises(StepResultError, match=f"{MOST + 1} different scalars"):
        scalars.means([0.0] * 2 * MOST)
