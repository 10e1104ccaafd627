"""Steps with the same bits at every world size: their gradients in one process, their trajectories in real worker groups."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elasticflow.errors import StateError
from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.training import exact
from elasticflow.runtime.training.exact import EarlyBuckets, ExactStep
from tests.runtime.positions import end_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INPUTS = torch.arange(8.0).reshape(8, 1)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests run as torch does by itself."""
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


class Net(nn.Module):
    """One layer that is used, one that only large inputs use, one that none uses; BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.always, self.large, self.never = (
            nn.BatchNorm1d(1), nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.always(self.norm(inputs))
        return outputs + self.large(inputs) if inputs.max() >= 7 else outputs


def batch(shards: int) -> Batch:
    """Return all inputs, cut into that many pieces."""
    pieces = [(piece, len(piece)) for piece in INPUTS.chunk(shards)]
    return Batch(len(INPUTS), end_of(IndexSchedule(8, 8, epochs=1)), list(range(shards)), iter(pieces))


def step(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the mean loss."""
    loss: Tensor = (model(inputs) - 3 * inputs).square().mean()
    return loss


def make(me: Any, step: Callable[..., Any] = step, shards: int = 4, **options: Any) -> tuple[Net, ExactStep]:
    """Return a model and its only replica."""
    torch.manual_seed(0)
    model = Net()
    chosen = {"precision": "fp32", "on_nonfinite": "stop", "virtual_shards": shards, **options}
    return model, ExactStep(me, model, step, **chosen)


def test_one_shard_is_plain_training(me: Any) -> None:
    """Loss, gradients, what has none and BatchNorm's statistics are those of one process that trains by itself."""
    model, group = make(me, shards=1)
    loss = group.forward_backward(batch(1))
    torch.manual_seed(0)
    plain = Net()
    expected = step(plain, INPUTS)
    torch.autograd.backward(expected)
    assert expected.item() == loss
    for mine, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or (other.grad is not None and mine.grad.equal(other.grad))
    assert [b.tolist() for b in plain.buffers()] == [b.tolist() for b in model.buffers()]


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_what_no_shard_uses_has_no_gradient(me: Any, shards: int) -> None:
    """AdamW's decay leaves it alone, as where one process trains; one use in one shard is a use."""
    model, group = make(me, shards=shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.never.weight.detach().clone()
    group.forward_backward(batch(shards))
    optimizer.step()
    assert model.large.weight.grad is not None
    assert model.never.weight.grad is None
    assert before.equal(model.never.weight)


def test_layers_that_are_trained_or_frozen_between_steps_are_followed(me: Any) -> None:
    """Gradients are those of a model whose layers were so from the beginning, to the bit; what is frozen has none."""
    model, group = make(me)
    model.norm.requires_grad_(requires_grad=False)
    early = ExactStep(me, model, step, precision="fp32", on_nonfinite="stop", virtual_shards=4)
    model.norm.requires_grad_(requires_grad=True)
    found = []
    for each in (group, early):
        torch.manual_seed(0)
        model.load_state_dict(Net().state_dict())
        each.forward_backward(batch(4))
        found.append([None if p.grad is None else p.grad.tolist() for p in model.parameters()])
    assert found[0] == found[1]
    model.always.requires_grad_(requires_grad=False)
    early.forward_backward(batch(4))
    assert model.always.weight.grad is None
    assert model.norm.weight.grad is not None


def test_a_step_that_is_left_out_changes_nothing(me: Any) -> None:
    """Neither weights nor statistics, though some shards were well."""
    model, group = make(
        me, lambda m, x: step(m, x) * (math.inf if x.max() >= 7 else 1.0), on_nonfinite="skip"
    )
    before = [tensor.clone() for tensor in model.state_dict().values()]
    group.forward_backward(batch(4))
    torch.optim.AdamW(model.parameters()).step()
    assert group.was_skipped
    assert all(was.equal(now) for was, now in zip(before, model.state_dict().values(), strict=True))


def test_a_frozen_batchnorm_keeps_its_statistics(me: Any) -> None:
    """A sum of three equal numbers, divided by three, may be another number."""
    model, group = make(me, shards=3)
    model.norm.eval()
    assert model.norm.running_mean is not None
    model.norm.running_mean.fill_(0.9)
    group.forward_backward(batch(3))
    assert torch.tensor([0.9]).equal(model.norm.running_mean)


class Centered(nn.Module):
    """Outputs without their running mean, which a forward writes or assigns."""

    center: Tensor

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.layer, self.assigns = nn.Linear(1, 1), assigns
        self.register_buffer("center", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.layer(inputs)
        center = 0.9 * self.center + 0.1 * outputs.detach().mean(0)
        outputs = outputs - self.center
        if self.assigns:
            self.center = center
        else:
            self.center.copy_(center)
        return outputs


def test_each_shard_begins_with_the_same_buffers_though_forwards_assign_others(me: Any) -> None:
    """Else a shard would begin with those that the shards before it on the same rank have left."""
    found = []
    for assigns in (False, True):
        torch.manual_seed(0)
        model = Centered(assigns=assigns)
        options: dict[str, Any] = {"precision": "fp32", "on_nonfinite": "stop", "virtual_shards": 4}
        group = ExactStep(me, model, step, **options)
        losses = [group.forward_backward(batch(4)) for _ in range(3)]
        found.append((losses, model.center.tolist(), model.layer.weight.grad.tolist()))  # type: ignore[union-attr]
    assert found[0] == found[1]


def test_counts_are_whole_though_code_of_the_job_has_made_half_precision_the_default(me: Any) -> None:
    """Gradients are divided by the count."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, group = make(me, lambda m, x: (step(m, x).sum(), 257), shards=1)
        group.forward_backward(
            Batch(8, end_of(IndexSchedule(8, 8, epochs=1)), [0], iter([(INPUTS.bfloat16(), 8)]))
        )
    finally:
        torch.set_default_dtype(torch.float32)
    assert me.progress.noted["count"] == 257


class PutBackward(torch.autograd.Function):
    """Uses an operation without a deterministic form in its backward."""

    @staticmethod
    def forward(_: Any, inputs: Tensor) -> Tensor:
        """Return the inputs."""
        return inputs.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        """Return something."""
        return gradient.clone().put_(torch.tensor([0, 0]), torch.ones(2))


def put(model: nn.Module, inputs: Tensor) -> Tensor:
    """Use the operation in the forward."""
    loss: Tensor = model(inputs).clone().put_(torch.tensor([0, 0]), torch.ones(2)).sum()
    return loss


def put_backward(model: nn.Module, inputs: Tensor) -> Tensor:
    """Use the operation in the backward."""
    found: Any = PutBackward.apply(model(inputs))  # type: ignore[no-untyped-call]
    loss: Tensor = found.sum()
    return loss


@pytest.mark.parametrize("own_step", [put, put_backward])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_operation_that_may_give_other_bits_is_named(me: Any, own_step: Any, precision: str) -> None:
    """In the forward and in the backward, with and without autocast; with what does the same."""
    _, group = make(me, own_step, precision=precision)
    with pytest.raises(StateError) as refused:
        group.forward_backward(batch(4))
    assert "cannot use put_: it may give other bits each time" in refused.value.message
    assert refused.value.remedy == 'use index_put_, or consistency = "batch"'


@pytest.mark.parametrize(("mode", "warn_only"), [(False, False), (True, True)])
def test_switching_it_off_is_noticed(me: Any, mode: bool, warn_only: bool) -> None:
    """The job's own code may not have its operations run all the same."""

    def switching(model: nn.Module, inputs: Tensor) -> Tensor:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        return step(model, inputs)

    _, group = make(me, switching)
    with pytest.raises(StateError, match="the job's own code has switched off"):
        group.forward_backward(batch(4))


def test_a_choice_of_kernels_by_their_speed_is_noticed(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel for a convolution may give other bits."""
    _, group = make(me)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with pytest.raises(StateError, match=r"has switched on torch\.backends\.cudnn\.benchmark"):
        group.forward_backward(batch(4))


class Momentum(Net):
    """A copy of a layer that follows it in the forward, as in MoCo and BYOL."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Move the copy, and return the outputs."""
        self.never.weight.data.mul_(0.9).add_(self.always.weight.data, alpha=0.1)
        return super().forward(inputs)


def test_a_parameter_that_the_forward_changes_is_refused(me: Any) -> None:
    """A rank would change it once for each of its shards: four times alone, twice beside another rank."""
    group = ExactStep(me, Momentum(), step, precision="fp32", on_nonfinite="stop", virtual_shards=4)
    with pytest.raises(StateError, match=r"the forward changes the parameter never\.weight"):
        group.forward_backward(batch(4))


class Turned(Net):
    """A parameter that a forward turns round, which no sum over its values shows."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = nn.Parameter(torch.arange(4.0), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn it, and return the outputs."""
        self.queue.copy_(self.queue.roll(1))
        return super().forward(inputs)


def test_a_parameter_whose_values_change_places_is_refused(me: Any) -> None:
    """As a queue of keys that is no buffer."""
    group = ExactStep(me, Turned(), step, precision="fp32", on_nonfinite="stop", virtual_shards=4)
    with pytest.raises(StateError, match="the forward changes the parameter queue"):
        group.forward_backward(batch(4))


def test_an_optimizer_that_moves_in_the_backward_is_refused(me: Any) -> None:
    """It would move once for each shard of a rank, by the gradients of that shard alone."""
    model, group = make(me)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.always.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())  # type: ignore[no-untyped-call]
    with pytest.raises(StateError, match=r"the backward changes the parameter always\.weight"):
        group.forward_backward(batch(4))


def test_a_forward_that_counts_nothing_is_followed_by_no_backward(me: Any) -> None:
    """What it left of a look says nothing about the weights after the optimizer's step."""
    counts = iter([0, 0, 1])
    model, group = make(me, lambda m, x: {"loss": step(m, x), "count": next(counts)}, shards=1)
    for _ in range(3):
        group.forward_backward(batch(1))
        with torch.no_grad():
            model.always.weight.add_(1)


def test_a_collective_in_the_forward_is_refused(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may run other numbers of shards, and exchange gradients meanwhile."""
    begun = itertools.count()
    monkeypatch.setattr(exact, "collectives_so_far", lambda: next(begun))
    _, group = make(me)
    with pytest.raises(StateError, match=r"the forward calls a collective of torch\.distributed"):
        group.forward_backward(batch(4))


def test_sync_batchnorm_is_refused(me: Any) -> None:
    """Which shards run at once depends on the world size."""
    with pytest.raises(StateError, match="cannot use SyncBatchNorm"):
        ExactStep(me, nn.SyncBatchNorm(2), step, precision="fp32", on_nonfinite="stop", virtual_shards=2)


def passed(parameters: list[nn.Parameter]) -> tuple[EarlyBuckets, list[list[Any]]]:
    """Return what hands on each parameter's gradient by itself, the last first; and what it handed on."""
    handed: list[list[Any]] = []
    order = [[place] for place in reversed(range(len(parameters)))]
    early = EarlyBuckets(
        parameters, order, lambda bucket: handed.append([g.item() for g in bucket if g is not None])
    )
    return early, handed


def backward(early: EarlyBuckets, loss: Tensor, *, is_last: bool = True) -> set[int]:
    """Run a backward and return what continued early."""
    early.begin(is_last=is_last)
    torch.autograd.backward(loss)
    return early.end()


def test_gradients_go_on_while_others_are_made() -> None:
    """From the second backward on, and only of a rank's last shard; one that is missing holds up those behind it."""
    first, second, third = parameters = [nn.Parameter(torch.tensor(2.0)) for _ in range(3)]
    early, handed = passed(parameters)
    assert backward(early, first * second * third) == set()
    assert backward(early, first * second * third, is_last=False) == set()
    for parameter in parameters:
        parameter.grad = None
    assert backward(early, first * third) == {2}
    assert handed == [[2.0]]
    assert [parameter.grad is None for parameter in parameters] == [False, True, True]


def test_gradients_that_come_piece_by_piece_are_not_handed_on() -> None:
    """A reentrant checkpoint runs a backward of its own: nobody knows when a gradient that is in both is whole."""
    weight = nn.Parameter(torch.tensor(2.0))
    early, handed = passed([weight])

    def loss() -> Tensor:
        inner: Tensor = checkpoint(
            lambda x: x * weight, torch.ones((), requires_grad=True), use_reentrant=True
        )
        return inner * weight

    assert backward(early, loss()) == set()
    assert backward(early, loss()) == set()
    assert weight.grad is not None
    assert weight.grad.item() == 8.0
    assert handed == []


def test_a_gradient_that_is_not_whole_after_all_is_refused() -> None:
    """What continued cannot be called back: better to stop than to train on half of it."""
    weight = nn.Parameter(torch.tensor(2.0))
    early, _ = passed([weight])
    backward(early, weight * 1.0)
    inner: Tensor = checkpoint(lambda x: x * weight, torch.ones((), requires_grad=True), use_reentrant=True)
    with pytest.raises(StateError, match="added to a gradient again"):
        backward(early, inner * weight)


def digests(groups: Callable[..., Any], world_size: int, *arguments: str) -> dict[str, str]:
    """Return the digest of each model's trajectory, equal on all ranks."""
    group = groups(f"{world_size}{'-'.join(arguments)}", "train_exact.py")
    assert group.run(world_size, *arguments).codes == [0] * world_size
    found: list[dict[str, str]] = json.loads((group.folder.path / "digests.json").read_text())
    assert found == [found[0]] * world_size
    return found[0]


@pytest.mark.e2e
@pytest.mark.parametrize("sizes", [(2, 3, 5), pytest.param((4, 6), marks=pytest.mark.nightly)])
def test_every_world_size_gives_the_same_bits(groups: Callable[..., Any], sizes: tuple[int, ...]) -> None:
    """MLP, CNN with BatchNorm, tied transformer in bf16: one digest of all steps for any number of workers of 8 shards."""
    alone = digests(groups, 1)
    for world_size in sizes:
        assert alone == digests(groups, world_size)
    assert alone == digests(groups, 2, "--processes", "1")


@pytest.mark.e2e
def test_drained_killed_and_resized_equals_one_worker_undisturbed(groups: Callable[..., Any]) -> None:
    """Two workers drained, three killed, five to the end: the bits of one worker that nobody disturbed."""
    arguments = ("--shards", "8", "--every", "3 steps", "--tail", "short")
    whole, parts = groups("whole"), groups("parts")
    assert whole.run(1, *arguments).codes == [0]
    assert parts.run(2, *arguments, "--term-at", "4").codes == [0, 0]
    assert parts.run(3, *arguments, "--kill-at", "9", ends=False).codes[0] == -9
    assert parts.run(5, *arguments, "--processes", "1").codes == [0] * 5
    expected, actual = whole.newest(), parts.newest()
    assert expected.state["position"] == actual.state["position"]
    assert expected.state["state"] == actual.state["state"]
    assert [k for k, t in expected.tensors.items() if not t.equal(actual.tensors[k])] == []


@pytest.mark.e2e
def test_plain_data_parallelism_does_not(groups: Callable[..., Any]) -> None:
    """What the fixed order is there for: DistributedDataParallel's weights depend on the world size."""
    alone, pair = digests(groups, 1, "--plain"), digests(groups, 2, "--plain")
    assert all(alone[name] != pair[name] for name in alone)


@pytest.mark.e2e
def test_an_operation_without_a_deterministic_form_is_refused_by_name(groups: Callable[..., Any]) -> None:
    """The error names the operation and what to do."""
    ended = groups("put", "train_exact.py").run(1, "--put")
    assert ended.codes != [0]
    assert "cannot use put_" in ended.errors[0]
