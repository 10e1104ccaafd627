"""Signatures of functions and classes, read from their source."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.python_source.bindings import origin, refuse_decorators
from elasticflow.python_source.classes import classes_of, is_named_tuple
from elasticflow.python_source.modules import CannotTellError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.python_source.modules import Definition, Module
    from elasticflow.python_source.resolve import Resolver


class Parameter(NamedTuple):
    """One parameter.

    Attributes:
        module: The module in whose namespace the annotation is read.
    """

    name: str
    is_optional: bool
    annotation: ast.expr | None
    module: Module
    default: ast.expr | None = None


@dataclass(frozen=True)
class Signature:
    """Parameters of a call, without `self`.

    Attributes:
        positional: Parameters that are given by position or by name.
        named: Parameters that are given by name only.
        takes_any_positional: The function has `*args`.
        takes_any_named: The function has `**kwargs`.
    """

    positional_only: list[Parameter] = field(default_factory=list)
    positional: list[Parameter] = field(default_factory=list)
    named: list[Parameter] = field(default_factory=list)
    takes_any_positional: bool = False
    takes_any_named: bool = False

    def after(self, num_places: int, names: Sequence[str]) -> Signature:
        """Return the remaining signature when the first *num_places* positions and *names* have a value.

        Raises:
            CannotTellError: there are fewer positions, or no such name.
        """
        only, by_place = self.positional_only[num_places:], list(self.positional)
        by_place = by_place[max(0, num_places - len(self.positional_only)) :]
        if num_places > len(self.positional_only) + len(self.positional) and not self.takes_any_positional:
            raise CannotTellError("more arguments are given in advance than it takes")
        names_taken = [each.name for each in (*by_place, *self.named)]
        if not self.takes_any_named and not set(names) <= set(names_taken):
            raise CannotTellError("arguments are given in advance that it does not take")
        given = [each._replace(is_optional=each.is_optional or each.name in names) for each in by_place]
        first = next((n for n, each in enumerate(given) if each.name in names), len(given))
        named = [each._replace(is_optional=each.is_optional or each.name in names) for each in self.named]
        return replace(self, positional_only=only, positional=given[:first], named=[*given[first:], *named])


def from_arguments(arguments: ast.arguments, module: Module, *, skip: int = 0) -> Signature:
    """Return the signature of a `def` without its first *skip* parameters."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_place) - len(arguments.defaults)
    defaults = [*([None] * num_required), *arguments.defaults]
    parameters = [
        Parameter(each.arg, default is not None, each.annotation, module, default)
        for each, default in zip(by_place, defaults, strict=True)
    ]
    num_only = len(arguments.posonlyargs)
    if skip > len(by_place) and arguments.vararg is None:
        raise CannotTellError("it takes no `self`")
    named = [
        Parameter(each.arg, default is not None, each.annotation, module, default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return Signature(
        positional_only=parameters[skip:num_only],
        positional=parameters[max(skip, num_only) :],
        named=named,
        takes_any_positional=arguments.vararg is not None,
        takes_any_named=arguments.kwarg is not None,
    )


_MAKERS = {"__init__", "__new__"}


def _own_constructor(definition: Definition, resolver: Resolver) -> Signature | None:
    """Return the signature of the class's own constructor; None if it has none."""
    node, module = definition.node, definition.module
    assert isinstance(node, ast.ClassDef)
    for each in node.keywords:
        if each.arg == "metaclass" and origin(module, each.value) != "abc.ABCMeta":
            raise CannotTellError(f"{node.name} has a metaclass")
    options = _dataclass_options(node, module)
    if options is None:
        refuse_decorators(module, node)
    _refuse_hidden_constructor(node)
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    if maker := methods.get("__init__") or methods.get("__new__"):
        refuse_decorators(module, maker)
        return from_arguments(maker.args, module, skip=1)
    if options is not None and options.get("init") is not False:
        return _of_dataclass(definition, resolver)
    if is_named_tuple(definition):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        return Signature(positional=[_parameter(each, module, each.value is not None) for each in fields])
    return None


def _refuse_hidden_constructor(node: ast.ClassDef) -> None:
    """Raise CannotTellError if a constructor is assigned, or defined under a condition."""
    for each in node.body:
        if isinstance(each, ast.Assign) and _MAKERS & {getattr(at, "id", "") for at in each.targets}:
            raise CannotTellError(f"{node.name} is given its constructor")
        if isinstance(each, ast.If | ast.Try | ast.With) and _MAKERS & {
            getattr(at, "name", "") for at in ast.walk(each)
        }:
            raise CannotTellError(f"{node.name} defines its constructor under a condition")


def _dataclass_options(node: ast.ClassDef, module: Module) -> dict[str, object] | None:
    """Return the options of `@dataclass`; None if the class is no dataclass, or has other decorators too."""
    if len(node.decorator_list) != 1:
        return None
    mark = node.decorator_list[0]
    call = mark.func if isinstance(mark, ast.Call) else mark
    if origin(module, call) != "dataclasses.dataclass":
        return None
    return _constants(node.name, mark.keywords if isinstance(mark, ast.Call) else [])


def _constants(name: str, keywords: list[ast.keyword]) -> dict[str, object]:
    options = {}
    for each in keywords:
        if each.arg is None or (each.arg in {"init", "kw_only"} and not isinstance(each.value, ast.Constant)):
            raise CannotTellError(f"{name} computes its options")
        options[each.arg] = getattr(each.value, "value", None)
    return options


def _of_dataclass(definition: Definition, resolver: Resolver) -> Signature:
    """Return the fields of a dataclass, inherited ones included, in the order of its constructor."""
    by_place: dict[str, Parameter] = {}
    by_name: dict[str, Parameter] = {}
    valued: set[str] = set()  # a default may be any attribute of a class below
    for each in reversed(list(classes_of(definition, resolver))):
        assert isinstance(each.node, ast.ClassDef)
        options = _dataclass_options(each.node, each.module)
        if options is None:
            valued |= _assigned(each.node)
        else:
            _add_fields(
                each, named=bool(options.get("kw_only")), by_place=by_place, by_name=by_name, valued=valued
            )
    return Signature(positional=list(by_place.values()), named=list(by_name.values()))


def _assigned(node: ast.ClassDef) -> set[str]:
    names = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and each.value and isinstance(each.target, ast.Name)}  # fmt: skip
    targets = [at for each in node.body if isinstance(each, ast.Assign) for at in each.targets]
    return names | {at.id for at in targets if isinstance(at, ast.Name)}


def _add_fields(
    owner: Definition, *, named: bool, by_place: dict[str, Parameter], by_name: dict[str, Parameter], valued: set[str]
) -> None:  # fmt: skip
    node, module = owner.node, owner.module
    assert isinstance(node, ast.ClassDef)
    if any(isinstance(each, ast.If | ast.Try | ast.With | ast.For) for each in node.body):
        raise CannotTellError(f"{node.name} defines fields under a condition")
    valued |= _assigned(node)
    for each in node.body:
        if not isinstance(each, ast.AnnAssign) or not isinstance(each.target, ast.Name):
            continue
        kind = _kind(each.annotation, module)
        if kind == "dataclasses.KW_ONLY":
            named = True
        if kind in {"dataclasses.KW_ONLY", "typing.ClassVar"}:
            continue
        name, options, has_default = each.target.id, {}, each.target.id in valued
        if isinstance(each.value, ast.Call) and origin(module, each.value.func) == "dataclasses.field":
            options = _constants(node.name, each.value.keywords)
            has_default = bool({"default", "default_factory"} & set(options))
        by_place.pop(name, None) if options.get("kw_only", named) else by_name.pop(name, None)
        fields = by_name if options.get("kw_only", named) else by_place
        fields[name] = _parameter(each, module, has_default)
        if options.get("init") is False:
            del fields[name]


def _kind(annotation: ast.expr, module: Module) -> str:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        raise CannotTellError("the kind of a field is written in quotes")
    return origin(module, annotation)


def _parameter(each: ast.AnnAssign, module: Module, is_optional: bool) -> Parameter:
    assert isinstance(each.target, ast.Name)
    annotation: ast.expr = each.annotation
    if isinstance(annotation, ast.Subscript) and origin(module, annotation) == "dataclasses.InitVar":
        annotation = annotation.slice
    default = each.value if isinstance(each.value, ast.Constant) else None
    return Parameter(each.target.id, is_optional, annotation, module, default)


def signature_of(definition: Definition, resolver: Resolver) -> Signature:
    """Return the signature of a function or of a class's constructor, without bound arguments.

    It is empty if neither the class nor a base has a constructor.

    Raises:
        CannotTellError: a decorator, metaclass or base hides the signature.
    """
    node = definition.node
    if isinstance(node, ast.ClassDef):
        signatures = (_own_constructor(each, resolver) for each in classes_of(definition, resolver))
        signature = next((each for each in signatures if each is not None), Signature())
    else:
        if not isinstance(node, ast.Lambda):
            refuse_decorators(definition.module, node)
        signature = from_arguments(node.args, definition.module)
    if definition.num_bound or definition.preset:
        signature = signature.after(definition.num_bound, definition.preset)
    return signature
