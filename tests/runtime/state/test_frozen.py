"""Which tensors are told to be frozen, how they are shared out, and what a restart makes of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elasticflow.errors import SnapshotError
from elasticflow.runtime.snapshot import restore
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner, balanced
from elasticflow.runtime.state.state import State
from elasticflow.snapshots.client.writer_process import WriterStart
from elasticflow.snapshots.format.manifest import Manifest, ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.store.publish import Publisher
from elasticflow.snapshots.writer.pending import PendingSnapshot
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from elasticflow.storage.storage import Storage
from tests.own_loader import OwnLoader

if TYPE_CHECKING:
    from pathlib import Path


def tuned() -> State:
    """A model of two layers of which the first is frozen, after a step, with its average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    return State(model=model, optimizer=optimizer, ema=AveragedModel(model))


def test_frozen_are_the_parameters_that_take_no_gradient() -> None:
    """Neither buffers nor the average's copies, and an entry of the shard says which they are."""
    captured = tuned().capture()
    frozen = {"model/0.weight", "model/0.bias"}
    assert frozen == captured.frozen
    shard = ShardPlanner(0, 1).shard_of(captured)
    assert frozen == {entry.key for entry in shard.entries if entry.frozen}


def test_thawed_layers_are_no_longer_told_to_be_frozen() -> None:
    """A layer that is trained from some step on counts as any other from the next snapshot on."""
    state = tuned()
    planner = ShardPlanner(0, 1)
    planner.shard_of(state.capture())
    state.model[0].requires_grad_(requires_grad=True)  # type: ignore[index]
    captured = state.capture()
    assert not captured.frozen
    assert not any(entry.frozen for entry in planner.shard_of(captured).entries)


sizes = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1000), max_size=30)


@given(sizes, st.integers(1, 8), st.data())
def test_both_kinds_are_spread(found: dict[str, int], parts: int, data: st.DataObject) -> None:
    """Every tensor has one owner, and neither kind's bytes differ between ranks by more than its largest tensor."""
    frozen = data.draw(st.frozensets(st.sampled_from(sorted(found)))) if found else frozenset()
    shards = balanced(found, parts, frozen)
    assert sorted(found) == sorted(key for shard in shards for key in shard)
    for kind in (frozen, found.keys() - frozen):
        loads = [sum(found[key] for key in shard if key in kind) for shard in shards]
        assert max(loads) - min(loads) <= max((found[key] for key in kind), default=0)


def test_one_large_tensor_of_each_kind_goes_to_two_ranks() -> None:
    """What a rank copies at each snapshot is both kinds together."""
    shards = balanced({"moving": 1000, "still": 1000, "small": 1}, 2, {"still"})
    assert [["moving"], ["small", "still"]] == [sorted(shard) for shard in shards]


def commit(catalog: Catalog, state: State, step: int) -> Manifest:
    """Take a snapshot of *state* as one rank and its writer do."""
    captured = state.capture()
    rank_shard = ShardPlanner(0, 1).shard_of(captured)
    memory = memoryview(bytearray(rank_shard.nbytes))
    entries = list(rank_shard.copy_into(memory))
    record = SnapshotRecord(
        {"position": {"step": step}, "state": captured.tree}, ManifestFacts(trigger="steps")
    )
    shard = StagedShard(entries, rank_shard.nbytes, record)
    pending = PendingSnapshot(f"{step:012d}-0001-{step:08x}", step, 1, 1, 1)
    files = ShardWriter(WriterStart("", "r"), catalog).write(pending, 0, shard, memory)
    about: dict[str, Any] = {"run_id": "r", "generation": 1, "world_size": 1, "trigger": "steps"}
    made = Manifest(
        name=pending.name,
        step=step,
        created=0.0,
        files={file.name: file.entry for file in files if not file.is_borrowed},
        borrowed={file.name: file.entry for file in files if file.is_borrowed},
        tensors={key: place for file in files for key, place in file.tensors.items()},
        **about,
    )
    Publisher(catalog).publish(made)
    return made


def test_borrowed_tensors_are_restored(me: Any, tmp_path: Path) -> None:
    """Frozen tensors come from the file of the first snapshot, the others from the newest, to the bit."""
    catalog, state = Catalog(Storage(str(tmp_path))), tuned()
    commit(catalog, state, 1)
    with torch.no_grad():
        state.model[2].weight.add_(1)  # type: ignore[index]
    second = commit(catalog, state, 2)
    assert {"frozen-00000-of-00001.safetensors"} == {place.partition("/")[2] for place in second.borrowed}
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    live = state.capture().tensors
    assert live.keys() == found.tensors.keys()
    assert all(torch.equal(live[key], found.tensors[key]) for key in live)


def test_damage_of_a_lent_file_rejects_all_that_borrow_it(me: Any, tmp_path: Path) -> None:
    """A byte of the one frozen file is flipped: every snapshot that needs it is set aside, an older one is taken."""
    catalog, state = Catalog(Storage(str(tmp_path))), tuned()
    state.model[0].bias.data.add_(1)  # type: ignore[index]
    oldest = commit(catalog, state, 1)
    state.model[0].bias.data.sub_(1)  # type: ignore[index]
    lender, *_ = [commit(catalog, state, step) for step in (2, 3, 4)]
    path = tmp_path / "snapshots" / lender.name / "frozen-00000-of-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    assert oldest.name == found.manifest.name
    assert 3 == len(catalog.quarantined())
    assert all("block 0 (from byte 0)" in reason for reason in catalog.quarantined().values())


def test_file_cut_after_verification_leaves_the_model_alone(me: Any, tmp_path: Path) -> None:
    """All ranks agreed, then a file is cut: nothing live has changed when it fails, and the next start goes further back."""
    catalog, state = Catalog(Storage(str(tmp_path))), tuned()
    oldest, newest = (commit(catalog, state, step) for step in (1, 2))
    with torch.no_grad():
        state.model[2].weight.add_(1)  # type: ignore[index]
    before = {key: tensor.clone() for key, tensor in state.capture().tensors.items()}
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    os.truncate(tmp_path / "snapshots" / newest.name / "shard-00000-of-00001.safetensors", 100)
    with pytest.raises(SnapshotError, match="changed while it was loaded"):
        restore.apply(me, state, found, OwnLoader(catalog))
    after = state.capture().tensors
    assert all(torch.equal(before[key], after[key]) for key in before)
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    assert oldest.name == found.manifest.name
    assert [newest.name] == list(catalog.quarantined())
