"""Snapshots of tensors that ranks share by rows, committed in this process by the writer's own code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.run_folder import snapshot_name
from elasticflow.runtime.process import sharded_tensors
from elasticflow.runtime.process.sharded_tensors import Shards
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner
from elasticflow.runtime.state.state import Captured
from elasticflow.snapshots.client.writer_process import WriterStart
from elasticflow.snapshots.format.manifest import FILE_NAME, ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard
from elasticflow.snapshots.writer.committer import Committer
from elasticflow.snapshots.writer.pending import PendingSnapshot, PendingSnapshots
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from tests.snapshots.format.test_manifest import signed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.store.catalog import Catalog


def shared(whole: Captured, rank: int, degree: int, holders: tuple[int, ...] = ()) -> Captured:
    """Return what *rank* captures if *degree* ranks share every tensor that has rows, as torch cuts it; *holders* have its part."""
    boxes = {
        key: sharded_tensors._cut(tuple(tensor.shape), Shards(rank, degree, holders or (rank,)))
        for key, tensor in whole.tensors.items()
        if tensor.dim() and tensor.numel()
    }
    parts = {key: whole.tensors[key][box.begin : box.end] for key, box in boxes.items()}
    frozen = whole.frozen
    return Captured(
        whole.tree, {**whole.tensors, **parts}, whole.aliases, whole.memory_formats, frozen, boxes=boxes
    )


def state_of(tensors: Mapping[str, Tensor]) -> Captured:
    """Return a state whose only part is a model of *tensors*."""
    tree = {"model": {name: {"$tensor": f"model/{name}"} for name in tensors}}
    return Captured(tree, {f"model/{name}": tensor for name, tensor in sorted(tensors.items())}, {}, {})


def take(
    catalog: Catalog, state: Captured, *, degree: int, step: int = 1, generation: int = 1, world: int = 1
) -> Manifest:
    """Commit a snapshot of *state*, which *degree* ranks share; 0: it is whole, and *world* ranks store it."""
    world = degree or world
    start, board = WriterStart("", "r"), PendingSnapshots()
    facts = ManifestFacts(trigger="steps", aliases=state.aliases, memory_formats=state.memory_formats)
    content: dict[str, Any] = {"position": {"step": step}, "state": state.tree}
    name = snapshot_name(step, generation, f"{step:08x}")
    pending = PendingSnapshot(name, step, generation, world, world)
    for rank in range(world):
        shard = ShardPlanner(rank, world).shard_of(shared(state, rank, degree) if degree else state)
        memory = memoryview(bytearray(shard.nbytes))
        record = None if rank else SnapshotRecord(content, facts)
        board.add(pending, rank, record, None)
        staged = StagedShard(shard.copy_into(memory), shard.nbytes, record)
        board.finish(pending, rank, ShardWriter(start, catalog).write(pending, rank, staged, memory), None)
    committed = Committer(start, catalog, board, lambda *_, **__: None)._settle(pending)
    assert committed is not None
    return committed


def v_and_w() -> Captured:
    """Return a state of two tensors of eight rows, of which `LIES` are told."""
    return state_of({"v": torch.arange(16.0).view(8, 2), "w": torch.arange(16.0, 32.0).view(8, 2)})


Places = dict[str, dict[str, Any]]
"""Tensors as MANIFEST.json has them."""


def _exchanged(first: str, second: str, field: str) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        places[first][field], places[second][field] = places[second][field], places[first][field]

    return change


def _set(keys: tuple[str, ...], **fields: Any) -> Callable[[Places], None]:
    def change(places: Places) -> None:
        for key in keys:
            places[key].update(fields)

    return change


def _renamed(places: Places) -> None:
    for begin in (0, 4):
        places[f"model/w@{begin}"], places[f"model/v@{begin}"] = (
            {**places[f"model/{other}@{begin}"], "of": f"model/{name}"}
            for other, name in (("v", "w"), ("w", "v"))
        )


def _reshaped(places: Places) -> None:
    for begin in (0, 4):
        place = places.pop(f"model/w@{begin}")
        rows = {"shape": [2, 4], "global_shape": [4, 4], "global_offsets": [begin // 2, 0]}
        places[f"model/w@{begin // 2}"] = {**place, **rows}


_SECOND = "of shape [4, 2] at bytes 256 to 288 of shard-00000-of-00002.safetensors"
# What a manifest may say of a snapshot by two ranks of v and w, each of eight rows; and what is found.
LIES: dict[str, tuple[Callable[[Places], None], str]] = {
    "another offset": (_set(("model/w@0",), offset=260), "overlap, or leave a gap, at byte 256"),
    "another shape": (_set(("model/w@0",), shape=[2, 4]), "piece model/w@0 is cut along another dimension"),
    "another whole shape": (_set(("model/w@4",), global_shape=[9, 2]), "pieces of model/w are of several shapes"),
    "another type": (_set(("model/w@4",), dtype="I32"), "pieces of model/w are of several shapes or dtypes"),
    "other rows": (_set(("model/w@4",), global_offsets=[5, 0]), "model/w@4 is called a piece of model/w from row 5"),
    "offsets exchanged": (
        _exchanged("model/v@0", "model/w@0", "offset"),
        f"rows 0 to 4 of model/v are F32 {_SECOND}, and its header tells F32 of shape [4, 2] at bytes 224 to 256",
    ),
    "rows exchanged": (
        _exchanged("model/w@0", "model/w@4", "file"),
        f"rows 4 to 8 of model/w are F32 {_SECOND}, and its header tells nothing of them",
    ),
    "names exchanged": (_renamed, f"rows 0 to 4 of model/v are F32 {_SECOND}"),
    "all of another type": (
        _set(("model/w@0", "model/w@4"), dtype="I32"),
        f"rows 0 to 4 of model/w are I32 {_SECOND}, and its header tells F32",
    ),
    "all of another shape": (_reshaped, "rows 0 to 2 of model/w are F32 of shape [2, 4] at bytes 256 to 288"),
}  # fmt: skip


def lie(catalog: Catalog, name: str, told: str) -> str:
    """Have the manifest of snapshot *name* tell the lie *told*, under a right digest; return what is found of it."""
    path = f"{catalog.folder(name)}/{FILE_NAME}"
    content = json.loads(catalog.storage.read(path))
    del content["digest"]
    change, found = LIES[told]
    change(content["tensors"])
    catalog.storage.write(path, [signed(content)])
    return found
