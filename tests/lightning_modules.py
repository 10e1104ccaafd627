"""LightningModules as tutorials write them, and such as count on the Trainer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR


class Lit(pl.LightningModule):
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
