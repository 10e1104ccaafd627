"""Loops that shard their model themselves: snapshots in pieces, resumed at any degree; replicas compared; refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.snapshots.read import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.conftest import Ended, Group

pytestmark = pytest.mark.e2e
PROGRAM = "own_sharded.py"


def state_in(ended: Ended, word: str) -> dict[str, Any]:
    """Return the whole state that rank 0 printed behind *word*."""
    (line,) = [line for line in ended.outputs[0].splitlines() if line.startswith(f"{word} ")]
    state: dict[str, Any] = json.loads(line.removeprefix(f"{word} "))
    return state


def stored(group: Group, name: str) -> dict[str, Any]:
    """Return model and optimizer of snapshot *name*, by the names that the program prints."""
    content = load.load(group.catalog, name)
    names = content.state["state"]["parameters"][0]
    found = {}
    for key, whole in content.manifest.whole.items():
        tensor = torch.empty(whole.shape, dtype=BY_NAME[whole.dtype])
        content.read_into(key, tensor.view(-1).view(torch.uint8).numpy().data)
        part, _, rest = key.partition("/")
        if part == "model" and "scalars" not in rest:
            found[rest] = tensor.tolist()
        elif rest.startswith("state/"):
            _, number, kind = rest.split("/")
            found[f"{names[int(number)].removeprefix('model/')}.{kind}"] = tensor.tolist()
    return found


def agree(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Check that all tensors of *second* are those of *first*, number by number."""
    assert second
    assert {key: first[key] for key in second} == second


def test_a_loop_killed_and_resumed_at_other_degrees(groups: Callable[..., Group]) -> None:
    """Two ranks share a model; then four, two and two; then three; then two that have it whole.

    Each time every number of model and optimizer is the one that the snapshot holds, and no rank stored a row twice.
    """
    group = groups("run", PROGRAM)
    assert -9 == group.run(2, "--degree", "2", "--kill-at", "7", ends=False).codes[0]
    before = group.catalog.newest()
    assert before is not None
    assert 4 == before.step
    assert 2 == before.format
    ways = [(4, 2, "10"), (3, 3, "13"), (2, 0, "")]
    for world, degree, stop in ways:
        newest = group.catalog.newest()
        assert newest is not None
        arguments = ("--degree", str(degree), *(("--term-at", stop) if stop else ()))
        ended = group.run(world, *arguments)
        assert [0] * world == ended.codes
        agree(state_in(ended, "restored"), stored(group, newest.name))
        after = group.catalog.newest()
        assert after is not None
        assert after.step > newest.step
        assert (2 if degree else 1) == after.format
        if degree:
            weight = after.whole["model/embed.weight"]
            assert min(degree, 11) >= len(weight.pieces) > 1
            assert "model/head.weight" in after.aliases
            files = {place.file for whole in after.whole.values() for place in whole.pieces}
            assert world == len(
                [file for file in files if file.startswith("shard-")]
            )  # replicas share the work
        agree(state_in(ended, "ended"), stored(group, after.name))
    assert 16 == newest_step(group)


def newest_step(group: Group) -> int:
    """Return the step of the newest snapshot."""
    newest = group.catalog.newest()
    assert newest is not None
    return newest.step


def test_the_same_degree_has_the_same_bits(groups: Callable[..., Group]) -> None:
    """Killed and resumed at one degree, a run ends with the numbers of a run that nobody disturbed."""
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    undisturbed = whole.run(2, "--degree", "2")
    assert -9 == parts.run(2, "--degree", "2", "--kill-at", "7", ends=False).codes[0]
    assert state_in(undisturbed, "ended") == state_in(parts.run(2, "--degree", "2"), "ended")
    (told,) = whole.lines("replicas.not_compared")
    assert "no other worker holds" in told["reason"]


@pytest.mark.parametrize("kind", ["dict", pytest.param("object", marks=pytest.mark.nightly)])
def test_an_average_of_the_loops_own_goes_through_other_degrees(
    groups: Callable[..., Group], kind: str
) -> None:
    """Its parts are stored and loaded as the model's are: by two ranks, three, one that has all of it, and two replicas of two."""
    group, options = groups("run", PROGRAM), ("--average", kind)
    ended = group.run(2, "--degree", "2", "--term-at", "3", *options)
    for world, degree, stop in ((3, 3, "6"), (1, 0, "9"), (4, 2, "12")):
        before = state_in(ended, "ended")
        assert any(key.startswith("average.") for key in before)
        ended = group.run(world, "--degree", str(degree), "--term-at", stop, *options)
        assert [0] * world == ended.codes
        assert before == state_in(ended, "restored")
    newest = group.catalog.newest()
    assert newest is not None
    own = {
        place.file
        for key, whole in newest.whole.items()
        if key.startswith("include.average")
        for place in whole.pieces
    }
    assert 2 == len(own)  # the parts of one replica, which alone are known to fit together


def test_no_snapshot_is_taken_of_gradients_that_wait_for_others(groups: Callable[..., Group]) -> None:
    """A pass whose gradients no rank has passed on belongs to the next step: a kill loses none of them, and no number differs."""
    options = ("--degree", "2", "--accumulate", "--every", "3 steps")
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    undisturbed = whole.run(2, *options)
    assert -9 == parts.run(2, *options, "--kill-at", "8", ends=False).codes[0]
    assert state_in(undisturbed, "ended") == state_in(parts.run(2, *options), "ended")
    assert {0} == {found.step % 2 for found in (*whole.catalog.committed(), *parts.catalog.committed())}


def test_a_part_that_differs_from_its_replica_is_named(groups: Callable[..., Group]) -> None:
    """Ranks 1 and 3 hold the same rows; a bit of rank 1's is flipped: they are named, and ranks 0 and 2 are not."""
    group = groups("run", PROGRAM)
    ended = group.run(4, "--degree", "2", "--flip-at", "3", "--every", "3 steps", ends=False)
    assert 0 not in ended.codes
    assert "the ranks 1 and 3 have each another model/" in "".join(ended.errors)
    assert group.catalog.newest() is None


def test_replicas_that_nothing_holds_together_are_refused(groups: Callable[..., Group]) -> None:
    """Each replica has a mesh of its own, and the loop leaves it at that: after the first step, before any snapshot."""
    ended = groups("run", PROGRAM).run(4, "--degree", "2", "--own-meshes", ends=False)
    assert 0 not in ended.codes
    assert "nothing exchanged their gradients between the replicas" in ended.errors[0]
    assert "init_device_mesh(device, (replicas, shards))" in ended.errors[0]


def test_evaluations_have_equally_many_forwards(groups: Callable[..., Group]) -> None:
    """Two batches on three ranks that share a model: the third measures for nothing, and nobody waits for ever."""
    alone, shared = groups("alone", PROGRAM).run(1), groups("shared", PROGRAM).run(3, "--degree", "3")
    assert [0, 0, 0] == shared.codes
    results = []
    for ended in (alone, shared):
        lines = [line for line in ended.outputs[0].splitlines() if line.startswith("measured ")]
        results.append(
            {k: v for line in lines for k, v in json.loads(line.removeprefix("measured ")).items()}
        )
    assert results[0] == pytest.approx(results[1], rel=1e-4)
    assert 9 == results[1]["seen"]


def test_stop_training_in_an_evaluation_is_refused(groups: Callable[..., Group]) -> None:
    """The other ranks would wait for the forwards that are left out."""
    ended = groups("run", PROGRAM).run(2, "--degree", "2", "--stop-in-metric", ends=False)
    assert 0 not in ended.codes
    assert "StopTraining was raised in an evaluation of a sharded model" in ended.errors[1]


@pytest.mark.parametrize(
    ("by", "call"),
    [
        ("break", "leaves its loop"),
        ("skip", "calls run.step"),
        ("look", "calls run.step"),
        ("measure", "ends an epoch"),
        ("evaluate", "calls run.evaluate"),
        ("block", "calls no further block"),
        ("gather", "gathers a parameter"),
    ],
)
def test_a_rank_that_goes_another_way_alone_ends_all_by_name(
    groups: Callable[..., Group], by: str, call: str
) -> None:
    """A forward is a joint act: both ranks are told within the step, and no rank waits for ever."""
    ended = groups("run", PROGRAM).run(2, "--degree", "2", "--leave-at", "3", "--leave-by", by)
    assert 0 not in ended.codes
    others = {"block": "calls blocks.2", "gather": "calls run.step"}
    first = others.get(by, "calls the sharded model")
    for error in ended.errors:
        assert f"rank 0 {first}, and rank 1 {call}" in error


def test_a_rank_that_exits_alone_ends_the_other(groups: Callable[..., Group]) -> None:
    """Its connections close, which the other rank notices at once."""
    ended = groups("run", PROGRAM).run(2, "--degree", "2", "--leave-at", "3", "--leave-by", "exit")
    assert 0 != ended.codes[0]
    assert "by peer" in ended.errors[0]  # gloo: its connection was closed, or reset


def test_all_ranks_may_leave_their_loop_by_break(groups: Callable[..., Group]) -> None:
    """What follows the loop runs on all of them."""
    ended = groups("run", PROGRAM).run(2, "--degree", "2", "--leave-at", "3", "--leave-by", "all")
    assert [0, 0] == ended.codes
    assert "measured" in ended.outputs[0]


def test_a_model_that_is_sharded_on_the_meta_device(groups: Callable[..., Group]) -> None:
    """Without values it is refused by name; with values it trains, and a snapshot replaces them."""
    group = groups("run", PROGRAM)
    left = group.run(2, "--degree", "2", "--meta", "left", ends=False)
    assert "model.embed.weight is on the meta device, and has no values" in left.errors[0]
    ended = group.run(2, "--degree", "2", "--meta", "filled", "--term-at", "3")
    assert [0, 0] == ended.codes
    assert state_in(ended, "ended") == state_in(
        group.run(2, "--degree", "2", "--meta", "filled", "--term-at", "6"), "restored"
    )


def test_a_snapshot_of_another_model_is_refused(groups: Callable[..., Group]) -> None:
    """At another degree, too, where no rank reads more than its rows: the tensor and both shapes are named."""
    group = groups("run", PROGRAM)
    assert [0, 0] == group.run(2, "--degree", "2", "--term-at", "2").codes
    ended = group.run(3, "--degree", "3", "--width", "8", ends=False)
    assert 0 not in ended.codes
    assert "the snapshot does not fit the job's model: blocks.0.down.bias" in ended.errors[0]
    assert "continue with the job the snapshot was taken of, or start a new run" in ended.errors[0]


def test_other_cuts_than_rows_are_refused(groups: Callable[..., Group]) -> None:
    """Columns cannot be read as a range of bytes: refused by name before the first step."""
    ended = groups("run", PROGRAM).run(2, "--degree", "2", "--cut", "columns", ends=False)
    assert 0 not in ended.codes
    assert "is a DTensor with placements (Shard(dim=1),)" in ended.errors[0]
