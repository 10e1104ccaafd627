"""What making an object of a class takes: `__init__`, `__new__`, dataclasses, named tuples, inherited ones."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.classes import bases, is_named_tuple, lineage
from elasticflow.jobfile.python_source.import_origins import origin, refuse_decorators
from elasticflow.jobfile.python_source.modules import CannotTellError
from elasticflow.jobfile.python_source.parameters import Parameter, Signature, from_arguments

if TYPE_CHECKING:
    from elasticflow.jobfile.python_source.definitions import Definition
    from elasticflow.jobfile.python_source.modules import Module
    from elasticflow.jobfile.python_source.resolve import Resolver

_MAKERS = {"__init__", "__new__"}
_MOST_BASES = 20


def constructor_of(definition: Definition, resolver: Resolver, level: int = 0) -> Signature:
    """Return what the class takes; nothing where no class on the way defines a constructor.

    Raises:
        CannotTellError: a decorator, metaclass or base hides it.
    """
    if level > _MOST_BASES:
        raise CannotTellError("classes inherit in a circle")
    own = _own(definition, resolver)
    if own is not None:
        return own
    above = bases(definition, resolver)
    if len(above) == 1:
        return constructor_of(above[0], resolver, level + 1)
    inherited = (_own(each, resolver) for each in lineage(definition, resolver)[1:])
    return next((each for each in inherited if each is not None), Signature())


def _own(definition: Definition, resolver: Resolver) -> Signature | None:
    """Return what the class's own constructor takes; None when it has none."""
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
    """A constructor that is assigned, or defined under a condition, is not read."""
    for each in node.body:
        if isinstance(each, ast.Assign) and _MAKERS & {getattr(at, "id", "") for at in each.targets}:
            raise CannotTellError(f"{node.name} is given its constructor")
        if isinstance(each, ast.If | ast.Try | ast.With) and _MAKERS & {
            getattr(at, "name", "") for at in ast.walk(each)
        }:
            raise CannotTellError(f"{node.name} defines its constructor under a condition")


def _dataclass_options(node: ast.ClassDef, module: Module) -> dict[str, object] | None:
    """Return the options of `@dataclass`; None when the class is none, or has other decorators too."""
    if len(node.decorator_list) != 1:
        return None
    mark = node.decorator_list[0]
    call = mark.func if isinstance(mark, ast.Call) else mark
    if origin(module, call) != "dataclasses.dataclass":
        return None
    return _constants(node.name, mark.keywords if isinstance(mark, ast.Call) else [])


def _constants(name: str, keywords: list[ast.keyword]) -> dict[str, object]:
    found = {}
    for each in keywords:
        if each.arg is None or (each.arg in {"init", "kw_only"} and not isinstance(each.value, ast.Constant)):
            raise CannotTellError(f"{name} computes its options")
        found[each.arg] = getattr(each.value, "value", None)
    return found


def _of_dataclass(definition: Definition, resolver: Resolver) -> Signature:
    """Return the fields of a dataclass and of those it inherits from, in the order of its constructor."""
    by_place: dict[str, Parameter] = {}
    by_name: dict[str, Parameter] = {}
    valued: set[str] = set()  # a default may be any attribute of a class below
    for each in reversed(lineage(definition, resolver)):
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
