"""A state that ranks held in memory at one degree is read at any other: the rows that a rank needs, or whole tensors."""

from __future__ import annotations

import mmap

import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.runtime.snapshot.memory_tier import HeldTensors
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner
from elasticflow.snapshots.format.pieces import Part
from tests.snapshots import in_pieces

SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(SHAPES, st.integers(0, 5), st.integers(1, 5))
def test_held_rows_are_found_at_any_degree(shapes: list[tuple[int, ...]], held: int, wanted: int) -> None:
    """Any shapes; 0: one rank held everything unsharded."""
    whole = in_pieces.state_of({f"w{number}": torch.randn(shape) for number, shape in enumerate(shapes)})
    shards = []
    for rank in range(max(held, 1)):
        captured = in_pieces.shared(whole, rank, held) if held else whole
        shard = ShardPlanner(rank, max(held, 1)).shard_of(captured)
        memory = mmap.mmap(-1, max(shard.nbytes, 1))
        shards.append((shard.copy_into(memoryview(memory)), memory))
    tensors = HeldTensors(shards)
    for key, tensor in whole.tensors.items():
        assert torch.equal(tensor, tensors[key])
        for shard_number in range(wanted):
            begin, end = Part(shard_number, wanted).rows(tensor.shape[0])
            assert torch.equal(tensor[begin:end], tensors.rows(key, begin, end))


@given(SHAPES, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_each_node_has_all_tensors_once(
    shapes: list[tuple[int, ...]], nodes: int, local: int, is_sharded: bool
) -> None:
    """Any shapes; replicas, or parts that the ranks of each node have all of. What a rank stores is the same as without."""
    whole = in_pieces.state_of({f"w{number}": torch.randn(shape) for number, shape in enumerate(shapes)})
    world, stored = nodes * local, []
    for node in range(nodes):
        held = []
        for rank in range(node * local, (node + 1) * local):
            captured = whole
            if is_sharded:
                holders = tuple(range(rank % local, world, local))
                captured = in_pieces.shared(whole, rank % local, local, holders)
            planner = ShardPlanner(rank, world, range(node * local, (node + 1) * local))
            shard, alone = planner.shard_of(captured), ShardPlanner(rank, world).shard_of(captured)
            memory = mmap.mmap(-1, max(shard.nbytes, 1))
            held.append((shard.copy_into(memoryview(memory)), memory))
            own = [entry.key for entry in shard.entries if not entry.is_copy]
            assert own == [entry.key for entry in alone.entries]
            stored += own
        tensors = HeldTensors(held)
        assert whole.tensors.keys() == {*tensors}
        for key, tensor in whole.tensors.items():
            assert torch.equal(tensor, tensors[key])
    assert len(stored) == len({*stored})
