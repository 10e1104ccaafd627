"""Whether the loss of a batch is what its parts' losses are together."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss

from elasticflow import StopTraining
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.training import evaluation
from elasticflow.runtime.training.loss_weights import FirstLook, counts_of_labels, difference
from tests.runtime.positions import end_of

LABELS = torch.tensor([[1, 2, 0], [1, -100, -100], [2, -100, 1], [0, 0, -100], [2, 2, 2], [0, -100, -100]])
WORDS = torch.arange(18).reshape(6, 3) % 5


class Pair(NamedTuple):
    """A batch with names."""

    words: Tensor
    labels: Tensor


def model() -> nn.Module:
    """Return a small one in evaluation mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).eval()


def over_tokens(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over the tokens that count."""
    return cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def over_samples(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over the samples."""
    return mse_loss(model(batch[0]).mean((1, 2)), batch[1].float().mean(1))


def found(step: Any, batch: Any = (WORDS, LABELS), num_samples: int = 6) -> str | None:
    """Return the difference for a step."""
    with torch.no_grad():
        return difference(None, model(), step, batch, num_samples)


def test_a_mean_over_tokens_differs_and_one_over_samples_does_not() -> None:
    """The words give both numbers."""
    told = found(over_tokens)
    assert told is not None
    assert told.startswith("the loss of a batch is ")
    assert found(over_samples) is None


def counted(model: nn.Module, batch: Any) -> Any:
    """Return what counts for itself."""
    return over_tokens(model, batch), 3


def random(model: nn.Module, batch: Any) -> Tensor:
    """Return what differs from call to call."""
    return dropout(over_tokens(model, batch), 0.5) + torch.rand(())


def broken(model: nn.Module, batch: Any) -> Tensor:
    """Work on whole batches only."""
    assert len(batch[0]) == 6
    return over_tokens(model, batch)


def no_number(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over nothing."""
    return over_tokens(model, batch) * torch.nan


@pytest.mark.parametrize("step", [counted, random, broken, no_number])
def test_where_nothing_can_be_told_nothing_is_said(step: Any) -> None:
    """A step that counts, draws, fails on parts, or gives no number."""
    assert found(step) is None


def test_a_single_sample_has_no_parts() -> None:
    """Nor has a batch that nobody knows how to cut."""
    assert found(over_tokens, (WORDS[:1], LABELS[:1]), 1) is None
    assert found(over_tokens, (WORDS, LABELS, object())) is None
    assert found(over_tokens, (WORDS, LABELS, torch.zeros(5))) is None


def test_the_jobs_own_stop_is_its_right() -> None:
    """StopTraining is not swallowed."""

    def stops(model: nn.Module, batch: Any) -> Tensor:
        raise StopTraining("enough")

    with pytest.raises(StopTraining):
        found(stops)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((WORDS, LABELS), {3.0, 1.0, 2.0}),
        ({"input_ids": WORDS, "labels": LABELS}, {3.0, 1.0, 2.0}),
        ((WORDS, LABELS.clamp(min=0)), set()),
        ((LABELS, WORDS), set()),  # -100 in what goes in means something else
        ((WORDS, LABELS.float()), set()),
        ((WORDS, LABELS[:3]), set()),
        ({"labels": torch.tensor([1, -100, 2, 1, 1, 1])}, {1.0, 0.0}),
    ],
)
def test_labels_that_count_are_counted_by_sample(batch: Any, expected: set[float]) -> None:
    """Where some are -100: torch's losses leave those out of their mean."""
    assert expected == counts_of_labels(batch, 6)


def test_the_first_step_tells_once_what_nobody_reads_or_weighs(me: Any) -> None:
    """Keys of a dict; labels that are ignored in different numbers, also where each micro-batch is one sample."""
    look = FirstLook(me)
    loss = {"loss": torch.tensor(1.0), "logits": torch.ones(2), "accuracy": 1, "auxiliary": None}
    for n in range(3):
        look(loss, (WORDS[n : n + 1], LABELS[n : n + 1]), 1)
    assert [{"event": "loss.unused", "keys": ["logits"]}] == me.events[:1]
    assert ["loss.unweighed"] == [each["event"] for each in me.events[1:]]
    me.events.clear()
    FirstLook(me)(loss | {"count": 3}, (WORDS, LABELS), 6)
    FirstLook(me)((loss["loss"], 3), (WORDS, LABELS), 6)
    assert ["loss.unused"] == [each["event"] for each in me.events]


def test_the_first_evaluation_tells_once_in_a_run(me: Any) -> None:
    """Before its first batch; not in later ones, nor in a run that resumes from a snapshot."""
    data = list(zip(WORDS, LABELS, strict=True))

    def evaluated(state: dict[str, Any] | None = None) -> evaluation.Evaluations:
        schedule = IndexSchedule(6, 6, epochs=2)
        made = evaluation.Evaluation(
            me, model(), over_tokens, data, schedule, batch_size=4, uses_loss=False
        ).alone()
        if state is not None:
            made.load_state_dict(state)
        made.run(end_of(schedule))
        return made

    before = evaluated()
    before.run(end_of(IndexSchedule(6, 6, epochs=2)))
    (told,) = [each for each in me.events if each["event"] == "loss.unweighed"]
    assert "model.loss_count" in told["help"]
    me.events.clear()
    me.logged_once.clear()
    evaluated(before.state_dict())
    assert ["evaluation"] == [each["event"] for each in me.events]
