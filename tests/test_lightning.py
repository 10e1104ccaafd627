"""LightningModules as jobs: the functions that a job file names, against the real library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elasticflow import lightning
from elasticflow.errors import StateError

pl = pytest.importorskip("lightning.pytorch")
BATCH = (torch.ones(4, 2), torch.ones(4, 1))


class Lit(pl.LightningModule):  # type: ignore[misc, name-defined]  # a class of a library that may be absent
    """A module as tutorials write it."""

    form = "dict"

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.layer(inputs)
        return outputs

    def _shared(self, batch: Any, batch_idx: int, of: str) -> Tensor:
        inputs, targets = batch
        loss = mse_loss(self(inputs), targets)
        self.log(f"{of}_loss", loss, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss = self._shared(batch, batch_idx, "train")
        self.log_dict({"double": 2 * loss})
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the loss."""
        self._shared(batch, batch_idx, "val")

    def configure_optimizers(self) -> Any:
        """Return an optimizer, or more."""
        optimizer = SGD(self.parameters(), lr=0.1)
        schedule = StepLR(optimizer, 1)
        of_metric = {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
        return {
            "alone": optimizer,
            "one": [optimizer],
            "lists": ([optimizer], [{"scheduler": schedule, "interval": "step"}]),
            "dict": {"optimizer": optimizer, "lr_scheduler": schedule},
            "metric": {"optimizer": optimizer, "lr_scheduler": of_metric},
            "monitor beside": {
                "optimizer": optimizer,
                "lr_scheduler": ReduceLROnPlateau(optimizer),
                "monitor": "val_loss",
            },
            "monitor for nothing": {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
            },
            "often": {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "frequency": 2}},
            "two": [optimizer, SGD(self.parameters(), lr=0.2)],
            "none": None,
        }[self.form]


class ByHand(Lit):
    """Moves its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Lit):
    """Has a hook of the Trainer's."""

    def on_train_epoch_end(self) -> None:
        """Do something."""


class Late(Lit):
    """Makes its layers in setup."""

    def setup(self, stage: str) -> None:
        """Do something."""


def of_form(form: str) -> tuple[Lit, Optimizer]:
    """Return a module whose configure_optimizers has this form, and its optimizer."""
    model = Lit()
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
    made = lightning.training_step(model, BATCH)
    assert set(made) == {"loss", "train_loss", "double"}
    made["loss"].backward()
    assert model.layer.weight.grad is not None
    outputs, targets = lightning.validation_step(model, BATCH)
    assert targets is BATCH
    assert torch.equal(lightning.logged(outputs["val_loss"], targets), made["loss"])
    assert "log" not in vars(model)
    assert model._trainer is None


def _refused(body: str) -> tuple[Any, str]:
    space: dict[str, Any] = {"Lit": Lit, "torch": torch}
    lines = "\n        ".join(body.splitlines())
    exec(f"class Wrong(Lit):\n    def training_step(self, batch, batch_idx):\n        {lines}\n", space)
    return space["Wrong"], body


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
    kind, _ = _refused(body)
    model = kind()
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
        (ByHand, "automatic_optimization is False"),
        (Hooked, "Hooked overrides on_train_epoch_end"),
        (Late, "Late overrides setup"),
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
