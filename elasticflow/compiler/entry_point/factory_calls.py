"""The forms in which a job's factories are called, found by reading source and importing nothing."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.entry_points.calls import takes_optimizer_later, takes_optimizers
from elasticflow.python_source.definitions import Definition, MethodError
from elasticflow.python_source.modules import Finder, UnresolvedError
from elasticflow.python_source.resolve import Resolver
from elasticflow.python_source.signatures import Signature, signature_of

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job


class CallForms(NamedTuple):
    """The forms in which a job's factories are called, as far as their source tells.

    Attributes:
        optimizer_takes_model: The optimizer's factory takes the model instead of its parameters.
        optimizer_is_method: The optimizer's factory is a method of the model.
        step_is_method: The training step is a method of the model.
        step_moves_optimizers: The training step takes the optimizers after model and batch, and steps them itself.
        schedule_by_name: The learning-rate schedule's factory takes the optimizer by name, after another argument.
        schedule_is_timms: The learning-rate schedule is timm's, which takes the time at each step.
    """

    optimizer_takes_model: bool = False
    optimizer_is_method: bool = False
    step_is_method: bool = False
    step_moves_optimizers: bool = False
    schedule_is_timms: bool = False
    schedule_by_name: bool = False


def call_forms(job: Job, project_root: Path) -> CallForms:
    """Return the forms in which the factories of a job are called."""
    resolver = Resolver(Finder.of_job(project_root, job.job.path))
    optimizer, step = job.optimizer.entry, job.model.step
    optimizer_is_method = is_method(optimizer, resolver)
    step_is_method = step is not None and is_method(step, resolver)
    names = [] if step is None else parameters(step, resolver)
    return CallForms(
        optimizer_takes_model=not optimizer_is_method and parameters(optimizer, resolver)[:1] == ["model"],
        optimizer_is_method=optimizer_is_method,
        step_is_method=step_is_method,
        step_moves_optimizers=takes_optimizers(names, is_method=step_is_method),
        schedule_is_timms=job.lr_scheduler is not None and is_of_timm(job.lr_scheduler.entry, resolver),
        schedule_by_name=job.lr_scheduler is not None
        and takes_optimizer_later(job.lr_scheduler.entry, parameters(job.lr_scheduler.entry, resolver)),
    )


def is_method(entry: str, resolver: Resolver) -> bool:
    """Return whether `package.module:Class.name` is called on an object of its class; False if reading does not tell."""
    try:
        resolver.entry(entry)
    except MethodError:
        return True
    except UnresolvedError:
        pass
    return False


def is_of_timm(entry: str, resolver: Resolver) -> bool:
    """Return whether `package.module:attribute` names a class of timm, also through an import in the job's own code."""
    if entry.startswith("timm."):
        return True
    try:
        resolved = resolver.entry(entry)
    except UnresolvedError:
        return False
    if not isinstance(resolved, Definition) or not isinstance(resolved.node, ast.ClassDef):
        return False
    return resolved.module.name.startswith("timm.")


def parameters(entry: str, resolver: Resolver) -> list[str]:
    """Return the positional parameters of `package.module:attribute` without `self`; none if reading does not tell."""
    try:
        try:
            resolved = resolver.entry(entry)
        except MethodError as method:
            resolved = method.definition
        signature = signature_of(resolved, resolver) if isinstance(resolved, Definition) else Signature()
    except UnresolvedError:
        return []
    return [parameter.name for parameter in (*signature.positional_only, *signature.positional)]
