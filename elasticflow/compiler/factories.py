"""The first parameter of a factory, found by reading source and importing nothing (floor 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.spec.entries.definitions import Definition, NoAttributeError, UnreadableModuleError
from elasticflow.spec.entries.entry_points import installed_places
from elasticflow.spec.entries.modules import CannotTellError, Finder, NoModuleError
from elasticflow.spec.entries.resolve import Resolver
from elasticflow.spec.entries.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def first_parameter(entry: str, project_root: Path, job_path: Sequence[str]) -> str | None:
    """Return the name of the first parameter of `package.module:attribute`; None where reading does not tell."""
    module, _, attribute = entry.partition(":")
    own = tuple(project_root / part for part in job_path)
    resolver = Resolver(Finder(own, installed_places()))
    try:
        found = resolver.entry(module, attribute)
        if not isinstance(found, Definition):
            return None
        signature = signature_of(found, resolver)
    except (CannotTellError, NoAttributeError, NoModuleError, UnreadableModuleError):
        return None
    names = [parameter.name for parameter in (*signature.positional_only, *signature.positional)]
    return names[0] if names else None
