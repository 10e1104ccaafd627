"""Compares values of the job file with a parameter's annotation or default, and finds the value that was meant."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.python_source.bindings import origin
from elasticflow.python_source.syntax import is_constant, unquoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.python_source.modules import Module

_TYPES: dict[str, tuple[type, ...]] = {
    "builtins.int": (int,),
    "builtins.float": (int, float),
    "builtins.str": (str,),
    "pathlib.Path": (str,),  # the callable may convert a text
}
_LISTS = {"builtins.list", "builtins.tuple", "typing.List", "typing.Tuple"}
_ANY_LISTS = {
    f"{home}.{name}" for home in ("typing", "collections.abc") for name in ("Sequence", "Iterable", "Collection")
}  # fmt: skip
_TABLES = {"builtins.dict", "typing.Dict"} | {
    f"{home}.{name}" for home in ("typing", "collections.abc") for name in ("Mapping", "MutableMapping")
}
# Classes that accept no text.
_NO_TEXTS = {"numpy.ndarray", "numpy.number", "builtins.complex"}
_NO_LISTS = {"torch.Tensor", "torch.nn.Parameter"}
_CALLABLES = {"typing.Callable", "collections.abc.Callable"}


class ObjectTable(dict[str, Any]):
    """A table that makes an object of unknown class, which cannot be compared with an annotation."""


class DatasetValue:
    """`"${dataset.vocab_size}"` as an argument: an attribute of the training data, known once the data is opened.

    It differs from the text `${dataset.vocab_size}` itself, which is written with `$${`.

    Attributes:
        name: Name of the attribute, with dots for attributes of attributes.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatasetValue) and self.name == other.name

    def __hash__(self) -> int:
        return hash((DatasetValue, self.name))

    def __repr__(self) -> str:
        """Return the value as it stands in the job file."""
        return f"${{dataset.{self.name}}}"


def fits(value: object, annotation: ast.expr | None, module: Module) -> bool:
    """Return whether a parameter may take a value of the job file: False only if it certainly does not."""
    if isinstance(value, ObjectTable | DatasetValue):
        return True
    match annotation:
        case None:
            return True
        case ast.Constant(value=None):
            return False  # TOML has no null
        case ast.Constant(value=str()):
            return fits(value, unquoted(annotation), module)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return fits(value, left, module) or fits(value, right, module)
        case ast.Subscript(value=head, slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _fits_generic(value, origin(module, head), parts, module)
        case _:
            return _fits_plain(value, origin(module, annotation))


def _fits_plain(value: object, name: str) -> bool:
    if name == "builtins.bool":
        return isinstance(value, bool)
    if name in _TYPES:
        return isinstance(value, _TYPES[name]) and (name == "builtins.int" or not isinstance(value, bool))
    if name in _NO_TEXTS or name in _NO_LISTS:
        return not isinstance(value, str | list | dict if name in _NO_LISTS else str)
    if name in _CALLABLES:  # a name may be looked up in a table of functions
        return not isinstance(value, str) or re.fullmatch(r"[\w.:-]+", value) is not None
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
        listed = [part.value for part in parts if isinstance(part, ast.Constant)]
        return len(listed) < len(parts) or value in listed
    if not _fits_plain(value, name):
        return False
    if isinstance(value, list) and name in _LISTS | _ANY_LISTS:
        if name in {"builtins.tuple", "typing.Tuple"} and not is_constant(parts[-1], ...):
            pairs = zip(value, parts, strict=False)
            return len(value) == len(parts) and all(fits(each, part, module) for each, part in pairs)
        return all(fits(each, parts[0], module) for each in value)
    return True


def in_words(annotation: ast.expr, module: Module) -> str:
    """Return an annotation in words: the listed choices as the job file writes them, else the annotation itself."""
    listed = choices(annotation, module)
    if not listed:
        return ast.unparse(annotation)
    *others, last = [show(each) for each in listed]
    return f"{', '.join(others)} or {last}" if others else last


def choices(annotation: ast.expr, module: Module) -> list[object]:
    """Return the values that an annotation lists, as `Literal` does, also as `... | None`; [] without such a list."""
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
    """Return the listed value most like *value*, as the job file writes it."""
    listed = [each for each in choices(annotation, module) if isinstance(each, str)]
    near = nearest(value, listed) if isinstance(value, str) else []
    return show(near[0]) if near else None


_NUMBER, _TRUTH = "a number", "true or false"


def in_words_of_default(default: ast.expr | None, value: object) -> str:
    """Return the type of a parameter without annotation, by its default; empty unless *value* is that type in quotes.

    `"1e-3"` for `lr=0.1` is a mistake; `"auto"` may be intended.
    """
    if isinstance(default, ast.UnaryOp):
        default = default.operand
    if not isinstance(value, str) or not isinstance(default, ast.Constant):
        return ""
    if isinstance(default.value, bool):
        return _TRUTH if value.lower() in {"true", "false"} else ""
    if isinstance(default.value, int | float):
        return _NUMBER if next(as_numbers(value.strip()), None) is not None else ""
    return ""


def near_value(value: object, wanted: ast.expr | str, module: Module | None = None) -> str | None:
    """Return the value that was most likely meant, as the job file writes it."""
    from elasticflow.jobfile.diagnostics.toml_literals import to_toml

    for each in ways(value):
        if isinstance(wanted, str):
            kind: type | tuple[type, ...] = bool if wanted == _TRUTH else (int, float)
            is_good = isinstance(each, kind) and (isinstance(each, bool) is (wanted == _TRUTH))
        else:
            is_good = module is not None and fits(each, wanted, module)
        if is_good and (type(each), each) != (type(value), value):
            return _as_typed(value, each) or to_toml(each)
    return None


def _as_typed(value: object, meant: object) -> str | None:
    """Return a number as it was typed in the text *value*: 1e-3 is easier to recognize than 0.001."""
    import tomli

    if not isinstance(value, str) or isinstance(meant, str | list | dict):
        return None
    try:
        is_same = tomli.loads(f"v = {value}") == {"v": meant}
    except tomli.TOMLDecodeError:
        return None
    return value.strip() if is_same else None


def ways(value: object) -> Iterator[object]:
    """Yield other ways to write the value of an argument, the likeliest first."""
    if isinstance(value, str):
        text = value.strip()
        yield from as_numbers(text)
        if text.lower() in {"true", "false"}:
            yield text.lower() == "true"
        if "," in text:
            parts = [each.strip() for each in text.strip("[]() ").split(",") if each.strip()]
            yield [next(as_numbers(each), each) for each in parts]
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if isinstance(value, list):
        yield [next(as_numbers(each), each) if isinstance(each, str) else each for each in value]
        yield from value if len(value) == 1 else ()
    elif not isinstance(value, dict):
        yield from ([value], str(value))


def as_numbers(text: str) -> Iterator[int | float]:
    """Yield the number that a text spells: `8`, `1_000`, `1e-3`, `50%`; none for `1,000`, whose comma may be decimal."""
    for kind in (int, float):
        try:
            if len(text) < 30 and text.isascii() and re.match(r"[+-]?[.\d]", text):
                yield kind(text)
        except ValueError:
            continue
    if re.fullmatch(r"\d+(\.\d+)?\s?%", text):
        yield float(text.rstrip("% ")) / 100
