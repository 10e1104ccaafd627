"""How often the host waits for the device in a step: once, where the optimizer's step depends on what all ranks told.

More waits are those that a job asks for: a mean beside its own count, which the host must know before the backward; an
optimizer of a manual step, whose gradients must be finite; a GradScaler, whose `step` reads whether there was an overflow
(torch 2.13, `_maybe_opt_step` in torch/amp/grad_scaler.py). Run as a program, this module prints the table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elasticflow import hugging_face
from elasticflow.errors import NonFiniteLossError, StepResultError
from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.loop.ballot import Ballot
from elasticflow.runtime.loop.gradients import Gradients, LoopStep
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.process.step_log import LearningRates
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.runtime.training import model_buffers
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.training.manual_step import ManualStep
from tests.pretended_device import pretended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.pretended_device import Pretence

    Run = Callable[[Batch], float]

HERE = torch.device("cpu")
# Buckets of torch's Reducer are made beneath the dispatch to Python, so that its copies of gradients look like the host's.
REDUCER = "ddp._backward"


@pytest.fixture
def device() -> Iterator[Pretence]:
    """Return the pretended device."""
    with pretended() as pretence:
        yield pretence


def mean_loss(model: nn.Module, data: Any) -> Tensor:
    """Return the mean alone."""
    return cross_entropy(model(data[0]), data[1])


def counted_sum(model: nn.Module, data: Any) -> Any:
    """Return a sum and its count, both on the device."""
    return cross_entropy(model(data[0]), data[1], reduction="sum"), (data[1] != -100).sum()


def with_scalars(model: nn.Module, data: Any) -> Any:
    """Return a mean and scalars, all on the device."""
    loss = mean_loss(model, data)
    return {"loss": loss, "one": loss.detach(), "two": loss.detach() * 2}


def counted_mean(model: nn.Module, data: Any) -> Any:
    """Return a mean and its count, both on the device."""
    return {"loss": mean_loss(model, data), "count": (data[1] != -100).sum()}


def adversarial(model: nn.Module, data: Any, made: dict[str, Any]) -> Any:
    """Move two optimizers, as a GAN does."""
    loss = torch.zeros(())
    for optimizer in made.values():
        optimizer.zero_grad()
        loss = mean_loss(model, data)
        torch.autograd.backward(loss)
        optimizer.step()
    return {"loss": loss, "one": loss.detach()}


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        kind: Class of the step.
        training_step: The job's.
        before: Waits with one and with four micro-batches or shards, before copies were pinned and numbers read together; a
            manual step is called once.
        now: The same, now.
    """

    kind: Any
    training_step: Callable[..., Any]
    before: tuple[int, ...]
    now: tuple[int, ...]


TABLE = {
    "DDP, mean": Row(DDPStep, mean_loss, (2, 2), (1, 1)),
    "DDP, (sum, count)": Row(DDPStep, counted_sum, (3, 6), (1, 1)),
    "DDP, mean and scalars": Row(DDPStep, with_scalars, (2, 2), (1, 1)),
    "DDP, mean and count": Row(DDPStep, counted_mean, (3, 6), (2, 5)),
    "exact, mean": Row(ExactStep, mean_loss, (2, 5), (1, 1)),
    "exact, (sum, count)": Row(ExactStep, counted_sum, (3, 9), (1, 1)),
    "exact, mean and scalars": Row(ExactStep, with_scalars, (2, 5), (1, 1)),
    "exact, mean and count": Row(ExactStep, counted_mean, (3, 9), (2, 5)),
    "manual, two optimizers and a scalar": Row(ManualStep, adversarial, (6,), (3,)),
}


def batch(device: torch.device, number: int, pieces: int, *, empty: bool = False) -> Batch:
    """Return a batch of four samples a piece, on *device*; an empty one has no label that counts in its first piece."""
    torch.manual_seed(number)
    data = [(torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(pieces)]
    if empty:
        data[0][1].fill_(-100)
    end = Position(number, 4 * pieces * number, 0, 4 * pieces * number, False)
    moved = [((inputs.to(device), labels.to(device)), 4) for inputs, labels in data]
    return Batch(4 * pieces, end, list(range(pieces)), iter(moved))


def make(me: Any, device: torch.device, row: Row, pieces: int, **options: Any) -> tuple[nn.Module, Run]:
    """Return a model and its step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(device)
    me.device = device
    if row.kind is ManualStep:
        made = {name: torch.optim.SGD(model[at].parameters(), lr=0.1) for name, at in (("g", 0), ("d", 2))}
        return model, ManualStep(me, model, row.training_step, made, clip_grad_norm=1.0).run
    options = {"precision": "fp32", "on_nonfinite": "stop", **options}
    if row.kind is ExactStep:
        options["virtual_shards"] = pieces
    return model, row.kind(me, model, row.training_step, **options).forward_backward


@pytest.mark.parametrize(
    ("how", "pieces"), [(how, n) for how, row in TABLE.items() for n in (1, 4)[: len(row.now)]]
)
def test_waits_of_a_step(me: Any, device: Pretence, how: str, pieces: int) -> None:
    """As the table says, once a run knows the names of its scalars."""
    row = TABLE[how]
    _, run = make(me, device.device, row, pieces)
    for number in (6, 7, 8):
        given = batch(device.device, number, pieces)
        device.waits.clear()
        run(given)
    assert len(device.waits) == row.now[pieces > 1], device.waits


@pytest.mark.parametrize(
    ("how", "empty"),
    [(how, False) for how in TABLE] + [(how, True) for how in TABLE if "count" in how],
)
def test_loss_and_gradients_are_the_cpus(me: Any, device: Pretence, how: str, *, empty: bool) -> None:
    """Whatever is computed on the device instead of the host; also where a part has nothing that counts."""
    row = TABLE[how]
    pieces = 1 if row.kind is ManualStep else 3
    results = []
    for place in (HERE, device.device):
        model, run = make(me, place, row, pieces)
        losses = [run(batch(place, number, pieces, empty=empty)) for number in (6, 7)]
        gradients = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
        results.append((losses, dict(me.progress.noted["scalars"]), me.progress.noted["count"], gradients))
    (losses, scalars, count, gradients), there = results
    assert there[0] == pytest.approx(losses, rel=1e-6)
    assert there[1] == pytest.approx(scalars, rel=1e-6)
    assert there[2] == count
    for here, gradient in zip(gradients, there[3], strict=True):
        torch.testing.assert_close(torch.tensor(gradient), torch.tensor(here))


@pytest.mark.parametrize("kind", [DDPStep, ExactStep])
@pytest.mark.parametrize("count", [-3.0, math.nan, math.inf])
def test_count_that_cannot_be_is_refused_when_it_is_here(
    me: Any, device: Pretence, kind: Any, count: float
) -> None:
    """The error names the step; a negative count is not hidden by the counts of other parts."""

    def step(model: nn.Module, data: Any) -> Any:
        loss, right = counted_sum(model, data)
        return loss, right.float() * count if data[1][0] == first else right

    given = batch(device.device, 7, 4)
    pieces = list(given.micro_batches)
    first = pieces[1][0][1][0].item()
    _, run = make(me, device.device, Row(kind, step, (), ()), 4)
    with pytest.raises(StepResultError, match="a negative or infinite count of its loss in step 7"):
        run(given._replace(micro_batches=iter(pieces)))


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("how", ["DDP, mean", "DDP, (sum, count)", "DDP, mean and scalars"])
def test_waits_beside_those_of_distributed_data_parallel(
    me: Any, device: Pretence, how: str, pieces: int
) -> None:
    """Around torch's own module, here in a group of one, our code waits once."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        me.world_size = 2
        _, run = make(me, device.device, TABLE[how], pieces)
        for number in (6, 7, 8):
            given = batch(device.device, number, pieces)
            device.waits.clear()
            run(given)
        places = [wait.place for wait in device.waits if wait.place != REDUCER]
        assert places == ["host_copies.tolist"]
    finally:
        dist.destroy_process_group()


class Tagger(nn.Module):
    """A model with a loss of its own, as those of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": cross_entropy(self.inner(inputs), labels)}


def twice(model: nn.Module, data: Any) -> dict[str, Any]:
    """Wrap the step for models of transformers; count each label twice."""
    out = hugging_face.training_step(model, data)
    return {**out, "count": out["count"] * 2 + out["count"].new_zeros(())}


@pytest.mark.parametrize(("training_step", "times"), [(hugging_face.training_step, 1), (twice, 2)])
def test_models_of_transformers_count_in_tensors(
    me: Any, device: Pretence, training_step: Callable[..., Any], times: int
) -> None:
    """A step of the job's own may compute with the count, which is a tensor on any device; the host waits as for a mean and count."""
    model = Tagger().to(device.device)
    me.device = device.device
    pieces = [({"inputs": data[0], "labels": data[1]}, n) for data, n in batch(HERE, 6, 4).micro_batches]
    moved = [({key: value.to(device.device) for key, value in data.items()}, n) for data, n in pieces]
    step = DDPStep(me, model, training_step, precision="fp32", on_nonfinite="stop")
    given = batch(device.device, 6, 4)._replace(micro_batches=iter(moved))
    device.waits.clear()
    step.forward_backward(given)
    assert len(device.waits) == TABLE["DDP, mean and count"].now[1]
    assert me.progress.noted["count"] == 16 * times


def test_half_counts_and_sums_of_them(me: Any, device: Pretence) -> None:
    """A count in half precision is added up in single precision."""

    def step(model: nn.Module, data: Any) -> Any:
        return cross_entropy(model(data[0]), data[1], reduction="sum"), data[0].new_full((1,), 2048).half()

    _, run = make(me, device.device, Row(DDPStep, step, (), ()), 4)
    run(batch(device.device, 6, 4))
    assert me.progress.noted["count"] == 4 * 2048


def test_ranks_of_a_manual_step_meet_without_their_devices(
    me: Any, device: Pretence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with the same samples wait as often as one; a parameter that no rank uses has no gradient."""

    def add_up(tensor: Tensor) -> None:  # the other rank's are the same
        tensor.mul_(2)

    me.world_size, me.device = 2, device.device
    monkeypatch.setattr(dist, "all_reduce", add_up)
    monkeypatch.setattr(model_buffers, "send", lambda *_: None)
    model = nn.ModuleDict({"used": nn.Linear(8, 4), "unused": nn.Linear(8, 4)}).to(device.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, data: Any, made: Any) -> Any:
        loss = mean_loss(model["used"], data)
        torch.autograd.backward(loss)
        made.step()
        return loss

    run = ManualStep(me, model, step, optimizer).run
    given = batch(device.device, 6, 1)._replace(samples=8)
    device.waits.clear()
    run(given)
    assert [wait.reason for wait in device.waits] == ["an event"] * 2
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True]


def test_loss_that_is_not_finite_reaches_no_weight(me: Any, device: Pretence) -> None:
    """The error comes before the optimizer's step, and names the step."""
    model, run = make(me, device.device, TABLE["DDP, mean"], 1)
    with torch.no_grad():
        model.get_parameter("2.bias").fill_(math.nan)
    with pytest.raises(NonFiniteLossError, match="the loss of step 6 is nan"):
        run(batch(device.device, 6, 1))


def test_waits_with_a_gradient_scaler(me: Any, device: Pretence) -> None:
    """The step's own wait, and that of the scaler's `step`."""
    scaler = torch.amp.GradScaler("cpu")  # its scale lies where the loss does
    model, run = make(me, device.device, TABLE["DDP, mean"], 1, scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in (6, 7, 8):
        given = batch(device.device, number, 1)
        device.waits.clear()
        run(given)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert [wait.place.partition(".")[0] for wait in device.waits] == ["host_copies", "grad_scaler"]


def test_waits_of_a_loop_of_the_scripts_own(me: Any, device: Pretence) -> None:
    """Steps without `gradients` wait for nothing, and a meeting of many steps once; with `gradients` as DDP's step."""
    me.device = device.device
    ballot = Ballot(me)

    def steps() -> list[tuple[float, dict[str, float]]]:
        added = []
        loss = torch.zeros(1, device=device.device)
        for _ in range(8):
            ballot.note({"one": torch.ones((), device=device.device), "two": 2.0})
            added.append(ballot.add(loss, 4))
            loss += 1  # in place, before the ranks meet
        assert device.waits == []
        ballot.meet()
        return [(float(mean), dict(scalars)) for mean, scalars in added]

    for _ in range(2):  # the first meeting learns the scalars' names, too
        assert steps() == [(float(number), {"one": 1.0, "two": 2.0}) for number in range(8)]
        assert len(device.waits) == 1
        device.waits.clear()

    model = nn.Linear(8, 4).to(device.device)
    step = LoopStep(me, Gradients(), {"model": model})
    for number in (6, 7):
        given = batch(device.device, number, 1)
        device.waits.clear()
        step.forward_backward(lambda part: mean_loss(model, part.read), given)
    assert len(device.waits) == 1


def test_learning_rate_on_the_device_arrives_late(device: Pretence) -> None:
    """It is the rate that the optimizer used, though the schedule has changed it meanwhile."""
    rate = torch.full((), 0.5, device=device.device)
    optimizer = torch.optim.SGD(nn.Linear(2, 2).to(device.device).parameters(), lr=rate)
    rates = LearningRates()
    device.waits.clear()
    read = rates.read(optimizer)
    rate.fill_(0.25)
    assert device.waits == []
    assert rates.json(read) == "0.5"
    assert [wait.reason for wait in device.waits] == ["an event"]


if __name__ == "__main__":
    print("| step of one worker | waits with 1 (and 4) parts, before | now |\n|---|---|---|")
    for name, row in TABLE.items():
        print(f"| {name} |", " | ".join(", ".join(map(str, waits)) for waits in (row.before, row.now)), "|")
