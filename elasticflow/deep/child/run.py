"""A run of one worker that `--deep` hands to train.py's loop: it has one batch and writes no files."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.deep.messages import Facts
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.training import loss_weights
from elasticflow.runtime.training.loss import parse_loss
from elasticflow.runtime.training.manual_step import reported_loss
from elasticflow.runtime.training.precision import autocast
from elasticflow.runtime.training.scalars import require_name, require_room, scalars_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.deep.child.entry_point import EntryPoint
    from elasticflow.deep.child.report import Report
    from elasticflow.deep.child.state import Trained

CPU = torch.device("cpu")
AFTER_ONE_STEP = Position(step=1, offset=0, epoch=1, samples=0, is_epoch_end=True)


class Alone:
    """The only worker of a run of `--deep`, as train.py's functions use a worker."""

    rank = 0

    def __init__(self, report: Report, seed: int) -> None:
        self._report, self.seed = report, seed

    def step_scheduler(self, scheduler: Any, _: Any) -> None:
        """Advance the schedule."""
        self._report.doing("a step of the schedule", "lr_scheduler.entry")
        scheduler.step()

    def log_grad_norm(self, _: Any) -> None:
        """Log nothing."""

    log_grad_norm_of = log_grad_norm

    def event(self, *_: Any, **__: Any) -> None:
        """Log nothing."""

    def gather_text(self, text: str) -> list[str]:
        """Return the text of every rank."""
        return [text]

    def reseed(self) -> None:
        """Reset every random generator to its state at the beginning of the run."""
        random_streams.seed_everything(self.seed)


class DeepRun:
    """A run of one step, as train.py's `train` uses it.

    Args:
        report: Gets the loop's activities and the result of the step.
        trained: The model, optimizers and other state that the step changes.
        looks: True: facts of the step are reported, too, and findings that follow from them.

    Attributes:
        result: Return value of the job's step.
    """

    def __init__(self, report: Report, code: EntryPoint, trained: Trained, *, looks: bool = False) -> None:
        self._report, self._code, self._trained, self._looks = report, code, trained, looks
        self.worker = Alone(report, code.seed)
        self.result: Any = None
        self.loss = math.nan

    def train(self, data: Any) -> None:
        """Have train.py make a step with *data*, the samples of a batch."""
        batch = Batch(0, 0, 1.0, AFTER_ONE_STEP, 0, data)
        self._trained.model.train()
        self._code.call("train", run=self, batches=[batch], **self._trained._asdict())

    def gradients(self, fn: Callable[[Batch], Any], batch: Batch) -> float:
        """Put the gradients of the batch into the parameters, and return its mean loss."""
        key = self._code.key_of("training_step")
        self._report.doing("a training step", key)
        if self._code.moves_optimizers:
            self.result = fn(batch)
            self.loss = float(reported_loss(self.result))
        else:
            with autocast(self._code.precision, CPU):
                self.result = fn(batch)
                loss, num_items = parse_loss(self.result)
            self.loss = 0.0 if loss is None else self._backward(loss / num_items if num_items else loss)
        if self._looks:
            self._look(key)
        self._report.doing("a step of the optimizer", "optimizer.entry")
        return self.loss

    def step(self, *, loss: float) -> None:
        """End the step."""

    def _backward(self, loss: Any) -> float:
        scaler = self._trained.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        return float(loss.item())

    def _look(self, key: str) -> None:
        report, result = self._report, self.result
        if isinstance(result, dict):
            scalars = scalars_in(result)
            report.call("loss", key, "logging what the step returned", partial(_require_logged, scalars))
            if scalars:
                report.note(f"logged beside the loss: {', '.join(scalars)}")
            if unused := loss_weights.unused_keys(result):
                report.note(f"the training step's dict also holds {', '.join(unused)}, which nobody reads")
        report.facts(Facts(loss=repr(self.loss)))
        if not math.isfinite(self.loss):
            what = f"the loss of the first step is {self.loss}"
            report.warn("step", key, what, "look at the data and the initial weights")
        if not self._code.moves_optimizers:
            self._look_for_unused()

    def _look_for_unused(self) -> None:
        gradients = self._code["GRADIENTS"]
        named = self._trained.model.named_parameters()
        unused = [name for name, p in named if p.requires_grad and p.grad is None]
        if not unused or self._code.is_exact or gradients.ddp.get("find_unused_parameters"):
            return
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        what = (
            f"parameter {unused[0]}{more} got no gradient: DistributedDataParallel fails at the second step"
        )
        remedy = "set ddp.find_unused_parameters = true, or freeze what is not trained"
        self._report.warn("step", "model.entry", what, remedy)


def _require_logged(scalars: dict[str, Any]) -> None:
    for name in scalars:
        require_name(name)
    require_room(len(scalars))
