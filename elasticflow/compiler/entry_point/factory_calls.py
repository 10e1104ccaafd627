"""How a job's factories are called, found by reading source and importing nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.entry_points.calls import takes_optimizers
from elasticflow.jobfile.python_source.definitions import (
    Definition,
    MethodError,
    NoAttributeError,
    Resolved,
    UnreadableModuleError,
)
from elasticflow.jobfile.python_source.modules import (
    CannotTellError,
    Finder,
    NoModuleError,
    installed_folders,
)
from elasticflow.jobfile.python_source.resolve import Resolver
from elasticflow.jobfile.python_source.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job


class CallForms(NamedTuple):
    """How a job's factories are called, as far as their source tells.

    Attributes:
        optimizer_takes_model: The optimizer's factory wants the model instead of its parameters.
        optimizer_is_method: It is a method of the model.
        step_is_method: The training step is a method of the model.
        step_moves_optimizers: It takes the optimizers besides model and batch, and moves them itself.
    """

    optimizer_takes_model: bool = False
    optimizer_is_method: bool = False
    step_is_method: bool = False
    step_moves_optimizers: bool = False


def call_forms(job: Job, project_root: Path) -> CallForms:
    """Return how the factories of a job are called."""
    path, optimizer, step = job.job.path, job.optimizer.entry, job.model.step
    return CallForms(
        optimizer_takes_model=first_parameter(optimizer, project_root, path) == "model",
        optimizer_is_method=is_method(optimizer, project_root, path),
        step_is_method=step is not None and is_method(step, project_root, path),
        step_moves_optimizers=step is not None and takes_optimizers(parameters(step, project_root, path)),
    )


def is_method(entry: str, project_root: Path, job_path: Sequence[str]) -> bool:
    """Whether `package.module:Class.name` is called on an object of its class; False where reading does not tell."""
    try:
        _look_up(entry, project_root, job_path)
    except MethodError:
        return True
    except (CannotTellError, NoAttributeError, NoModuleError, UnreadableModuleError):
        pass
    return False


def first_parameter(entry: str, project_root: Path, job_path: Sequence[str]) -> str | None:
    """Return the name of the first parameter of `package.module:attribute`; None where reading does not tell."""
    return next(iter(parameters(entry, project_root, job_path)), None)


def parameters(entry: str, project_root: Path, job_path: Sequence[str]) -> list[str]:
    """Return the names of what `package.module:attribute` takes by place; none where reading does not tell."""
    try:
        found, resolver = _look_up(entry, project_root, job_path)
        if not isinstance(found, Definition):
            return []
        signature = signature_of(found, resolver)
    except (CannotTellError, NoAttributeError, NoModuleError, UnreadableModuleError):
        return []
    return [parameter.name for parameter in (*signature.positional_only, *signature.positional)]


def _look_up(entry: str, project_root: Path, job_path: Sequence[str]) -> tuple[Resolved, Resolver]:
    module, _, attribute = entry.partition(":")
    resolver = Resolver(Finder(tuple(project_root / part for part in job_path), installed_folders()))
    return resolver.entry(module, attribute), resolver
