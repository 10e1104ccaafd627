"""Whose metrics an evaluation measures: the average's where one is kept, as it would be exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticflow.errors import MetricError
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.training.evaluation import Evaluation, Evaluations
from tests.runtime.positions import end_of

SCHEDULE = IndexSchedule(10, 4, epochs=2)


class Pairs:
    """Inputs and targets."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index)]), torch.tensor([3.0 * index])


def loss_step(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss."""
    return mse_loss(model(pair[0]), pair[1])


def trained() -> tuple[nn.Module, AveragedModel]:
    """Return a model with BatchNorm that has moved on since its average began, and the average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    for number in range(3):
        model(torch.randn(8, 1) + number)  # BatchNorm's statistics move
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        average.update_parameters(model)
    return model, average


def by_hand(state: dict[str, Any]) -> float:
    """Return the loss over the whole set of a model with this state, in one batch."""
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
    model.load_state_dict(state)
    inputs, targets = map(torch.stack, zip(*(Pairs()[i] for i in range(10)), strict=True))
    with torch.no_grad():
        return float(mse_loss(model.eval()(inputs), targets))


def evaluation(
    me: Any, model: nn.Module, average: AveragedModel | None = None, **options: Any
) -> Evaluations:
    """Return one that goes by the least loss."""
    return Evaluation(
        me,
        model,
        loss_step,
        Pairs(),
        SCHEDULE,
        batch_size=4,
        best="min loss",
        average=average,
        **options,
    ).alone()


def test_what_is_measured_is_the_average_as_it_would_be_exported(me: Any) -> None:
    """Its parameters and its buffers; `best` goes by it, and the line says whose it is."""
    model, average = trained()
    exported = {k.removeprefix("module."): v for k, v in average.state_dict().items() if k != "n_averaged"}
    measured = evaluation(me, model, average)
    found = measured.run(end_of(SCHEDULE))
    assert found["loss"] == pytest.approx(by_hand(exported))
    assert found["loss"] != pytest.approx(by_hand(model.state_dict()))
    (line,) = me.events
    assert (line["weights"], line["eval"], line["best"], measured.ranking.best) == (
        "ema",
        found,
        found["loss"],
        found["loss"],
    )
    assert "eval_raw" not in line
    assert line["seconds"] > 0
    assert average.module.training


def test_both_are_measured_on_request_and_best_goes_by_the_average(me: Any) -> None:
    """The weights that are trained stand beside it, under a name of their own."""
    model, average = trained()
    measured = evaluation(me, model, average, also_raw=True)
    found = measured.run(end_of(SCHEDULE))
    (line,) = me.events
    assert line["eval_raw"]["loss"] == pytest.approx(by_hand(model.state_dict()))
    assert (line["eval"], line["weights"], measured.ranking.best) == (found, "ema", found["loss"])
    assert model.training


def test_each_module_is_in_the_mode_that_it_had(me: Any) -> None:
    """A BatchNorm that is frozen by its mode stays so, in a model that trains."""
    model, average = trained()
    model[0].eval()  # type: ignore[index]
    evaluation(me, model, average, also_raw=True).run(end_of(SCHEDULE))
    assert [module.training for module in model.modules()] == [True, False, True]
    assert all(module.training for module in average.modules())


def test_without_an_average_the_weights_are_called_raw(me: Any) -> None:
    """An evaluation line always says whose metrics it holds."""
    model, _ = trained()
    evaluation(me, model).run(end_of(SCHEDULE))
    assert me.events[0]["weights"] == "raw"


@pytest.mark.parametrize("says", [True, False], ids=["said", "older"])
def test_a_best_value_of_other_weights_does_not_count(me: Any, *, says: bool) -> None:
    """The raw weights' best is no measure of the average's, also where an older snapshot does not say whose it is."""
    model, average = trained()
    raw = evaluation(me, model)
    raw.run(end_of(SCHEDULE))
    (of_set,) = raw.state_dict()["sets"].values()
    state = raw.state_dict() if says else {k: v for k, v in of_set.items() if k != "weights"}
    raw.load_state_dict(state)
    assert raw.ranking.best is not None
    averaged = evaluation(me, model, average)
    averaged.load_state_dict(state)
    assert (averaged.ranking.best, averaged.ranking.metric_at(end_of(SCHEDULE))) == (None, None)


def test_an_evaluation_line_counts_epochs_as_step_lines_do(me: Any) -> None:
    """Of a step that ends a pass it is that pass; else the one that continues."""
    model, _ = trained()
    measuring, position = evaluation(me, model), SCHEDULE.start
    for _ in range(4):
        position = SCHEDULE.batch(position)[2]
        measuring.run(position)
    assert [(line["epoch"], line["in_epoch"]) for line in me.events] == [(0, 1), (0, 1), (1, 1), (1, 2)]


class Detector(nn.Module):
    """Returns losses where it trains, and detections, another number for each image, where it is evaluated."""

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Any:
        """Return a dict of losses, or a list of boxes."""
        if self.training:
            assert targets is not None
            return {"loss": (images - targets).square().mean()}
        return [torch.full((1 + int(each) % 3,), float(each)) for each in images[:, 0]]


class Found:
    """A metric over the whole set: the detections that are right, among those that were found."""

    def __init__(self) -> None:
        self.right = self.found = 0

    def update(self, outputs: list[Tensor], targets: Tensor) -> None:
        """Take in a batch."""
        for boxes, target in zip(outputs, targets, strict=True):
            self.right += int((boxes * 3 == target).sum())
            self.found += len(boxes)

    def compute(self) -> float:
        """Return the share."""
        return self.right / self.found


def detection_step(model: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
    """Return what was detected, and the targets."""
    return model(pair[0]), pair[1]


def test_a_step_of_the_evaluations_own(me: Any) -> None:
    """A model whose outputs differ in evaluation mode: all metrics get what the step returns, and no loss is measured."""
    metrics: dict[str, Any] = {
        "precision": Found,
        "boxes": lambda outputs, _: sum(map(len, outputs)) / len(outputs),
    }
    measured = Evaluation(
        me,
        Detector(),
        lambda *_: pytest.fail("the training step was called"),
        Pairs(),
        SCHEDULE,
        step=detection_step,
        metrics=metrics,
        batch_size=4,
        uses_loss=False,
        best="max precision",
    ).alone()
    assert measured.run(end_of(SCHEDULE)) == {"precision": 1.0, "boxes": pytest.approx(1.9)}
    assert measured.ranking.best == 1.0


def test_a_step_returns_a_pair(me: Any) -> None:
    """Anything else is named."""
    wrong = Evaluation(
        me, Detector(), None, Pairs(), SCHEDULE, step=lambda model, batch: model(batch[0])
    ).alone()
    with pytest.raises(MetricError, match=r"evaluation\.step returned list of 10"):
        wrong.run(end_of(SCHEDULE))


def test_a_metric_that_raises_says_what_it_was_called_with(me: Any) -> None:
    """Beside model.step a function gets (model, batch), which the exception of a function of outputs does not tell."""

    def shape(outputs: Any, _: Any) -> float:
        return float(outputs.shape[0])

    step = nn.Linear(1, 1)
    wrong = Evaluation(
        me, step, loss_step, Pairs(), SCHEDULE, metrics={"size": shape}, batch_size=4, uses_loss=False
    ).alone()
    with pytest.raises(AttributeError) as raised:
        wrong.run(end_of(SCHEDULE))
    (note,) = raised.value.__notes__
    assert note.startswith("evaluation.metrics.size was called with (model, batch), a Linear and list of 2")
    assert "evaluation.step" in note


def test_a_job_may_name_its_only_set_or_leave_one_of_several(me: Any) -> None:
    """The best value stays with the set that ranks snapshots, and what was owed is."""
    model, _ = trained()
    alone, fresh = evaluation(me, model), evaluation(me, model)
    alone.run(end_of(SCHEDULE))

    def several() -> Evaluations:
        given = me, model, loss_step, Pairs(), SCHEDULE
        return Evaluations(
            me, SCHEDULE, {"a": Evaluation(*given), "b": Evaluation(*given, batch_size=4, best="min loss")}
        )

    named = several()
    named.load_state_dict({**alone.state_dict(), "owed": [""]})
    assert (named.ranking.best, named.is_owed) == (alone.ranking.best, True)
    fresh.load_state_dict(named.state_dict())
    assert (fresh.ranking.best, fresh.is_owed) == (alone.ranking.best, True)


def test_of_several_sets_those_are_measured_whose_time_has_come(me: Any) -> None:
    """Once the vote of a step says that one is due by the clock."""
    given = me, nn.Linear(1, 1), loss_step, Pairs(), SCHEDULE
    sets = {name: Evaluation(*given, every=(every,)) for name, every in (("a", "5 s"), ("b", "60 min"))}
    several = Evaluations(me, SCHEDULE, sets)
    me.vote.evaluation = True
    sets["a"]._last_time -= 10
    several.after_step(SCHEDULE.batch(SCHEDULE.start)[2])
    assert ["a.loss"] == [name for line in me.events for name in line["eval"]]
