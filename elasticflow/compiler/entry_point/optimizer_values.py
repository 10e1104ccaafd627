"""What the entry point says of optimizers: of one that it moves, or of those that the job's own step moves (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.factories import factory
from elasticflow.compiler.entry_point.source_code import Name, call

if TYPE_CHECKING:
    from elasticflow.compiler.entry_point.factories import Line
    from elasticflow.jobfile.tables.job import Job

LEFT_TO_TRAIN_PY: dict[str, Line] = {
    "import.optimizer": "from torch.optim import Optimizer",
    "optimizer.def": "def build_optimizer(model: nn.Module) -> Optimizer:",
    "optimizer.doc": '"""Return the optimizer over the model\'s parameters; every rank."""',
    "optimizer.make": "optimizer = build_optimizer(model)",
    "scheduler.def": "def build_scheduler(optimizer: Optimizer) -> LRScheduler:",
    "scheduler.make": "scheduler = build_scheduler(optimizer)",
    "zero_grad": "optimizer.zero_grad()",
    "gradients": "loss = step.forward_backward(batch)",
    "rates": "me.progress.note_rates(optimizer)",
    "progress": "me.progress.step(position, loss, optimizer)",
}
"""Lines of a job whose step returns a loss."""


def own_steps(job: Job) -> dict[str, Line]:
    """Return the lines of a job whose step moves the optimizers itself."""
    assert job.model.step is not None
    lines: dict[str, Line] = {
        "import.optimizer": None,
        "import.scheduler": None,
        "optimizer.def": "def build_optimizer(model: nn.Module) -> Any:",
        "optimizer.doc": '"""Return the optimizer, or several in a dict or list; every rank."""',
        "optimizer.make": "optimizers = build_optimizer(model)",
        "scheduler.def": "def build_scheduler(optimizers: Any) -> Any:",
        "scheduler.make": "scheduler = several_optimizers.Schedules(build_scheduler(optimizers))",
        "precision": None,
        "on_nonfinite": None,
        "ddp": None,
        "zero_grad": None,
        "gradients": "loss = step.step(batch)",
        "rates": "me.progress.note_rates(optimizers)",
        "progress": "me.progress.step(position, loss, optimizers)",
        "step.def": "def training_step(model: nn.Module, batch: Any, optimizers: Any) -> Any:",
    }
    lines["step.doc"] = (
        '"""Make a step with this worker\'s samples, which moves the optimizers; return its loss; every rank."""'
    )
    lines |= factory("step", job.model.step, "return ", "model", "batch", "optimizers")
    if job.lr_scheduler is not None:
        scheduler = job.lr_scheduler
        lines |= factory("scheduler", scheduler.entry, "return ", "optimizers", args=scheduler.args)
    clip = {} if job.optimizer.clip_grad_norm is None else {"clip_grad_norm": Name("CLIP_GRAD_NORM")}
    group = call("own_steps.ManualStep", "me", "model", "training_step", "optimizers", **clip)
    return {**lines, "group": ("step = ", group)}
