"""Plain tables among the arguments where a dataclass is taken: an object was meant."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.annotations import Made
from elasticflow.jobfile.python_source.definitions import Definition, NoAttributeError, UnreadableModuleError
from elasticflow.jobfile.python_source.import_origins import dotted_names, origin
from elasticflow.jobfile.python_source.modules import CannotTellError, NoModuleError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.python_source.parameters import Parameter, Signature
    from elasticflow.jobfile.python_source.resolve import Resolver


def dataclasses_meant(
    signature: Signature, arguments: dict[str, object], resolver: Resolver
) -> Iterator[tuple[str, Definition]]:
    """Yield the arguments that are tables where the signature takes a dataclass, and that dataclass."""
    for parameter in (*signature.positional, *signature.named):
        value = arguments.get(parameter.name)
        # What has an `entry` is an object, or told as what only looks like one.
        if isinstance(value, dict) and not isinstance(value, Made) and "entry" not in value:
            found = _dataclass(parameter, resolver)
            if found is not None:
                yield parameter.name, found


def _dataclass(parameter: Parameter, resolver: Resolver) -> Definition | None:
    """Return the dataclass that a parameter is annotated with, also as `... | None`."""
    annotation = parameter.annotation
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except (SyntaxError, ValueError):
            return None
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):  # Config | None
        annotation = annotation.left
    names = dotted_names(annotation) if annotation is not None else []
    if not names:
        return None
    try:
        found = resolver.dotted(parameter.module, names)
    except (CannotTellError, NoModuleError, NoAttributeError, UnreadableModuleError):
        return None
    if not isinstance(found, Definition) or not isinstance(found.node, ast.ClassDef):
        return None
    marks = [each.func if isinstance(each, ast.Call) else each for each in found.node.decorator_list]
    return found if any(origin(found.module, mark) == "dataclasses.dataclass" for mark in marks) else None
