"""What a definition takes, read from its source, and whether given arguments fit (floor 1)."""

from __future__ import annotations

import ast
import difflib
from dataclasses import dataclass, field
from typing import Literal

from elasticflow.spec.modules import CannotTellError
from elasticflow.spec.resolve import Definition, Resolver, dotted_names

# Decorators that leave the arguments as they are.
_TRANSPARENT = {"cache", "compile", "deprecated", "final", "inference_mode", "lru_cache", "no_grad", "override", "runtime_checkable", "staticmethod", "enable_grad"}  # fmt: skip
_WITHOUT_INIT = {"ABC", "Generic", "Protocol", "object"}
_TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_LISTS = {"list", "tuple", "List", "Tuple", "Sequence", "Iterable", "Collection"}
_TABLES = {"dict", "Dict", "Mapping", "MutableMapping"}


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name, whether it can be left out, and its annotation if there is one."""

    name: str
    is_optional: bool
    annotation: ast.expr | None = None


@dataclass(frozen=True)
class Signature:
    """What a call takes; `self` is left out.

    Attributes:
        positional_only: Cannot be given by name.
        positional: By place or by name.
        named: By name only.
        takes_any_positional: Has `*args`.
        takes_any_named: Has `**kwargs`.
    """

    positional_only: list[Parameter] = field(default_factory=list)
    positional: list[Parameter] = field(default_factory=list)
    named: list[Parameter] = field(default_factory=list)
    takes_any_positional: bool = False
    takes_any_named: bool = False


@dataclass(frozen=True)
class Misfit:
    """One argument that does not fit.

    Attributes:
        kind: unknown, missing, twice (given by place already), places (too many), or type.
        name: Name of the parameter or of the argument.
        remedy: What it takes, or the nearest name.
    """

    kind: Literal["unknown", "missing", "twice", "places", "type"]
    name: str
    remedy: str | None = None


def signature_of(definition: Definition, resolver: Resolver) -> Signature:
    """Return the signature of a function or of a class's constructor.

    Raises:
        CannotTellError: a decorator, metaclass or base hides it.
    """
    node = definition.node
    if isinstance(node, ast.ClassDef):
        found = _of_class(definition, resolver, 0)
        return found or Signature()
    if isinstance(node, ast.Lambda):
        return _from_arguments(node.args, skip=0)
    _refuse_decorators(node)
    return _from_arguments(node.args, skip=0)


def _refuse_decorators(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
    for mark in node.decorator_list:
        names = dotted_names(mark.func if isinstance(mark, ast.Call) else mark)
        if not names or names[-1] not in _TRANSPARENT:
            raise CannotTellError(f"{node.name} is decorated")


def _of_class(definition: Definition, resolver: Resolver, level: int) -> Signature | None:
    """Return the constructor's signature; None when no class on the way defines one."""
    node = definition.node
    if not isinstance(node, ast.ClassDef) or level > 10:
        raise CannotTellError("a base is no plain class")
    if any(
        each.arg == "metaclass" and dotted_names(each.value)[-1:] != ["ABCMeta"] for each in node.keywords
    ):
        raise CannotTellError(f"{node.name} has a metaclass")
    if any(
        "dataclass" in dotted_names(m.func if isinstance(m, ast.Call) else m)[-1:]
        for m in node.decorator_list
    ):
        return _of_dataclass(node)
    _refuse_decorators(node)
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    _refuse_hidden_constructor(node)
    if maker := methods.get("__init__") or methods.get("__new__"):
        _refuse_decorators(maker)
        return _from_arguments(maker.args, skip=1)
    for base in node.bases:
        names = dotted_names(base)
        if not names:
            raise CannotTellError(f"a base of {node.name} is made by a call")
        if names[-1] in _WITHOUT_INIT:
            continue
        found = resolver.dotted(definition.module, names)
        if not isinstance(found, Definition):
            raise CannotTellError(f"a base of {node.name} is no class")
        if inherited := _of_class(found, resolver, level + 1):
            return inherited
    return None


def _refuse_hidden_constructor(node: ast.ClassDef) -> None:
    """A constructor that is assigned, or defined under a condition, is not read."""
    makers = {"__init__", "__new__"}
    for each in node.body:
        if isinstance(each, ast.Assign) and makers & {getattr(at, "id", "") for at in each.targets}:
            raise CannotTellError(f"{node.name} assigns its constructor")
        if isinstance(each, ast.If | ast.Try | ast.With) and makers & {
            getattr(at, "name", "") for at in ast.walk(each)
        }:
            raise CannotTellError(f"{node.name} defines its constructor under a condition")


def _of_dataclass(node: ast.ClassDef) -> Signature:
    if node.bases:
        raise CannotTellError(f"{node.name} inherits fields")
    options = {
        each.arg: getattr(each.value, "value", None)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call)
        for each in mark.keywords
    }
    if options.get("init") is False or any(getattr(each, "name", "") == "__init__" for each in node.body):
        raise CannotTellError(f"{node.name} makes its own constructor")
    by_place: list[Parameter] = []
    by_name: list[Parameter] = []
    named_only = bool(options.get("kw_only"))
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        kind = dotted_names(each.annotation)[-1:]
        if kind == ["KW_ONLY"]:
            named_only = True
        elif kind != ["ClassVar"]:
            if isinstance(each.value, ast.Call) and dotted_names(each.value.func)[-1:] == ["field"]:
                raise CannotTellError(f"{node.name} has fields made by field()")
            parameter = Parameter(each.target.id, each.value is not None, each.annotation)
            (by_name if named_only else by_place).append(parameter)
    return Signature(positional=by_place, named=by_name)


def _from_arguments(arguments: ast.arguments, *, skip: int) -> Signature:
    by_place = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_place) - len(arguments.defaults)
    parameters = [Parameter(each.arg, n >= num_required, each.annotation) for n, each in enumerate(by_place)]
    num_only = len(arguments.posonlyargs)
    named = [
        Parameter(each.arg, default is not None, each.annotation)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return Signature(
        positional_only=parameters[skip:num_only],
        positional=parameters[max(skip, num_only) :],
        named=named,
        takes_any_positional=arguments.vararg is not None,
        takes_any_named=arguments.kwarg is not None,
    )


def misfits(signature: Signature, num_places: int, arguments: dict[str, object]) -> list[Misfit]:
    """Return what does not fit when called with *num_places* positional and the named arguments."""
    by_place = [*signature.positional_only, *signature.positional]
    found: list[Misfit] = []
    if num_places > len(by_place) and not signature.takes_any_positional:
        found.append(Misfit("places", "", f"{len(by_place)} ({_listed([each.name for each in by_place])})"))
    filled = {each.name for each in by_place[:num_places]}
    open_names = {
        each.name: each for each in (*signature.positional, *signature.named) if each.name not in filled
    }
    for name, value in arguments.items():
        if name in filled:
            found.append(Misfit("twice", name))
        elif name in open_names:
            if not fits_annotation(value, open_names[name].annotation):
                annotation = open_names[name].annotation
                assert annotation is not None  # anything fits none
                found.append(Misfit("type", name, ast.unparse(annotation)))
        elif not signature.takes_any_named:
            near = difflib.get_close_matches(name, open_names, 1)
            remedy = f'did you mean "{near[0]}"?' if near else f"it takes: {_listed(list(open_names))}"
            found.append(Misfit("unknown", name, remedy))
    required = [*by_place[num_places:], *signature.named]
    found += [
        Misfit("missing", each.name)
        for each in required
        if not each.is_optional and each.name not in arguments
    ]
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "no arguments"


def fits_annotation(value: object, annotation: ast.expr | None) -> bool:
    """Return whether a TOML value can be meant by an annotation; True whenever that is not certain."""
    match annotation:
        case ast.Name(id=name) if name in _TYPES:
            is_flag = isinstance(value, bool)
            return (
                is_flag
                if name == "bool"
                else isinstance(value, _TYPES[name]) and (name == "int" or not is_flag)
            )
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _LISTS:
            return isinstance(value, list) or (
                isinstance(value, str) and name not in {"list", "tuple", "List", "Tuple"}
            )
        case ast.Name(id=name) | ast.Subscript(value=ast.Name(id=name)) if name in _TABLES:
            return isinstance(value, dict)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return fits_annotation(value, inner)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            options = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            known = [each.value for each in options if isinstance(each, ast.Constant)]
            return len(known) < len(options) or value in known
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return fits_annotation(value, left) or fits_annotation(value, right)
        case ast.Constant(value=None):
            return False  # TOML has no null
        case _:
            return True
