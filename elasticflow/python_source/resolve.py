"""`module:attribute` -> its definition, followed through re-exports and classes by reading source."""

from __future__ import annotations

import ast
import functools
import re
from keyword import iskeyword
from typing import TYPE_CHECKING

from elasticflow.python_source.bindings import HIDDEN_STAR, bindings, origin, parse_python
from elasticflow.python_source.classes import bound_in, classes_of
from elasticflow.python_source.modules import (
    CannotTellError,
    Definition,
    Finder,
    MadeByCallError,
    MethodError,
    Module,
    NoAttributeError,
    NoModuleError,
    PlainValue,
    Resolved,
    UnreadableModuleError,
    source_of,
)
from elasticflow.python_source.syntax import dotted_names, imported_from, is_for_checkers

if TYPE_CHECKING:
    from elasticflow.python_source.modules import DottedNames

_MOST_HOPS = 20
_NAMES = re.compile(r"^(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*[=:]", re.MULTILINE)
_PLAIN: dict[type[ast.expr], str] = {
    ast.JoinedStr: "a text", ast.Tuple: "a tuple", ast.List: "a list", ast.ListComp: "a list",
    ast.Dict: "a dict", ast.DictComp: "a dict", ast.Set: "a set", ast.SetComp: "a set",
}  # fmt: skip
# Text that makes names at run time, which reading cannot show.
_DYNAMIC = re.compile(
    r"^(?:def )?__getattr__\b|\bglobals\(\)|\bexec\(|sys\.modules\[__name__\]", re.MULTILINE
)


@functools.lru_cache(maxsize=256)
def _stars(text: str) -> list[ast.ImportFrom]:
    """Return the star imports that always run, the last one first: it wins."""
    statements = parse_python(text) if re.search(r"import[ \t]*\(?[ \t]*\*", text) else []
    return [
        each
        for each in reversed(statements)
        if isinstance(each, ast.ImportFrom) and each.names[0].name == "*"
    ]


@functools.lru_cache(maxsize=256)
def _hidden_stars(text: str) -> tuple[int, ...]:
    """Return the lines, from 0, with a star import under a condition; takes a millisecond for torch's large modules."""
    return tuple(text.count("\n", 0, star.start()) for star in re.finditer(HIDDEN_STAR, text, re.MULTILINE))


class Resolver:
    """Finds definitions on one job's path."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder

    def entry(self, entry: str) -> Resolved:
        """Return the definition that `module:attribute` names.

        Raises:
            NoModuleError, NoAttributeError: the module or the attribute does not exist.
            UnreadableModuleError: a module of the job is not valid Python.
            CannotTellError: reading does not show the definition.
        """
        module, _, attribute = entry.partition(":")
        return self.dotted(self.finder.find(module), attribute.split("."))

    def dotted(self, module: Module, names: list[str], hops: int = 0) -> Resolved:
        """Return the meaning of a dotted name inside *module*."""
        resolved = self.name(module, names[0], hops)
        for name in names[1:]:
            if isinstance(resolved, Module):
                resolved = self.name(resolved, name, hops)
            elif isinstance(resolved, Definition) and isinstance(resolved.node, ast.ClassDef):
                resolved = member_of(resolved, name, self)
            else:
                raise CannotTellError(f"{names[0]} is no class")
        return resolved

    def name(self, module: Module, name: str, hops: int = 0) -> Resolved:
        """Return the meaning of a single name inside *module*."""
        if hops > _MOST_HOPS:
            raise CannotTellError("imports go round in circles")
        text = source_of(module)
        try:
            statements, is_certain = bindings(text, name, is_cut=not module.is_own)
            stars = _stars(text)
        except SyntaxError as error:
            if module.is_own:
                raise UnreadableModuleError(module, error) from error
            raise CannotTellError(f"{module.name} is not Python of this version") from error
        if not statements and _DYNAMIC.search(text):  # a package of lazy imports shows them to type checkers
            statements = [
                each for each in _for_checkers(text) if name in {one.asname or one.name for one in each.names}
            ]
        after = statements[0].lineno if statements else 0
        if any(line >= after for line in _hidden_stars(text)):
            raise CannotTellError(f"{module.name} imports names under a condition")
        beside: set[str] = set()
        below = [each for each in stars if each.lineno > after]
        if (found := self._of_stars(module, below, name, hops, beside)) is not None:
            if statements and isinstance(found, Module):
                raise CannotTellError(f"{module.name} may import the module {name} over its own")
            return found
        if not statements:
            return self._not_bound(module, text, name, beside)
        if not is_certain:
            raise CannotTellError(f"{module.name} binds {name} under a condition")
        return self._meaning(module, statements[0], name, hops + 1)

    def _of_stars(
        self, module: Module, stars: list[ast.ImportFrom], name: str, hops: int, beside: set[str]
    ) -> Resolved | None:
        """Return what the first of some star imports binds *name* to; None if nothing: *beside* gets their other names."""
        for star in stars:
            source = self._imported(module, star)
            try:
                if _star_binds(source_of(source), name):
                    return self.name(source, name, hops + 1)
            except NoAttributeError as error:
                beside.update(error.beside)
        return None

    def _not_bound(self, module: Module, text: str, name: str, names: set[str]) -> Resolved:
        if module.folders:
            try:
                return self.finder.find(f"{module.name}.{name}")
            except NoModuleError:
                pass
        if _DYNAMIC.search(text) or re.search(
            rf"\bglobal\b.*\b{name}\b|\bas {name}:|\b{name}[ \t]*:=|^[ \t]*for .*\b{name}\b",
            text,
            re.MULTILINE,
        ):
            raise CannotTellError(f"{module.name} makes names at run time")
        names |= {first or second for first, second in _NAMES.findall(text)}
        names |= {
            each.asname or each.name
            for statement in parse_python(text)
            if isinstance(statement, ast.ImportFrom)
            for each in statement.names
        }
        beside = sorted(
            each for each in names if each.isidentifier() and each[0] != "_" and not iskeyword(each)
        )
        self.finder.refuse_namespace(module, name, beside)
        raise NoAttributeError(module.name, name, beside)

    def _meaning(self, module: Module, statement: ast.stmt, name: str, hops: int) -> Resolved:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return Definition(module, statement)
            case ast.Import(names=names):
                alias = next(each for each in names if (each.asname or each.name.partition(".")[0]) == name)
                return self.finder.find(alias.name if alias.asname else name)
            case ast.ImportFrom(names=names):
                original = next(each.name for each in names if (each.asname or each.name) == name)
                source = self._imported(module, statement)
                if source == module:  # a package that imports from itself means its submodules
                    return self.finder.find(f"{module.name}.{original}")
                return self.name(source, original, hops)
            case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(value=ast.expr() as value):
                return self._value(module, value, hops)
            case _:
                raise CannotTellError(f"{name} is bound in a way that reading does not show")

    def _imported(self, module: Module, statement: ast.ImportFrom) -> Module:
        base = imported_from(statement, module)
        try:
            return self.finder.find(base)
        except NoModuleError as error:  # an import inside the job's code fails; running will show where
            raise CannotTellError(f"{module.name} imports {base}, which is not there") from error

    def _value(self, module: Module, value: ast.expr, hops: int) -> Resolved:
        match value:
            case ast.Lambda():
                return Definition(module, value)
            case ast.Name() | ast.Attribute() if names := dotted_names(value):
                if origin(module, value).startswith("builtins."):
                    raise CannotTellError(f"{'.'.join(names)} is built into Python")
                return self.dotted(module, names, hops)
            case ast.Constant(value=constant):
                words = {bool: "true or false", str: "a text", int: "a number", float: "a number"}
                return PlainValue(words.get(type(constant), "None" if constant is None else "a constant"))
            case ast.Call():
                return self._called(module, value, hops)
            case _ if type(value) in _PLAIN:
                return PlainValue(_PLAIN[type(value)])
            case _:
                raise CannotTellError("it is made by a call")

    def _called(self, module: Module, call: ast.Call, hops: int) -> Definition:
        """Return the definition with the arguments of a `functools.partial` bound."""
        names = [each.arg for each in call.keywords if each.arg is not None]
        is_plain = len(names) == len(call.keywords) and not any(isinstance(a, ast.Starred) for a in call.args)
        if is_plain and call.args and origin(module, call.func) == "functools.partial":
            inner = self._value(module, call.args[0], hops)
            if isinstance(inner, Definition):
                bound = inner.num_bound + len(call.args) - 1
                return inner._replace(num_bound=bound, preset=(*inner.preset, *names))
        raise MadeByCallError(module, call)


def _star_binds(text: str, name: str) -> bool:
    """Return whether `import *` of a module with this text may bind *name*: False only if it certainly does not."""
    try:
        statements, _ = bindings(text, "__all__")
    except SyntaxError:
        return True  # reported when the name is looked up
    match statements:
        case []:
            return not name.startswith("_")
        case [ast.Assign(value=ast.List(elts=parts) | ast.Tuple(elts=parts))] if text.count("__all__") == 1:
            listed = [part.value for part in parts if isinstance(part, ast.Constant)]
            return len(listed) < len(parts) or name in listed
        case _:
            return True


@functools.lru_cache(maxsize=256)
def _for_checkers(text: str) -> list[ast.ImportFrom]:
    """Return the imports that a module shows to type checkers only."""
    if "TYPE_CHECKING" not in text:
        return []
    blocks = filter(is_for_checkers, parse_python(text))
    return [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]


_CALLED_ON_CLASS = {"builtins.classmethod", "builtins.staticmethod"}
_NO_PLAIN_METHODS = _CALLED_ON_CLASS | {"builtins.property", "functools.cached_property"}


def member_of(owner: Definition, name: str, resolver: DottedNames) -> Definition:
    """Return a class method, a static method or an inner class, the class's own or inherited.

    Raises:
        NoAttributeError: the class has no such name.
        CannotTellError: the name is bound in another way, or may come from a base or a decorator.
    """
    assert isinstance(owner.node, ast.ClassDef)
    own = _own_member(owner, name)
    classes = [owner] if own else list(classes_of(owner, resolver))
    for each in classes[1:]:
        own = own or _own_member(each, name)
    if own:
        return own
    if owner.node.decorator_list or owner.node.keywords:
        raise CannotTellError(f"{name} may come from a decorator of {owner.node.name}")
    methods = {method for each in classes if each.module.is_own for method in _plain_methods(each)}
    owner_name = f"{owner.module.name}:{owner.node.name}"
    raise NoAttributeError(owner_name, name, _callable_names(owner), tuple(sorted(methods)))


def _own_member(owner: Definition, name: str) -> Definition | None:
    assert isinstance(owner.node, ast.ClassDef)
    for statement in reversed(owner.node.body):
        if name in bound_in(statement):
            return _as_called(owner, statement, name)
    return None


def _as_called(owner: Definition, member: ast.stmt, name: str) -> Definition:
    if isinstance(member, ast.ClassDef):
        return Definition(owner.module, member)
    if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
        kinds = {origin(owner.module, mark) for mark in member.decorator_list}
        if "builtins.staticmethod" in kinds:
            return Definition(owner.module, member)
        if "builtins.classmethod" in kinds:
            return Definition(owner.module, member, num_bound=1)
        if "builtins.property" in kinds:
            raise CannotTellError(f"{name} is a property")
        raise MethodError(owner, Definition(owner.module, member, num_bound=1), name)
    raise CannotTellError(f"{name} is bound in a way that reading does not show")


def _callable_names(owner: Definition) -> list[str]:
    """Return the names that can be called through the class itself."""
    names = []
    assert isinstance(owner.node, ast.ClassDef)
    for each in owner.node.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            kinds = {origin(owner.module, mark) for mark in each.decorator_list}
            if isinstance(each, ast.ClassDef) or kinds & _CALLED_ON_CLASS:
                names.append(each.name)
    return sorted(names)


def _plain_methods(owner: Definition) -> list[str]:
    """Return the names of the public methods that need an object of the class."""
    assert isinstance(owner.node, ast.ClassDef)
    return [
        each.name
        for each in owner.node.body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
        if not {origin(owner.module, mark) for mark in each.decorator_list} & _NO_PLAIN_METHODS
    ]
