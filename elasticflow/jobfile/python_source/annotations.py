"""Whether a value of the job file can be meant by a parameter's annotation."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.jobfile.python_source.import_origins import origin

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.modules import Module

_TYPES: dict[str, tuple[type, ...]] = {
    "builtins.int": (int,),
    "builtins.float": (int, float),
    "builtins.str": (str,),
    "pathlib.Path": (str,),  # what the callable makes of a text is its own business
}
_LISTS = {"builtins.list", "builtins.tuple", "typing.List", "typing.Tuple"}
_ANY_LISTS = {
    f"{home}.{name}" for home in ("typing", "collections.abc") for name in ("Sequence", "Iterable", "Collection")
}  # fmt: skip
_TABLES = {"builtins.dict", "typing.Dict"} | {
    f"{home}.{name}" for home in ("typing", "collections.abc") for name in ("Mapping", "MutableMapping")
}
# Classes that no text is meant for.
_NO_TEXTS = {"torch.Tensor", "torch.nn.Parameter", "numpy.ndarray", "numpy.number", "builtins.complex"}


class Made(dict[str, Any]):
    """The table of an object, where values are compared with annotations: what it makes is not known."""


def fits(value: object, annotation: ast.expr | None, module: Module) -> bool:
    """Return whether a value of the job file can be meant; True whenever that is not certain."""
    if isinstance(value, Made):
        return True
    match annotation:
        case None:
            return True
        case ast.Constant(value=None):
            return False  # TOML has no null
        case ast.Constant(value=str(text)):
            inner = _parsed(text)
            return inner is None or fits(value, inner, module)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return fits(value, left, module) or fits(value, right, module)
        case ast.Subscript(value=head, slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _fits_generic(value, origin(module, head), parts, module)
        case _:
            return _fits_plain(value, origin(module, annotation))


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _fits_plain(value: object, name: str) -> bool:
    if name == "builtins.bool":
        return isinstance(value, bool)
    if name in _TYPES:
        return isinstance(value, _TYPES[name]) and (name == "builtins.int" or not isinstance(value, bool))
    if name in _NO_TEXTS:
        return not isinstance(value, str)
    if name in _LISTS:
        return isinstance(value, list)
    if name in _ANY_LISTS:
        return isinstance(value, list | str | dict)
    return name not in _TABLES or isinstance(value, dict)


def _fits_generic(value: object, name: str, parts: list[ast.expr], module: Module) -> bool:
    if not parts:  # tuple[()]
        return True
    if name in {"typing.Optional", "typing.Union"}:
        return any(fits(value, part, module) for part in parts)
    if name in {"typing.Annotated", "typing.Final"}:
        return fits(value, parts[0], module)
    if name in {"typing.Literal", "typing_extensions.Literal"}:
        known = [part.value for part in parts if isinstance(part, ast.Constant)]
        return len(known) < len(parts) or value in known
    if not _fits_plain(value, name):
        return False
    if isinstance(value, list) and name in _LISTS | _ANY_LISTS:
        if name in {"builtins.tuple", "typing.Tuple"} and not _is_ellipsis(parts[-1]):
            pairs = zip(value, parts, strict=False)
            return len(value) == len(parts) and all(fits(each, part, module) for each, part in pairs)
        return all(fits(each, parts[0], module) for each in value)
    return True


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def in_words(annotation: ast.expr, module: Module) -> str:
    """Return what an annotation takes: choices as the job file writes them, else the annotation itself."""
    known = choices(annotation, module)
    if not known:
        return ast.unparse(annotation)
    *others, last = [show(each) for each in known]
    return f"{', '.join(others)} or {last}" if others else last


def choices(annotation: ast.expr, module: Module) -> list[object]:
    """Return the values that an annotation lists, if it is such a list, also as `... | None`."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return choices(left, module)
        case ast.Subscript(value=head, slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            name = origin(module, head)
            if name == "typing.Optional" and parts:
                return choices(parts[0], module)
            if name in {"typing.Literal", "typing_extensions.Literal"}:
                return [part.value for part in parts if isinstance(part, ast.Constant)]
            return []
        case _:
            return []


def nearest_choice(value: object, annotation: ast.expr, module: Module) -> str | None:
    """Return the listed value that is nearly *value*, as the job file writes it."""
    known = [each for each in choices(annotation, module) if isinstance(each, str)]
    near = nearest(value, known) if isinstance(value, str) else []
    return show(near[0]) if near else None
