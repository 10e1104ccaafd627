"""What a training step may return."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elasticflow.errors import StepResultError
from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.training.loss import parse_loss, with_count
from tests.runtime.positions import end_of

LOSS = torch.tensor(2.0, requires_grad=True)
SCHEDULE = IndexSchedule(6, 6, epochs=1)
LABELS = torch.tensor([[1, 2, 0], [1, -100, -100], [-100] * 3, [-100] * 3, [2, 2, -100], [0, -100, -100]])
WORDS = torch.arange(18).reshape(6, 3) % 5


@pytest.mark.parametrize(
    ("result", "value", "num_items"),
    [
        (LOSS, 2.0, None),
        ((LOSS, 4), 2.0, 4.0),
        ((LOSS, torch.tensor(4)), 2.0, 4.0),
        ({"loss": LOSS}, 2.0, None),
        ({"loss": LOSS, "accuracy": 0.5}, 2.0, None),
        ({"loss": LOSS, "count": 4}, 8.0, 4.0),
        ({"loss": LOSS, "count": torch.tensor([0.25])}, 0.5, 0.25),
        ({"loss": LOSS * math.nan, "count": 0}, None, 0.0),
        ({"loss": LOSS.half() * 1000, "count": 1000}, 2e6, 1000.0),
    ],
)
def test_each_form_is_a_mean_over_samples_or_a_sum_over_items(
    result: Any, value: float | None, num_items: float | None
) -> None:
    """A dict's mean becomes a sum over its count; a mean over nothing counts for nothing."""
    found = parse_loss(result)
    assert (value, num_items) == (None if found.value is None else found.value.item(), found.num_items)


@pytest.mark.parametrize(
    ("result", "told", "help_"),
    [
        ((LOSS, torch.rand(4, 10)), "(float32 (), float32 (4, 10))", "return the loss alone, item 0"),
        ((torch.rand(4, 10), LOSS), "(float32 (4, 10), float32 ())", "return the loss alone, item 1"),
        ((LOSS, torch.rand(4, 10), [1]), "(float32 (), float32 (4, 10), list of 1", "item 0"),
        ((), "()", "a step returns the loss"),
        (torch.rand(8), "float32 (8,) as its loss", "return its mean()"),
        ({"loss": torch.rand(8), "count": 8}, "float32 (8,) as its loss", "return its mean()"),
        (1.5, "a float", "without float() or item()"),
        ({"loss": 1.5}, "a dict whose `loss` is a float", "without float() or item()"),
        ({"nll": LOSS}, "a dict without `loss` (its keys are nll)", "a step returns the loss"),
        (None, "a NoneType", "a step returns the loss"),
        ({"loss": LOSS, "count": -1}, "-1.0 as the count of its loss", "from 0 on"),
        ((LOSS, math.nan), "nan as the count of its loss", "from 0 on"),
        ({"loss": LOSS, "count": torch.ones(3)}, "float32 (3,) as the count of its loss", "one number"),
    ],
)
def test_anything_else_is_refused_with_what_is_supported(result: Any, told: str, help_: str) -> None:
    """The error says what was returned and how to write it."""
    with pytest.raises(StepResultError) as refused:
        parse_loss(result)
    assert refused.value.message.startswith(f"the training step returned {told}")
    assert help_ in (refused.value.remedy or "")
    assert "(loss_sum, count)" in (refused.value.remedy or "")
    assert refused.value.failure_class == "user_error"


def test_a_job_counts_what_its_step_does_not() -> None:
    """model.loss_count stands beside a mean or a dict without a count; a step that counts too is refused."""
    assert with_count(LOSS, 4) == {"loss": LOSS, "count": 4}
    assert with_count({"loss": LOSS, "accuracy": 1}, 4) == {"loss": LOSS, "accuracy": 1, "count": 4}
    for counted in ((LOSS, 4), {"loss": LOSS, "count": 4}):
        with pytest.raises(StepResultError, match="counts too"):
            with_count(counted, 4)
    with pytest.raises(StepResultError, match="returned a str"):
        with_count("loss", 4)


def pieces(*sizes: int) -> Batch:
    """Return the padded words cut into micro-batches of these sizes."""
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    data = [
        ((WORDS[end - size : end], LABELS[end - size : end]), size)
        for end, size in zip(ends, sizes, strict=True)
    ]
    return Batch(sum(sizes), end_of(SCHEDULE), list(range(len(sizes))), iter(data))


def step_of(form: str, weights: Tensor | None) -> Any:
    """Return a step that computes the mean over the words that count."""

    def counts(labels: Tensor) -> Tensor:
        kept = labels[labels != -100]
        return torch.tensor(float(len(kept))) if weights is None else weights[kept].sum()

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        outputs, labels = model(batch[0]).flatten(0, 1), batch[1].flatten()
        if form == "sum":
            return cross_entropy(outputs, labels, weight=weights, reduction="sum"), counts(labels)
        return {"loss": cross_entropy(outputs, labels, weight=weights), "count": counts(labels)}

    return step


@pytest.mark.parametrize("mode", ["batch", "exact"])
@pytest.mark.parametrize("form", ["sum", "dict"])
@pytest.mark.parametrize("weights", [None, torch.tensor([0.01, 0.02, 0.03])])
def test_padded_words_weigh_the_same_however_a_batch_is_cut(
    me: Any, mode: str, form: str, weights: Tensor | None
) -> None:
    """Loss and gradients are the whole batch's, also where a share holds padding alone, and with weights below one."""

    def made(*sizes: int) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
        options: Any = {"precision": "fp32", "on_nonfinite": "stop"}
        step = step_of(form, weights)
        group: Any
        if mode == "batch":
            group = DDPStep(me, model, step, ddp={}, **options)
        else:
            group = ExactStep(me, model, step, virtual_shards=len(sizes), **options)
        loss = group.forward_backward(pieces(*sizes))
        gradient = model.get_parameter("1.weight").grad
        assert gradient is not None
        return loss, gradient

    was = torch.are_deterministic_algorithms_enabled()
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
        expected = cross_entropy(model(WORDS).flatten(0, 1), LABELS.flatten(), weight=weights)
        expected.backward()  # type: ignore[no-untyped-call]
        for sizes in ((6,), (2, 2, 2), (1, 1, 1, 1, 1, 1), (4, 2)):
            loss, gradient = made(*sizes)
            assert loss == pytest.approx(expected.item(), rel=1e-6)
            torch.testing.assert_close(gradient, model.get_parameter("1.weight").grad)
    finally:
        torch.use_deterministic_algorithms(was)


def test_counts_that_travelled_as_means_are_whole_again() -> None:
    """A count of 100 tokens of three ranks is 100, and a sum of weights stays a fraction."""
    from elasticflow.runtime.training.ddp import _rounded_count

    third = torch.tensor(100.0) / 3
    assert _rounded_count(float(third) * 3) == 100
    assert _rounded_count(0.3) == 0.3
    assert SimpleNamespace(count=_rounded_count(20_000_000.5)).count == 20_000_000
