"""Gradients of the global batch, in one process."""

from __future__ import annotations

import importlib
import linecache
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from elasticflow import StopTraining
from elasticflow.errors import NonFiniteLossError, StateError, StepResultError
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.training import ddp
from elasticflow.runtime.training import evaluation as evaluate
from elasticflow.runtime.training.ddp import DDPStep
from tests.runtime.positions import end_of

if TYPE_CHECKING:
    from pathlib import Path

SCHEDULE = IndexSchedule(10, 10, epochs=1)


def batch(*sizes: int) -> Batch:
    """Return a batch cut into micro-batches of these sizes."""
    inputs = torch.arange(10.0).reshape(10, 1)
    pieces, begin = [], 0
    for size in sizes:
        pieces.append((inputs[begin : begin + size], size))
        begin += size
    return Batch(begin, end_of(SCHEDULE), list(range(len(pieces))), iter(pieces))


def mean_step(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the mean loss."""
    return mse_loss(model(inputs), 3 * inputs)


def make(me: Any, step: Any = mean_step, **options: Any) -> tuple[nn.Linear, DDPStep]:
    """Return a model and its only replica."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    chosen = {"precision": "fp32", "on_nonfinite": "stop", "ddp": {}, **options}
    return model, DDPStep(me, model, step, **chosen)


def expected() -> tuple[float, Tensor]:
    """Return loss and gradient of the whole batch at once."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    loss = mean_step(model, torch.arange(10.0).reshape(10, 1))
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    return loss.item(), model.weight.grad


@pytest.mark.parametrize("sizes", [(10,), (5, 5), (7, 2, 1)])
@pytest.mark.parametrize("form", ["mean", "sum", "mapping"])
def test_micro_batches_weigh_what_they_hold(me: Any, sizes: tuple[int, ...], form: str) -> None:
    """Loss and gradient do not depend on how the batch is cut, in each form a step may return."""

    def step(model: nn.Module, inputs: Tensor) -> Any:
        loss = mean_step(model, inputs)
        return {"mean": loss, "sum": (loss * len(inputs), len(inputs)), "mapping": {"loss": loss}}[form]

    model, group = make(me, step)
    loss = group.forward_backward(batch(*sizes))
    expected_loss, expected_gradient = expected()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(model.weight.grad, expected_gradient)


@pytest.mark.parametrize("sizes", [(10,), (5, 5), (7, 2, 1)])
@pytest.mark.parametrize("counts", [False, True])
def test_scalars_are_means_over_what_the_loss_is(me: Any, sizes: tuple[int, ...], *, counts: bool) -> None:
    """Weighted by samples or by the step's own count, in the first step and in those that know their names."""

    def step(model: nn.Module, inputs: Tensor) -> Any:
        count = {"count": inputs.sum() + 1} if counts else {}
        return {"loss": mean_step(model, inputs), "largest": inputs.max(), "one": 1, **count}

    _, group = make(me, step)
    pieces = torch.split(torch.arange(10.0), list(sizes))
    weights = [float(piece.sum() + 1) if counts else float(len(piece)) for piece in pieces]
    expected = sum(float(piece.max()) * w for piece, w in zip(pieces, weights, strict=True)) / sum(weights)
    for _ in range(3):
        group.forward_backward(batch(*sizes))
        assert me.progress.noted["scalars"] == pytest.approx({"largest": expected, "one": 1.0})
        assert me.progress.noted["count"] == (sum(weights) if counts else 0)


def test_a_rank_without_samples_takes_part(me: Any) -> None:
    """Its gradients are noughts, even where a weight is not finite."""
    model, group = make(me)
    with torch.no_grad():
        model.bias.fill_(math.inf)
    assert group.forward_backward(batch()) == 0.0
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.0]]


@pytest.mark.usefixtures("alone")
def test_a_wrapped_model_is_never_called_without_inputs() -> None:
    """Neither its forward nor hooks that read the inputs, though its buckets are settled by two backwards."""
    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    replicas = ddp.wrap(model, torch.device("cpu"))
    assert replicas.module is model
    assert model.weight.grad is None
    replicas(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad is not None


@pytest.mark.usefixtures("alone")
def test_layers_with_sparse_gradients_are_wrapped() -> None:
    """DistributedDataParallel expects sparse gradients of them in the two empty backwards, too."""
    model = nn.Sequential(nn.EmbeddingBag(5, 2, sparse=True), nn.Linear(2, 1))
    replicas = ddp.wrap(model, torch.device("cpu"))
    replicas(torch.ones(1, 2, dtype=torch.int64)).sum().backward()
    gradient = model[0].weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.is_sparse
    assert gradient.to_dense()[:, 0].nonzero().tolist() == [[1]]


class OneOfTwo(nn.Module):
    """Two layers, one of which no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.used(inputs)
        return outputs


@pytest.mark.usefixtures("alone")
def test_no_backward_comes_before_the_first_step_where_torch_keeps_its_buckets() -> None:
    """Of one before it torch would warn that `find_unused_parameters` found none."""
    replicas = ddp.wrap(OneOfTwo(), torch.device("cpu"), find_unused_parameters=True)
    facts = replicas._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    assert facts.get("iteration", 0) == 0
    for _ in range(3):
        assert not replicas.reducer._rebuild_buckets()
        replicas(torch.ones(1, 1)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_a_static_graph_is_that_of_the_first_step(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of backwards before it torch would learn that all parameters are used, and wait in vain to exchange gradients."""
    exchanged: list[int] = []

    class Watched(DistributedDataParallel):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # Torch refuses annotations that are texts, and a lambda has none.
            self.register_comm_hook(None, lambda _, bucket: exchange(bucket))

    def exchange(bucket: Any) -> torch.futures.Future[Tensor]:
        exchanged.append(len(bucket.parameters()))
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    monkeypatch.setattr(ddp, "DistributedDataParallel", Watched)
    me.world_size = 2
    options: dict[str, Any] = {"precision": "fp32", "on_nonfinite": "stop", "ddp": {"static_graph": True}}
    group = DDPStep(me, OneOfTwo(), mean_step, **options)
    for _ in range(3):
        exchanged.clear()
        group.forward_backward(batch(10))
        assert exchanged


def test_loss_that_is_not_finite_stops(me: Any) -> None:
    """The error names step and loss."""
    model, group = make(me)
    with torch.no_grad():
        model.bias.fill_(math.nan)
    with pytest.raises(NonFiniteLossError) as stopped:
        group.forward_backward(batch(10))
    assert stopped.value.message == "the loss of step 1 is nan"
    assert stopped.value.failure_class == "nonfinite"


def test_loss_that_is_not_finite_can_be_skipped(me: Any) -> None:
    """The step leaves no gradient, so the weights stay as they are; the log says so."""
    model, group = make(me, on_nonfinite="skip")
    with torch.no_grad():
        model.bias.fill_(math.inf)
    assert group.forward_backward(batch(10)) == math.inf
    assert model.weight.grad is None
    assert group.was_skipped
    assert me.events == [{"event": "loss.skipped", "level": "warning", "step": 1, "loss": "inf"}]


def test_skipping_under_a_scaler(me: Any) -> None:
    """With fp16's scaler the optimizer itself leaves the step out."""
    scaler = torch.amp.GradScaler("cpu")
    model, group = make(me, on_nonfinite="skip", scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with torch.no_grad():
        model.bias.fill_(math.inf)
    before = model.weight.detach().clone()
    group.forward_backward(batch(10))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)


def test_step_of_another_kind_is_refused(me: Any) -> None:
    """A step that returns something else is told what it may return."""
    _, group = make(me, lambda *_: "0.5")
    with pytest.raises(StepResultError, match="the training step returned a str"):
        group.forward_backward(batch(10))


def test_synchronised_batchnorm_needs_cuda(me: Any) -> None:
    """It is refused by name before the first step, at any world size, with what to do."""
    with pytest.raises(
        StateError, match=r"ddp\.sync_batchnorm needs CUDA: torch has no SyncBatchNorm for cpu"
    ):
        make(me, ddp={"sync_batchnorm": True})


def test_stop_within_a_step_leaves_it_out(me: Any) -> None:
    """From the micro-batch that raises it on, nothing is read or run; the reason is known after the step."""
    seen: list[int] = []

    def step(model: nn.Module, inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        if len(seen) == 2:
            raise StopTraining("good enough")
        return mean_step(model, inputs)

    _, group = make(me, step)
    whole = batch(5, 2, 1, 2)
    assert math.isnan(group.forward_backward(whole))
    assert seen == [5, 2]
    assert me.stopped == ("good enough", 0)
    assert len(list(whole.micro_batches)) == 2


class Counting(nn.Module):
    """A model whose buffers change in place, and by new tensors, in each forward."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.line = nn.BatchNorm1d(1), nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("nothing", None)

    def forward(self, inputs: Tensor) -> Tensor:
        """Count the forwards."""
        self.seen = self.seen + 1
        outputs: Tensor = self.line(self.norm(inputs))
        return outputs


@pytest.mark.parametrize("ends", ["stop", "skip"])
def test_step_that_does_not_count_changes_no_buffer(me: Any, ends: str) -> None:
    """Neither a step that some rank wants out of, nor one whose loss is not finite: a snapshot or an evaluation may follow."""
    calls: list[int] = []

    def step(model: nn.Module, inputs: Tensor) -> Tensor:
        calls.append(1)
        if ends == "stop" and len(calls) == 4:
            raise StopTraining("enough")
        is_last = len(calls) > 2
        return mean_step(model, inputs * math.inf if is_last and ends == "skip" else inputs)

    model = Counting()
    group = DDPStep(me, model, step, precision="fp32", on_nonfinite="skip", ddp={})
    group.forward_backward(batch(5, 5))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert before["seen"] == 2
    group.forward_backward(batch(5, 5))
    assert (me.stopped is not None, group.was_skipped) == (ends == "stop", ends == "skip")
    assert [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])] == []


def test_evaluation_that_stops_measures_nothing(me: Any) -> None:
    """A metric that raises StopTraining ends training; half a measurement is never the best one."""

    def metric(*_: Any) -> float:
        raise StopTraining("good enough")

    evaluation = evaluate.Evaluation(
        me,
        nn.Linear(1, 1),
        loss_step,
        Pairs(),
        SCHEDULE,
        batch_size=4,
        best="min loss",
        metrics={"m": metric},
    ).alone()
    assert evaluation.run(end_of(SCHEDULE)) == {}
    assert (me.stopped, evaluation.ranking.best, me.events) == (("good enough", 0), None, [])


def test_vote_is_settled_with_the_step(me: Any) -> None:
    """A drain wanted during a step is agreed on at its end."""

    def step(model: nn.Module, inputs: Tensor) -> Tensor:
        me.vote.leave_wanted = True
        return mean_step(model, inputs)

    _, group = make(me, step)
    group.forward_backward(batch(5, 5))
    assert (me.vote.leave, me.vote.snapshot) == (True, False)


def test_reported_loss_is_not_rounded_by_autocast(me: Any) -> None:
    """What travels on the ballot keeps its 24 bits under bf16."""
    _, group = make(
        me, lambda model, inputs: model(inputs).float().mean() * 0 + 0.123456789, precision="bf16"
    )
    assert group.forward_backward(batch(10)) == pytest.approx(0.123456789, rel=1e-7)


def test_dropout_depends_on_the_step_alone(me: Any) -> None:
    """The state of the generators before a step does not matter."""
    losses = []
    for seed in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
        group = DDPStep(me, model, mean_step, precision="fp32", on_nonfinite="stop", ddp={})
        torch.manual_seed(seed)
        losses.append(group.forward_backward(batch(5, 5)))
    assert losses[0] == losses[1]


class Pairs:
    """Inputs and targets."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([3.0 * index])


def loss_step(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss."""
    return mse_loss(model(pair[0]), pair[1])


def test_evaluation_weighs_batches_by_their_samples(me: Any) -> None:
    """The metrics are means over all samples, whatever the batch size; the best one is remembered."""
    model, _ = make(me)
    whole = evaluate.Evaluation(me, model, loss_step, Pairs(), SCHEDULE, batch_size=10).alone()
    parts = evaluate.Evaluation(
        me, model, loss_step, Pairs(), SCHEDULE, batch_size=4, best="min error",
        metrics={"error": lambda outputs, targets: (outputs - targets).abs().mean()},
    ).alone()  # fmt: skip
    found = parts.run(end_of(SCHEDULE))
    assert found["loss"] == pytest.approx(whole.run(end_of(SCHEDULE))["loss"])
    assert parts.ranking.metric_at(end_of(SCHEDULE)) == found["error"] == parts.ranking.best
    assert parts.ranking.metric_at(SCHEDULE.start) is None
    assert model.training


def test_evaluated_loss_is_a_mean_over_what_the_step_counts(me: Any) -> None:
    """Losses over tokens weigh as in training: a batch without any weighs nothing."""

    def step(model: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        counted = pair[0] >= 5
        return (pair[1] * counted).sum(), counted.sum()

    evaluation = evaluate.Evaluation(
        me, nn.Linear(1, 1), step, Pairs(), SCHEDULE, batch_size=4, uses_loss=False
    ).alone()
    assert evaluation.run(end_of(SCHEDULE)) == {"loss": 3 * (5 + 6 + 7 + 8 + 9) / 5}


def test_best_is_a_number_where_there_is_one(me: Any) -> None:
    """A metric that is once not a number is neither better nor worse than any other."""
    values = iter([math.nan, 3.0, math.nan, 2.0])
    evaluation = evaluate.Evaluation(
        me,
        nn.Linear(1, 1),
        loss_step,
        Pairs(),
        SCHEDULE,
        batch_size=10,
        best="max m",
        metrics={"m": lambda *_: next(values)},
    ).alone()
    bests = []
    for _ in range(4):
        evaluation.run(end_of(SCHEDULE))
        bests.append(evaluation.ranking.best)
    assert bests[1:] == [3.0, 3.0, 3.0]


def test_evaluation_is_due_by_epochs_and_at_the_end(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resume, what was due before is not done again."""
    schedule = IndexSchedule(10, 4, epochs=3)
    evaluation = evaluate.Evaluation(
        me, nn.Linear(1, 1), loss_step, Pairs(), schedule, every=("2 epochs",)
    ).alone()
    position = schedule.start
    due: list[int] = []
    monkeypatch.setattr(evaluation, "run", lambda position, _: due.append(position.step))
    while not schedule.is_end(position):
        position = schedule.batch(position)[2]
        evaluation.after_step(position)
    assert due == [5, 8]


def test_best_value_is_that_of_one_source(me: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric whose code was changed measures something else; a comment, or what stands beside it, does not count."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "measured_here.py"
    kept: list[float | None] = []
    made: evaluate.Evaluations | None = None
    for text in (
        "def m(outputs, targets):\n    return 2.0\n",
        "BESIDE = 1\n\ndef m(outputs,  targets):\n    # as before\n    return 2.0\n",
        "def m(outputs, targets):\n    return 2.0 + 0.0\n",
    ):
        file.write_text(text)
        linecache.clearcache()
        monkeypatch.delitem(sys.modules, "measured_here", raising=False)
        importlib.invalidate_caches()
        module = importlib.import_module("measured_here")
        given: dict[str, Any] = {"metrics": {"m": module.m}, "best": "max m", "best_of": "measured_here:m"}
        before, made = (
            made,
            evaluate.Evaluation(me, nn.Linear(1, 1), loss_step, Pairs(), SCHEDULE, **given).alone(),
        )
        if before is not None:
            made.load_state_dict(before.state_dict())
            kept.append(made.ranking.metric_at(end_of(SCHEDULE)))
        made.run(end_of(SCHEDULE))
    assert kept == [2.0, None]
    assert made is not None
    assert made.ranking.measure is not None
    assert made.ranking.measure.startswith("max m by measured_here:m (source ")


@pytest.mark.parametrize(
    ("best", "best_of", "data", "is_kept"),
    [
        ("max m", "metrics:m", "d1", True),
        ("min m", "metrics:m", "d1", False),
        ("max m", "metrics:other", "d1", False),
        ("max m", "metrics:m", "d2", False),
        (None, None, "d1", False),
    ],
)
def test_best_value_is_that_of_one_evaluation(
    me: Any, best: str | None, best_of: str | None, data: str, is_kept: bool
) -> None:
    """Another metric, direction or other data: the value cannot be compared, is looked for anew, and that is told."""

    def make_evaluation(best: str | None, best_of: str | None, data: str) -> evaluate.Evaluations:
        given: dict[str, Any] = {"metrics": {"m": lambda *_: 2.0}, "best": best, "best_of": best_of}
        return evaluate.Evaluation(
            me, nn.Linear(1, 1), loss_step, OpenedDataset(Pairs(), data), SCHEDULE, **given
        ).alone()

    first = make_evaluation("max m", "metrics:m", "d1")
    first.run(end_of(SCHEDULE))
    state = first.state_dict()
    me.events.clear()
    second = make_evaluation(best, best_of, data)
    second.load_state_dict(state)
    assert (2.0 if is_kept else None) == second.ranking.best == second.ranking.metric_at(end_of(SCHEDULE))
    told = [each["measured_by"] for each in me.events if each["event"] == "best.reset"]
    expected = [{"ranked_by": "max m by metrics:m", "source": None, "data": "d1", "weights": "raw"}]
    assert told == ([] if is_kept or best is None else expected)

    (state,) = state["sets"].values()
    del state["ranked_by"]  # an older snapshot, which says the data's identity in its manifest only
    state["data"] = data
    third = make_evaluation("max m", "metrics:m", data)
    third.load_state_dict(state)
    assert 2.0 == third.ranking.best
