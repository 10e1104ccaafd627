"""What `evaluation.metrics` may name."""

from __future__ import annotations

import math
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elasticflow.errors import MetricError
from elasticflow.metrics import bits, perplexity
from elasticflow.runtime.evaluation import metric as metrics
from elasticflow.runtime.evaluation.metric import Metric, OverSet, metric_of, number, of_loss

Pair = namedtuple("Pair", ["logits", "names"])  # noqa: PYI024  # a model may return one


class Total:
    """Adds up what it is given, `times` over."""

    def __init__(self, times: float = 1.0) -> None:
        self._sum, self._times = 0.0, times

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Take in a batch."""
        self._sum += float((outputs - targets).sum())

    def compute(self) -> float:
        """Return the sum."""
        return self._sum * self._times


def spread(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what no mean over batches gives."""
    return outputs.max() - targets.min()


def over(metric: Metric, *batches: tuple[Any, Any]) -> float:
    """Return a metric over batches of two samples each."""
    measure = OverSet("m", metric, 2 * len(batches))
    for outputs, targets in batches:
        measure.add(outputs, targets, 2)
    return measure.value()


BATCHES = (
    (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 5.0])),
    (torch.tensor([7.0, 3.0]), torch.tensor([-1.0, 1.0])),
)


def test_a_class_takes_in_batch_by_batch() -> None:
    """With its arguments; a class needs no word that it is over the set."""
    assert over(Metric(Total, {"times": 2.0}), *BATCHES) == 2 * (13.0 - 5.0)
    assert metric_of(Total).is_of_set
    assert not metric_of(spread).is_of_set


def test_a_function_over_the_set_has_all_samples_at_once() -> None:
    """Outputs are put one behind the other, whatever they are made of."""
    assert over(Metric(spread, over="set"), *BATCHES) == 7.0 + 1.0
    seen: list[Any] = []

    def look(outputs: Any, targets: Any) -> float:
        seen.extend([outputs, targets])
        return 0.0

    batch = {"logits": torch.ones(2, 3), "more": (torch.zeros(2),)}, Pair(torch.ones(2), ["a", "b"])
    over(Metric(look, over="set"), batch, batch)
    assert seen[0]["logits"].shape == (4, 3)
    assert seen[0]["more"][0].shape == (4,)
    assert (seen[1].logits.shape, seen[1].names) == ((4,), ["a", "b", "a", "b"])


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), "cannot be put one behind the other"),
        ((torch.ones(()), torch.ones(())), "one number for each batch"),
        ((object(), object()), "object of several batches"),
    ],
)
def test_outputs_that_do_not_fit_together_are_refused(outputs: tuple[Any, Any], words: str) -> None:
    """The remedy is a class, which needs them one batch at a time."""
    with pytest.raises(MetricError, match=words) as error:
        over(Metric(spread, over="set"), *((each, torch.ones(2)) for each in outputs))
    assert "update(outputs, targets)" in str(error.value.remedy)


def test_more_outputs_than_memory_are_refused_after_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an evaluation whose last batch ends the process."""
    monkeypatch.setattr(metrics, "available", lambda: 2_000_000)
    measure = OverSet("auc", Metric(spread, over="set"), 1000)
    measure.add(torch.ones(2, 10), torch.ones(2), 2)  # 88 bytes, 44 kB in all
    measure = OverSet("auc", Metric(spread, over="set"), 1000)
    with pytest.raises(MetricError, match=r"evaluation\.metrics\.auc .*all 1,000 samples"):
        measure.add(torch.ones(2, 1000), torch.ones(2), 2)


def test_the_part_that_is_meant() -> None:
    """A key, an attribute or a place; what is not there is named."""
    output = SimpleNamespace(logits=1.0)
    assert Metric(spread, outputs="logits", targets="labels").chosen(output, {"labels": 2.0}) == (1.0, 2.0)
    assert Metric(spread, targets=1).chosen(output, (3.0, 4.0)) == (output, 4.0)
    with pytest.raises(MetricError, match=r"names 'labels' as its targets, and these are \{label: "):
        Metric(spread, targets="labels").chosen(output, {"label": 2.0})
    with pytest.raises(MetricError, match="names 2 as its targets"):
        Metric(spread, targets=2).chosen(output, (3.0, 4.0))


@pytest.mark.parametrize("value", [torch.ones(3), {"f1": 1.0}, None, "0.5x"])
def test_what_is_no_number_is_refused(value: object) -> None:
    """Each entry is one number."""
    with pytest.raises(MetricError, match=r"evaluation\.metrics\.f1 gave"):
        number("f1", value)


def test_a_class_without_the_methods_is_refused() -> None:
    """Where reading its source could not tell, making it does."""
    with pytest.raises(MetricError, match="SimpleNamespace has no update and no compute"):
        OverSet("m", Metric(SimpleNamespace), 1)


def test_perplexity_follows_from_the_mean_loss() -> None:
    """It is no mean of perplexities; one that is too large for a float is infinite."""
    assert metric_of(perplexity).is_of_loss
    assert of_loss("p", metric_of(perplexity), 2.0) == math.exp(2.0)
    assert of_loss("p", metric_of(perplexity), 1e6) == math.inf
    assert of_loss("b", metric_of(bits), math.log(2)) == 1.0
    assert of_loss("own", Metric(math.sqrt, over="loss"), 4.0) == 2.0
