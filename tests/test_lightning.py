"""LightningModules as jobs: the functions that a job file names, against the real library."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elasticflow import lightning
from elasticflow.errors import StateError

if TYPE_CHECKING:
    from tests.lightning_modules import Lit

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

BATCH = (torch.ones(4, 2), torch.ones(4, 1))


def made(name: str) -> Any:
    """Return a module of the class; only here is the library imported, which takes seconds in each collection of tests."""
    from tests import lightning_modules

    return getattr(lightning_modules, name)()


def of_form(form: str) -> tuple[Lit, Optimizer]:
    """Return a module whose configure_optimizers has this form, and its optimizer."""
    model = made("Lit")
    model.form = form
    return model, lightning.optimizer(model)


@pytest.mark.parametrize(
    ("form", "interval", "kind"),
    [
        ("lists", "step", StepLR),
        ("dict", "epoch", StepLR),
        ("metric", "evaluation", ReduceLROnPlateau),
        ("monitor beside", "evaluation", ReduceLROnPlateau),
        ("monitor for nothing", "epoch", StepLR),
    ],
)
def test_usual_forms_of_configure_optimizers(form: str, interval: str, kind: type) -> None:
    """The optimizer and the schedule are those of the module, which the job must step when the module says."""
    model, optimizer = of_form(form)
    assert isinstance(optimizer, SGD)
    with pytest.raises(StateError, match=r"the job has no \[lr_scheduler\]"):
        lightning.training_step(model, BATCH)
    with pytest.raises(StateError, match=rf'steps its schedule by {interval}(.|\n)*interval = "{interval}"'):
        lightning.lr_scheduler(optimizer, "epoch" if interval == "step" else "step")
    if interval == "evaluation":
        with pytest.raises(StateError, match=r"metric = 'val_loss'"):
            lightning.lr_scheduler(optimizer, "step")
    schedule = lightning.lr_scheduler(optimizer, interval)
    assert (type(schedule), schedule.optimizer) == (kind, optimizer)
    assert "loss" in lightning.training_step(model, BATCH)


@pytest.mark.parametrize("form", ["alone", "one"])
def test_an_optimizer_without_a_schedule(form: str) -> None:
    """A job that wants a schedule is refused."""
    model, optimizer = of_form(form)
    assert isinstance(optimizer, SGD)
    with pytest.raises(StateError, match="returns no schedule"):
        lightning.lr_scheduler(optimizer)
    assert "loss" in lightning.training_step(model, BATCH)


def test_steps_report_what_they_log() -> None:
    """The loss and the logged values; the module has its own `log` and no Trainer afterwards."""
    model, _ = of_form("alone")
    step = lightning.training_step(model, BATCH)
    assert set(step) == {"loss", "train_loss", "double"}
    step["loss"].backward()
    assert model.layer.weight.grad is not None
    outputs, targets = lightning.validation_step(model, BATCH)
    assert targets is BATCH
    assert torch.equal(lightning.logged(outputs["val_loss"], targets), step["loss"])
    assert "log" not in vars(model)
    assert model._trainer is None


def _refused(body: str) -> Any:
    from tests.lightning_modules import Lit

    space: dict[str, Any] = {"Lit": Lit, "torch": torch}
    lines = "\n        ".join(body.splitlines())
    exec(f"class Wrong(Lit):\n    def training_step(self, batch, batch_idx):\n        {lines}\n", space)
    return space["Wrong"]()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "training_step returns no loss"),
        ("return {'logits': 1}", "training_step returns no loss"),
        ("return super().training_step(batch, batch_idx) * (batch_idx % 2)", "training_step uses batch_idx"),
        ("if batch_idx == 0: pass", "training_step uses batch_idx"),
        ("print(f'{batch_idx}')", "training_step uses batch_idx"),
        ("return super().training_step(batch, 0) * self.current_epoch", "asks its Trainer for current_epoch"),
        ("self.optimizers()", "asks its Trainer for"),
        ("self.logger.log_metrics({})", "asks its Trainer for logger"),
        ("self.log('total', 1.0, reduce_fx='sum')", "logs total with reduce_fx"),
        (
            "self.log('count', 3.0); return super().training_step(batch, batch_idx)",
            "training_step logs count",
        ),
        (
            "import torchmetrics; self.log('mean', torchmetrics.MeanMetric())",
            "logs mean, a MeanMetric",
        ),
    ],
)
def test_a_step_that_counts_on_the_trainer_is_refused(body: str, said: str) -> None:
    """Each is named; a value that a Trainer would have given is never made up."""
    model = _refused(body)
    model.form = "alone"
    lightning.optimizer(model)
    with pytest.raises(StateError) as raised:
        lightning.training_step(model, BATCH)
    assert said in str(raised.value)
    assert model._trainer is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.Linear(1, 1), "is no LightningModule"),
        (partial(made, "ByHand"), "automatic_optimization is False"),
        (partial(made, "Hooked"), "Hooked overrides on_train_epoch_end"),
        (partial(made, "Late"), "Late overrides setup"),
    ],
)
def test_a_module_that_counts_on_the_trainer_is_refused(make: Any, said: str) -> None:
    """Before the first step."""
    with pytest.raises(StateError, match=said):
        lightning.optimizer(make())


@pytest.mark.parametrize(
    ("form", "said"), [("two", "2 optimizers and 0 schedules"), ("none", "0 optimizers")]
)
def test_optimizers_that_are_not_one_are_refused(form: str, said: str) -> None:
    """Nothing would say in which order they move."""
    with pytest.raises(StateError, match=said):
        of_form(form)


def test_a_frequency_is_refused() -> None:
    """A job steps a schedule each time."""
    _, optimizer = of_form("often")
    with pytest.raises(StateError, match="with a frequency"):
        lightning.lr_scheduler(optimizer, "epoch")
