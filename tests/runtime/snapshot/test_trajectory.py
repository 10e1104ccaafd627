"""What rank 0 records of each step, and how a run is held."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from elasticflow.protocol import trajectory_record
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.process.votes import Vote
from elasticflow.runtime.snapshot import trajectory
from elasticflow.runtime.snapshot.trajectory import TrajectoryRecorder
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from tests.forked import ForkedPrograms

PROGRAM = Path(__file__).parents[1] / "programs" / "record_shards.py"


def build() -> State:
    """Return a job's state after one step: buffers, tied weights, an average, AdamW."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.register_buffer("cache", torch.ones(2), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    state = State(model=model, optimizer=optimizer, ema=AveragedModel(model))
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    return state


def worker(rank: int = 0) -> Any:
    """Return a stand-in for the worker of that rank, whose heartbeats are counted."""
    beats: list[int] = []
    heartbeat = SimpleNamespace(beat=lambda: beats.append(1))
    progress = SimpleNamespace(after_step=None)
    return SimpleNamespace(
        rank=rank,
        generation=3,
        world_size=2,
        vote=Vote(),
        heartbeat=heartbeat,
        progress=progress,
        beats=beats,
    )


def at(step: int) -> Position:
    """Return the position after that step."""
    return Position(step, 8 * step, 0, 8 * step, is_epoch_end=False)


def test_every_tensor_and_number_of_the_state_is_named_as_the_user_names_it() -> None:
    """Parameters, persistent buffers, the optimizer's state by parameter, its numbers, the average."""
    found = dict(trajectory.digests(build()))

    assert {"model/0.weight", "model/2.weight", "model/1.running_mean", "model/1.num_batches_tracked"} <= set(
        found
    )
    assert {"optimizer/0.weight/exp_avg", "optimizer/1.bias/step", "ema/module.0.weight"} <= set(found)
    assert ("0.25", "0.9") == (found["optimizer/group 0/lr"], found["optimizer/group 0/betas/0"])
    assert not [name for name in found if "cache" in name]
    assert found == dict(trajectory.digests(build()))


@pytest.mark.parametrize("place", ["model", "optimizer", "ema"])
def test_one_changed_element_changes_one_digest(place: str) -> None:
    """Of the tensor that holds it, and of no other."""
    state = build()
    before = dict(trajectory.digests(state))
    if place == "model":
        name, tensor = "model/1.running_var", state.model.get_buffer("1.running_var")
    elif place == "ema":
        assert state.ema is not None
        name, tensor = "ema/module.1.bias", state.ema.module.get_parameter("1.bias").data
    else:
        bias = state.model.get_parameter("1.bias")
        name, tensor = "optimizer/1.bias/exp_avg_sq", state.optimizers["optimizer"].state[bias]["exp_avg_sq"]
    tensor[2] = torch.nextafter(tensor[2], torch.tensor(9.0))

    after = dict(trajectory.digests(state))

    assert {name} == {key for key in before if before[key] != after[key]}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.ones(3, dtype=torch.bool),
        torch.ones(2, 2, dtype=torch.complex128),
        torch.arange(5),
        nn.Parameter(torch.ones(2, 2)),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}".removeprefix("torch."),
)
def test_digests_are_of_any_tensor(tensor: Tensor) -> None:
    """Of any dtype and shape, equal for a copy."""
    assert trajectory.digest(tensor) == trajectory.digest(tensor.detach().clone())
    assert 8 == len(trajectory.digest(tensor))


def test_digests_are_of_the_elements_and_not_of_their_places_in_memory() -> None:
    """A transposed or channels-last tensor has the digest of its contiguous copy; zero differs from minus zero."""
    tensor = torch.randn(2, 3, 4, 5)
    for view in (
        tensor.to(memory_format=torch.channels_last),
        tensor.transpose(1, 3).contiguous().transpose(1, 3),
    ):
        assert not view.is_contiguous()
        assert trajectory.digest(tensor) == trajectory.digest(view)
    assert trajectory.digest(torch.tensor([0.0])) != trajectory.digest(torch.tensor([-0.0]))


def test_only_rank_0_records(tmp_path: Path) -> None:
    """Where nothing is sharded; elsewhere there is nothing, and nothing is called at a step."""
    other = worker(1)
    TrajectoryRecorder(tmp_path, other, build(), at(0), is_exact=True)
    assert other.progress.after_step is None
    assert [] == [*tmp_path.iterdir()]


@pytest.mark.e2e
@pytest.mark.parametrize(("world_size", "degree"), [(2, 2), (3, 3), (4, 2)])
def test_a_sharded_run_has_the_records_of_a_whole_one(
    forked: ForkedPrograms, tmp_path: Path, world_size: int, degree: int
) -> None:
    """Parameters and the optimizer's state lie in rows on several ranks, of which some have none; buffers are whole."""
    for name in ("whole", "shards"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = (str(world_size), str(degree), str(tmp_path / "store"), str(tmp_path))
    ranks = [
        forked.start(PROGRAM, str(rank), *arguments, environment=environment) for rank in range(world_size)
    ]
    assert [0] * world_size == [rank.wait(100) for rank in ranks], ranks[0].stderr.read_text()
    assert ranks[0].stdout.read_text() == "2 True\n"
    assert len([*(tmp_path / "shards").glob("g*.jsonl")]) == degree


def test_a_line_is_written_for_the_beginning_and_for_each_step(tmp_path: Path) -> None:
    """As it was then, though the tensors are changed in place."""
    me, state = worker(), build()
    TrajectoryRecorder(tmp_path, me, state, at(4), is_exact=True)
    states = [dict(trajectory.digests(state))]
    for step in (5, 6):
        state.optimizers["optimizer"].step()
        states.append(dict(trajectory.digests(state)))
        me.progress.after_step(at(step), 1 / step)

    records = trajectory_record.read_records(tmp_path)

    assert trajectory_record.exact_file(tmp_path).exists()
    assert states == [r.digests for r in records]
    assert [(4, 32, None), (5, 40, 0.2), (6, 48, 1 / 6)] == [(r.step, r.samples, r.loss) for r in records]
    assert {(3, 2)} == {(r.generation, r.world_size) for r in records}


def test_a_run_is_held_after_the_step_until_it_is_asked_to_leave(tmp_path: Path) -> None:
    """It says where it is held, and beats meanwhile; a later generation is not held there."""
    me, state = worker(), build()
    trajectory_record.hold_file(tmp_path, 2).touch()
    held = trajectory_record.held_file(tmp_path, 2)
    wanted = TrajectoryRecorder(tmp_path, me, state, at(0), is_exact=False)
    assert not trajectory_record.exact_file(tmp_path).exists()
    wanted.step(at(1), 1.0)
    assert not held.exists()
    training = threading.Thread(target=wanted.step, args=(at(2), 1.0))
    training.start()
    while not (held.exists() and me.beats):
        assert training.is_alive()
    me.vote.leave_wanted = True

    training.join(60)

    assert not training.is_alive()
    assert not trajectory_record.hold_file(tmp_path, 2).exists()
    assert [0, 1, 2] == [r.step for r in trajectory_record.read_records(tmp_path)]
