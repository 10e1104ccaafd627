"""A probe's step: one batch forward, backward and through the optimizer, on the CPU (floor R)."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elasticflow.runtime import probe_restart
from elasticflow.runtime.loss import parse_loss
from elasticflow.runtime.probe_report import BrokenError
from elasticflow.runtime.replicas import AUTOCAST

if TYPE_CHECKING:
    from types import ModuleType

    from elasticflow.runtime.probe_report import Report
    from elasticflow.runtime.probe_state import Trained


def train(
    report: Report, code: ModuleType, job: dict[str, Any], trained: Trained, batches: dict[str, Any]
) -> None:
    """Make one step as train.py would with one worker, then measure the metrics on one batch.

    Raises:
        BrokenError: something raised; told.
    """
    model, optimizer = trained.model, trained.optimizer
    key = "model.step" if job["model"]["step"] else "model.loss"
    batch = batches["dataset"]

    model.train()
    optimizer.zero_grad()
    loss = report.call("step", key, "a training step", lambda: _gradients(code, job, model, batch))
    report.learnt(loss=repr(loss))
    if not math.isfinite(loss):
        what = f"the loss of the first step is {loss}"
        report.warn("step", key, what, "look at the data and the initial weights")
    _look_for_unused(report, job, model)
    if job["optimizer"]["clip_grad_norm"] is not None:
        nn.utils.clip_grad_norm_(model.parameters(), job["optimizer"]["clip_grad_norm"])
    step: Any = optimizer.step
    report.call("step", "optimizer.entry", "a step of the optimizer", step)
    if trained.scheduler is not None:
        report.call("step", "lr_scheduler.entry", "a step of the schedule", trained.scheduler.step)
    probe_restart.check(report, code, job, trained, partial(_step_again, code, job, batches["dataset"]))
    again = partial(_step_again, code, job, batch)
    probe_restart.check(report, code, job, trained, again)
    if "evaluation" in batches:
        _measure(report, code, job, model, batches["evaluation"])


def _gradients(code: ModuleType, job: dict[str, Any], model: nn.Module, batch: Any) -> float:
    """Leave the gradients of a batch in the parameters; return its mean loss."""
    dtype = AUTOCAST.get(job["train"]["precision"])
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        loss, samples = parse_loss(code.training_step(model, batch))
    if samples is not None:
        loss = loss / samples
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _step_again(code: ModuleType, job: dict[str, Any], batch: Any, trained: Trained) -> None:
    """Train one more step; whatever the job's own code raises is not caught."""
    trained.optimizer.zero_grad()
    _gradients(code, job, trained.model, copy.deepcopy(batch))
    if job["optimizer"]["clip_grad_norm"] is not None:
        nn.utils.clip_grad_norm_(trained.model.parameters(), job["optimizer"]["clip_grad_norm"])
    step: Any = trained.optimizer.step
    step()
    if trained.scheduler is not None:
        trained.scheduler.step()
    if trained.average is not None:
        trained.average.update_parameters(trained.model)


def _look_for_unused(report: Report, job: dict[str, Any], model: nn.Module) -> None:
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused and not job["ddp"]["find_unused_parameters"] and job["train"]["consistency"] == "batch":
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


def _measure(report: Report, code: ModuleType, job: dict[str, Any], model: nn.Module, batch: Any) -> None:
    model.eval()
    for name in job["evaluation"]["metrics"]:
        fn = getattr(code, f"measure_{name}")

        def measure(fn: Any = fn) -> float:
            with torch.no_grad():
                if job["model"]["loss"]:
                    return float(fn(model(batch[0]), batch[1]))
                return float(fn(model, batch))

        with suppress(BrokenError):
            report.call("step", f"evaluation.metrics.{name}", f"measuring {name}", measure)
    model.train()
