"""One trajectory, bit for bit, however many ranks share a model and however many replicas there are; nothing hangs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticflow.errors import StateError
from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.process.shard_layout import Sharding, ShardLayout, layout_of
from elasticflow.runtime.process.sharded_tensors import local_of
from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.training.exact_norm import exact_norm
from elasticflow.runtime.training.modes import evaluating
from elasticflow.runtime.training.shard_model import fully_shard_blocks
from elasticflow.runtime.training.sharded_step import ShardedStep, _Calls, _GroupSum
from elasticflow.snapshots.read import load
from tests.pretended_device import pretended

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.runtime.conftest import Group

PROGRAM = "sharded_gradients.py"
e2e = pytest.mark.e2e


def came_to(group: Group) -> tuple[dict[str, bytes], list[Any]]:
    """Return every byte of the newest snapshot, and the losses and norms of all steps."""
    manifest = group.catalog.newest()
    assert manifest is not None
    content, found = load.load(group.catalog, manifest.name), {}
    for key, whole in content.manifest.whole.items():
        tensor = torch.empty(whole.shape, dtype=BY_NAME[whole.dtype])
        content.read_into(key, tensor.view(-1).view(torch.uint8).numpy().data)
        # Scalars are named by their device.
        found[key.replace("/lazy", "/cpu")] = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    steps: dict[int, Any] = {}
    for generation in range(1, manifest.generation + 1):
        for line in group.lines("step", generation=generation):
            steps[line["step"]] = line["loss"], line.get("grad_norm")
    return found, sorted(steps.items())


def test_layouts() -> None:
    """Ranks of a replica take turns, so that each round is of neighbouring virtual shards."""
    layouts = [ShardLayout(6, rank, 2) for rank in range(6)]
    assert [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)] == [
        (each.replica, each.shard) for each in layouts
    ]
    for each in layouts:
        rounds = each.rounds(8)
        mine = [r[each.shard] for r in rounds if each.shard < len(r)]
        assert mine == list(each.leaves(8))
    everything = sorted(leaf for each in layouts for leaf in each.leaves(8))
    assert list(range(8)) == everything
    assert layout_of(Sharding("node"), 6, 0, 3, "cpu") == ShardLayout(6, 0, 3)
    assert layout_of(Sharding("all", offload="cpu"), 6, 0, 3, "cpu") == ShardLayout(6, 0, 6)
    assert layout_of(Sharding("all", offload="cpu"), 6, 0, 3, "cuda") == ShardLayout(
        6, 0, 6, is_offloaded=True
    )
    with pytest.raises(StateError, match="6 workers cannot be shared out among replicas of 4"):
        layout_of(Sharding(4), 6, 0, 6, "cpu")
    with pytest.raises(StateError, match="offload='disk' is no memory to keep parameters in"):
        Sharding(2, offload="disk")  # type: ignore[arg-type]


def first_of_two(parameter: torch.nn.Parameter) -> _GroupSum:
    """Return the sum of a parameter's gradients on the first of two ranks that share it, as its only round begins."""
    exchange: Any = SimpleNamespace(
        layout=ShardLayout(2, 0, 2), num_leaves=1, rank=0, leaves=range(1), is_last=True
    )
    added = _GroupSum(exchange, [parameter], "block 0")
    added.begin()
    return added


def test_gradients_that_are_set_to_none_leave_no_memory_behind() -> None:
    """Their rows are memory of the sum's, which the next forward would otherwise have to do without."""
    parameter = torch.nn.Parameter(torch.ones(1, 3))
    added = first_of_two(parameter)
    rows = added.allocate((3,), dtype=torch.float32, device=torch.device("cpu"))
    added._got = torch.arange(6.0).view(2, 3)
    added.hook(rows)
    parameter.grad = rows.view(1, 3)
    added.finish()
    assert parameter.grad.tolist() == [[0.0, 1.0, 2.0]]
    memory: Any = StorageWeakRef(rows.untyped_storage())  # type: ignore[no-untyped-call]
    del rows
    assert not memory.expired()
    parameter.grad = None
    assert memory.expired()


def test_outputs_are_let_go_before_the_backward(alone: Any) -> None:
    """A loss needs no scores of words any more, which may be the largest tensor of all."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fully_shard_blocks(model, [model[0]], alone, "cpu", Sharding(1))
    calls = _Calls(model, torch.device("cpu"))
    calls.begin()
    model(torch.ones(1, 2))
    assert len(calls.outputs) == 1
    calls.end_forwards()
    assert calls.outputs == []


def trained(me: Any, group: Any, device: torch.device, offload: Literal["cpu"] | None) -> list[Any]:
    """Return each step's loss and norm, then all parameters and the optimizer's state: one rank, four virtual shards."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    me.device, me.sharding = device, Sharding(1, offload=offload)
    for net in (model.to(device), average.module.to(device)) if offload is not None else ():
        fully_shard_blocks(net, list(net.children()), group, device.type, me.sharding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    kind = ExactStep if offload is None else ShardedStep
    exact: Any = {} if offload is None else {"is_exact": True}
    step = kind(
        me, model, lambda net, data: net(data).square().mean(), virtual_shards=4, precision="fp32", on_nonfinite="stop", **exact
    )  # fmt: skip
    found: list[Any] = []
    for number in range(6, 9):
        pieces = [(torch.randn(4, 8).to(device), 4) for _ in range(4)]
        end = Position(number, 16 * number, 0, 16 * number, False)
        found.append(step.forward_backward(Batch(16, end, list(range(4)), iter(pieces))))
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append(exact_norm(gradients).tolist())
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad(), evaluating(average):
            found.append(average.module(torch.randn(2, 8).to(device)).tolist())
    state = [optimizer.state[parameter] for parameter in model.parameters()]
    tensors = [
        *average.module.parameters(),
        *model.parameters(),
        *model.buffers(),
        *(t for each in state for t in each.values()),
    ]
    assert offload is None or {p.device.type for p in (*model.parameters(), *tensors[-4:])} == {"cpu"}
    return [*found, *(local_of(tensor).detach().cpu().tolist() for tensor in tensors)]


def test_an_offloaded_model_has_the_bits_of_one_that_is_not(me: Any, alone: Any) -> None:
    """Parameters, gradients and the optimizer's state are in the CPU's memory, and blocks are computed on the device."""
    del alone  # exact mode refuses collectives of the default group in a forward
    expected = trained(me, group := dist.new_group([0]), torch.device("cpu"), None)
    with pretended() as device:
        assert trained(me, group, device.device, "cpu") == expected
    torch.use_deterministic_algorithms(mode=False)


@e2e
@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ("--clip", ((2, 2), (4, 2), (3, 3), (2, 1))),
        pytest.param("--clip", ((6, 3), (4, 4)), marks=pytest.mark.nightly),
        (
            "--precision bf16 --count --norms --virtual-shards 7 --size 24 --samples 100",
            ((4, 2), (3, 3)),
        ),
    ],
    ids=["clipped", "clipped, many ranks", "bf16, sums, BatchNorm"],
)
def test_one_trajectory_at_every_degree(
    groups: Callable[..., Group], options: str, layouts: tuple[tuple[int, int], ...]
) -> None:
    """Dropout, tied weights, noise in the data, a short batch that leaves ranks without samples.

    Two ranks that are one replica keep parameters gathered between the forward and the backward.
    """
    whole, options = groups("whole", PROGRAM), f"{options} --epochs 1"
    # Without `shard` a norm is torch's own.
    first = () if "--clip" not in options else ("--shard", "1")
    assert [0] == whole.run(1, *first, *options.split()).codes
    expected = came_to(whole)
    assert len(expected[1]) == 5
    for world, degree in layouts:
        group = groups(f"w{world}s{degree}", PROGRAM)
        stays = ("--stays-gathered",) if world == degree == 2 else ()
        assert [0] * world == group.run(world, "--shard", str(degree), *stays, *options.split()).codes
        found = came_to(group)
        assert expected[1] == found[1], (world, degree)
        assert [key for key in expected[0] if expected[0][key] != found[0].get(key)] == [], (world, degree)


@e2e
@pytest.mark.parametrize(
    ("option", "layouts"),
    [
        ("--checkpointed", ((4, 2),)),
        pytest.param("--checkpointed", ((2, 2), (3, 3)), marks=pytest.mark.nightly),
        pytest.param("--compiled", ((2, 2),), marks=pytest.mark.nightly),  # a compiler takes its time
    ],
)
def test_blocks_that_are_computed_again_or_compiled(
    groups: Callable[..., Group], option: str, layouts: tuple[tuple[int, int], ...]
) -> None:
    """The bits are those of one rank whose blocks are so, too; those of checkpointed ones are those of plain ones."""
    whole = groups("whole", PROGRAM)
    assert [0] == whole.run(1, *(() if option == "--checkpointed" else (option,))).codes
    expected = came_to(whole)
    for world, degree in layouts:
        group = groups(f"w{world}s{degree}", PROGRAM)
        assert [0] * world == group.run(world, "--shard", str(degree), option).codes
        assert expected == came_to(group), (world, degree)


@e2e
def test_killed_drained_and_resumed_at_other_degrees(groups: Callable[..., Group]) -> None:
    """Two share a model, one is killed; four in two replicas, drained; three to the end: the bits of one undisturbed rank.

    All but the first offload their parts, and compute the blocks' activations again; the four have no device, say so, and leave
    the offloading out.
    """
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    assert [0] == whole.run(1, "--shard", "1", "--clip").codes
    options = ("--clip", "--checkpointed", "--offload")
    parts.environment |= {"ELASTICFLOW_ACCEPT_DRIFT": "1", "ELASTICFLOW_DEVICE": "lazy"}
    assert -9 == parts.run(2, "--shard", "2", *options, "--kill-at", "6", ends=False).codes[0]
    parts.environment["ELASTICFLOW_DEVICE"] = "cpu"
    assert [0] * 4 == parts.run(4, "--shard", "2", *options, "--term-at", "7").codes
    assert len(parts.lines("offload.left_out", generation=2)) == 1
    parts.environment["ELASTICFLOW_DEVICE"] = "lazy"
    assert [0] * 3 == parts.run(3, "--shard", "3", *options).codes
    assert parts.lines("offload.left_out", generation=3) == []
    expected, found = came_to(whole), came_to(parts)
    assert expected[0] == found[0]
    assert expected[1] == found[1]


@e2e
def test_layers_that_are_frozen_or_trained_from_some_step_on(groups: Callable[..., Group]) -> None:
    """One trajectory with several copies, at a degree, and killed behind the change; several workers without virtual shards, too."""
    whole, options = groups("whole", PROGRAM), ("--thaw-at", "4", "--every", "2 steps")
    assert [0] == whole.run(1, *options).codes
    copies, parts = groups("copies", PROGRAM), groups("parts", PROGRAM)
    assert [0, 0] == copies.run(2, *options).codes
    assert -9 == parts.run(4, "--shard", "2", *options, "--kill-at", "8", ends=False).codes[0]
    assert [0, 0] == parts.run(2, "--shard", "2", *options).codes
    for group in (copies, parts):
        assert came_to(whole) == came_to(group)
    for shard in ((), ("--shard", "2")):
        assert [0, 0] == groups(f"batch{shard}", PROGRAM).run(
            2, *options, *shard, "--virtual-shards", "0"
        ).codes


@e2e
def test_a_loop_without_virtual_shards_repeats_its_bits_at_each_number_of_workers(
    groups: Callable[..., Group],
) -> None:
    """Killed or not, and at either degree; the parts of a batch are known only once the loop has begun."""
    found = []
    for degree, kill in (("2", ()), ("4", ("--kill-at", "6"))):
        group = groups(f"s{degree}", PROGRAM)
        options = ("--shard", degree, "--virtual-shards", "0", "--clip", "--micro-batch-size", "2")
        if kill:
            assert -9 == group.run(4, *options, *kill, ends=False).codes[0]
        assert [0] * 4 == group.run(4, *options).codes
        found.append(came_to(group))
    assert found[0] == found[1]


@e2e
@pytest.mark.parametrize("where", ["before", "after"])
def test_stop_training_around_a_forward_ends_all_ranks(groups: Callable[..., Group], where: str) -> None:
    """Nobody waits for ever, and the step counts nothing."""
    group = groups("run", PROGRAM)
    assert [0, 0, 0] == group.run(3, "--shard", "3", "--stop", where).codes
    newest = group.catalog.newest()
    assert newest is not None
    assert 2 == newest.step


@e2e
def test_data_that_ends_training_before_any_rank_has_samples(groups: Callable[..., Group]) -> None:
    """The first step of a process has nothing to repeat for nothing, on any rank."""
    group = groups("run", PROGRAM)
    ended = group.run(3, "--shard", "3", "--stop", "data")
    assert [0, 0, 0] == ended.codes
    assert [] == group.lines("step")


@e2e
def test_stop_training_for_samples_that_count_nothing_asks_for_nothing(groups: Callable[..., Group]) -> None:
    """The first batch has samples for rank 0 alone; the last rank repeats them, and its code raises StopTraining."""
    group = groups("run", PROGRAM)
    few = ("--samples", "2", "--stop", "after", "--stop-at", "1")
    assert [0, 0, 0] == group.run(3, "--shard", "3", *few).codes
    assert [1, 2] == [line["step"] for line in group.lines("step")]


@e2e
@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (("--stop", "within"), "in the midst of a forward of a sharded model"),
        (("--odd", "unused"), "takes no part in the loss of a virtual shard"),
        (
            ("--stop", "before", "--stop-at", "1"),
            "before this process called it for the first time",
        ),
        (("--odd", "skipped"), "called its blocks in another order than before"),
        (("--odd", "skipped at once"), "called its blocks in another order than before"),
        (("--odd", "skipped inside"), "a block left out its layers"),
        (("--odd", "collective"), "the forward calls a collective of torch.distributed"),
        (("--odd", "momentum", "--virtual-shards", "0"), "the forward changes the parameter frozen.weight"),
        (("--odd", "momentum beside"), "the forward changes the parameter frozen.weight"),
        (("--odd", "decay"), "the loss depends on parameters beside the forward"),
        (("--odd", "optimizer"), "not known to treat each element of a parameter by itself"),
        (("--odd", "fused"), "fused=True"),
        (("--odd", "tied"), "is the same parameter as"),
        (("--odd", "scalar"), "scale has no dimension"),
        (("--odd", "list"), "no blocks to shard"),
        (("--odd", "meta"), "embed.weight is on the meta device"),
        (("--precision", "fp16"), "needs a gradient scaler"),
    ],
)
def test_what_would_hang_or_be_other_is_refused_by_name(
    groups: Callable[..., Group], odd: tuple[str, ...], said: str
) -> None:
    """The rank that finds it says so; the others end with it."""
    ended = groups("run", PROGRAM).run(2, "--shard", "2", *odd, ends=False)
    assert 0 not in ended.codes
    assert said in "".join(ended.errors)
