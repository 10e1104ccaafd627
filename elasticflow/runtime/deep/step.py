"""`--deep` trains a step: one batch forward, backward and through the optimizer, on the CPU."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elasticflow.protocol.deep_messages import Facts
from elasticflow.runtime.deep import evaluation, hooks, restart
from elasticflow.runtime.deep.state import moves_optimizers
from elasticflow.runtime.measuring.scalars import require_name, require_room, scalars_in
from elasticflow.runtime.training import loss_weights
from elasticflow.runtime.training.loss import parse_loss
from elasticflow.runtime.training.manual_step import reported_loss
from elasticflow.runtime.training.precision import AUTOCAST, autocast

if TYPE_CHECKING:
    from types import ModuleType

    from elasticflow.protocol.deep_messages import DeepJob
    from elasticflow.runtime.deep.report import Report
    from elasticflow.runtime.deep.state import Trained

_CPU = torch.device("cpu")


def train(
    report: Report,
    code: ModuleType,
    job: DeepJob,
    trained: Trained,
    batches: dict[str, Any],
    num_samples: int,
    dataset: Any,
) -> None:
    """Make one step as train.py would with one worker, look at its loss, then measure the metrics on one batch.

    Args:
        report: Where problems, notes and facts go.
        code: The job's train.py as a module.
        job: The job.
        trained: What the step changes.
        batches: By table: `dataset`, and those of the evaluation sets: `evaluation`, `evaluation.val`.
        num_samples: Of the batch of `dataset`.
        dataset: The training data; None of data shards.

    Raises:
        BrokenError: something raised; reported.
    """
    model = trained.model
    key = "model.step" if job.model.step else "model.loss"
    batch = batches["dataset"]
    moves = moves_optimizers(code)
    first = partial(_own_step, code, trained) if moves else partial(_gradients, code, job, model)

    model.train()
    model.zero_grad()
    result, loss = report.call("step", key, "a training step", lambda: first(batch))
    if isinstance(result, dict):
        report.call("loss", key, "logging what the step returned", partial(_look_at_scalars, result))
        if scalars := scalars_in(result):
            report.note(f"logged beside the loss: {', '.join(scalars)}")
    if isinstance(result, dict) and (unused := loss_weights.unused_keys(result)):
        report.note(f"the training step's dict also holds {', '.join(unused)}, which nobody reads")
    report.facts(Facts(loss=repr(loss)))
    if not math.isfinite(loss):
        what = f"the loss of the first step is {loss}"
        report.warn("step", key, what, "look at the data and the initial weights")
    if not moves:
        _look_for_unused(report, job, model)
        report.call("step", "optimizer.entry", "a step of the optimizer", lambda: _move(job, trained))
    if trained.scheduler is not None:
        report.call("step", "lr_scheduler.entry", "a step of the schedule", trained.scheduler.step)
    again = partial(_step_again, code, job, batch)
    restart.check(report, code, job, trained, again)
    if not moves:
        _look_at_weights(report, code, job, model, batch, num_samples)
    for number, each in enumerate(job.evaluations):
        if each.key in batches:
            evaluation.measure(report, code, job, model, (number, each), batches[each.key])
    hooks.try_out(report, code, job, trained, result, loss, dataset=dataset)


def _look_at_scalars(result: dict[Any, Any]) -> None:
    scalars = scalars_in(result)
    for name in scalars:
        require_name(name)
    require_room(len(scalars))


def _gradients(code: ModuleType, job: DeepJob, model: nn.Module, batch: Any) -> tuple[Any, float]:
    """Leave the gradients of a batch in the parameters; return what the step returned, and its mean loss."""
    with autocast(job.precision, _CPU):
        result = code.training_step(model, batch)
        loss, num_items = parse_loss(result)
    if loss is None:  # a mean over no items
        return result, 0.0
    if num_items:
        loss = loss / num_items
    loss.backward()  # type: ignore[no-untyped-call]
    return result, loss.item()


def _own_step(code: ModuleType, trained: Trained, batch: Any) -> tuple[Any, float]:
    """Have the job's step move the optimizers; return what it returned, and the loss it reports."""
    result = code.training_step(trained.model, batch, trained.optimizer)
    return result, reported_loss(result)


def _move(job: DeepJob, trained: Trained) -> None:
    if job.optimizer.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(trained.model.parameters(), job.optimizer.clip_grad_norm)
    trained.optimizer.step()


def _look_at_weights(
    report: Report, code: ModuleType, job: DeepJob, model: nn.Module, batch: Any, num_samples: int
) -> None:
    """Warn if the loss depends on how a batch is cut; after a step, since a last layer of zeros hides it."""
    model.eval()
    with torch.no_grad(), autocast(job.precision, _CPU):
        dtype = AUTOCAST.get(job.precision)
        difference = loss_weights.difference(None, model, code.training_step, batch, num_samples, dtype)
    model.train()
    if difference is not None and job.consistency == "exact":
        report.note(f"{difference}: it depends on train.virtual_shards, and on no number of workers")
    elif difference is not None:
        key = "model.step" if job.model.step else "model.loss"
        report.warn("weights", key, f"{difference}: it depends on the number of workers", loss_weights.REMEDY)


def _step_again(code: ModuleType, job: DeepJob, batch: Any, trained: Trained) -> None:
    """Train one more step; whatever the job's own code raises is not caught."""
    trained.model.zero_grad()
    if moves_optimizers(code):
        _own_step(code, trained, copy.deepcopy(batch))
    else:
        _gradients(code, job, trained.model, copy.deepcopy(batch))
        _move(job, trained)
    if trained.scheduler is not None:
        trained.scheduler.step()
    if trained.average is not None:
        trained.average.update_parameters(trained.model)


def _look_for_unused(report: Report, job: DeepJob, model: nn.Module) -> None:
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused and not job.find_unused_parameters and job.consistency == "batch":
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        what = (
            f"parameter {unused[0]}{more} got no gradient: DistributedDataParallel fails at the second step"
        )
        report.warn(
            "step",
            "model.entry",
            what,
            "set ddp.find_unused_parameters = true, or freeze what is not trained",
        )
