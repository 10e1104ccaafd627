"""A state's whole way: captured, staged by every rank, written as safetensors, read back, applied to other objects."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_safetensors
from torch import Tensor, nn

from elasticflow.runtime.snapshot.rank_shard import ShardPlanner, view_of
from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.snapshots.format import shard_file
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from elasticflow.runtime.state.state import Captured, State

WORLD_SIZE = 3


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return what two equal tensors have in common: dtype, shape and every bit."""
    flat = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    )
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).numpy().tobytes()


def read_back(captured: Captured, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return JSON and tensors after files: each rank stages and writes its shard, safetensors itself reads it."""
    storage, tensors = Storage(str(folder)), {}
    for rank in range(WORLD_SIZE):
        shard = ShardPlanner(rank, WORLD_SIZE).shard_of(captured)
        staged = memoryview(bytearray(b"\xa5" * (shard.nbytes + 16)))
        entries = shard.copy_into(staged)
        name = shard_file.shard_name(rank, WORLD_SIZE)
        packed = shard_file.pack(name, tensors=entries, staged=staged[: shard.nbytes], about={})
        written = shard_file.write_shard(storage, "s", packed)
        data = bytearray(storage.read(f"s/{name}"))
        theirs = load_safetensors(bytes(data))
        assert theirs.keys() == written.tensors.keys()
        for key, place in written.tensors.items():
            tensors[key] = view_of(data, BY_NAME[place.dtype], place.shape, place.offset)
            assert bits(tensors[key]) == bits(theirs[key])
    assert sorted(tensors) == list(captured.tensors)
    return json.loads(json.dumps(captured.tree, allow_nan=False)), tensors


def transfer(source: State, target: State, folder: Path) -> None:
    """Apply to *target* what *source* holds, after a way through files."""
    captured = source.capture()
    target.apply(*read_back(captured, folder), captured.memory_formats)


def take_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> Tensor:
    """Take one step of training; return the loss."""
    optimizer.zero_grad()
    loss: Tensor = model(inputs).float().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def assert_same_state(first: State, second: State) -> None:
    """Check that both hold the same: every number, every bit, and how tensors lie in memory."""
    one, other = first.capture(), second.capture()
    assert one.tree == other.tree
    assert {k: bits(t) for k, t in one.tensors.items()} == {k: bits(t) for k, t in other.tensors.items()}
    assert one.memory_formats == other.memory_formats
    assert one.aliases == other.aliases
