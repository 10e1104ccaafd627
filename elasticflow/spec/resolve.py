"""`module:attribute` -> its definition, followed through re-exports by reading source (floor 1)."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from elasticflow.spec.bindings import bindings, parse
from elasticflow.spec.modules import (
    CannotTellError,
    Finder,
    Module,
    NoModuleError,
    source_of,
)

_MOST_HOPS = 20
_NAMES = re.compile(r"^(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*[=:]", re.MULTILINE)
# Names made at run time: reading cannot show them.
_DYNAMIC = re.compile(
    r"^(?:def )?__getattr__\b|\bglobals\(\)|\bexec\(|sys\.modules\[__name__\]", re.MULTILINE
)


class NoAttributeError(Exception):
    """The module binds no such name; `beside` holds those it does bind."""

    def __init__(self, module: str, name: str, beside: list[str]) -> None:
        super().__init__(name)
        self.module = module
        self.name = name
        self.beside = beside


class UnreadableModuleError(Exception):
    """A module of the job is not valid Python here."""

    def __init__(self, module: Module, error: SyntaxError) -> None:
        super().__init__(f"{shown_file(module)}, line {error.lineno}: {error.msg}")


class MadeByCallError(CannotTellError):
    """The name stands for what a call returns: `curriculum = Curriculum()`."""

    def __init__(self, module: Module, call: ast.Call) -> None:
        super().__init__("it is made by a call")
        self.module = module
        self.call = call


def shown_file(module: Module) -> str:
    """Return a module's file as seen from the current folder, or its full name when it lies outside."""
    assert module.file is not None  # only source has lines
    here = Path.cwd()
    return str(module.file.relative_to(here) if module.file.is_relative_to(here) else module.file)


@dataclass(frozen=True)
class Definition:
    """A function, class or lambda, and the module whose names its source uses."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda

    @property
    def place(self) -> str:
        """File and line, the file as seen from the current folder where it lies inside."""
        return f"{shown_file(self.module)}:{self.node.lineno}"


@dataclass(frozen=True)
class Plain:
    """Something that cannot be called, in words: "a number", "a module"."""

    words: str


Found = Definition | Module | Plain


class Resolver:
    """Finds definitions on one job's path."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder

    def entry(self, module: str, attribute: str) -> Found:
        """Return what `module:attribute` names.

        Raises:
            NoModuleError, NoAttributeError: it does not exist.
            UnreadableModuleError: a module of the job is not valid Python.
            CannotTellError: reading does not show it.
        """
        return self.dotted(self.finder.find(module), attribute.split("."))

    def dotted(self, module: Module, names: list[str], hops: int = 0) -> Found:
        """Return what a dotted name means inside *module*."""
        found = self.name(module, names[0], hops)
        for name in names[1:]:
            if isinstance(found, Module):
                found = self.name(found, name, hops)
            elif isinstance(found, Definition) and isinstance(found.node, ast.ClassDef):
                found = _member(found, name)
            else:
                raise CannotTellError(f"{names[0]} is no class")
        return found

    def name(self, module: Module, name: str, hops: int = 0) -> Found:
        """Return what one name means inside *module*."""
        if hops > _MOST_HOPS:
            raise CannotTellError("imports go round in circles")
        text = source_of(module)
        try:
            statements, is_certain = bindings(text, name)
        except SyntaxError as error:
            if module.is_own:
                raise UnreadableModuleError(module, error) from error
            raise CannotTellError(f"{module.name} is not Python of this version") from error
        if not statements:
            return self._not_bound(module, text, name, hops)
        if not is_certain:
            raise CannotTellError(f"{module.name} binds {name} under a condition")
        return self._meaning(module, statements[0], name, hops + 1)

    def _not_bound(self, module: Module, text: str, name: str, hops: int) -> Found:
        for statement in parse(text) if re.search(r"import[ \t]*\(?[ \t]*\*", text) else []:
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                try:
                    return self.name(self._imported(module, statement), name, hops + 1)
                except NoAttributeError:
                    continue
        if module.folders:
            try:
                return self.finder.find(f"{module.name}.{name}")
            except NoModuleError:
                pass
        if _DYNAMIC.search(text) or re.search(
            rf"\bglobal\b.*\b{name}\b|\bas {name}:|^for .*\b{name}\b", text, re.MULTILINE
        ):
            raise CannotTellError(f"{module.name} makes names at run time")
        names = {first or second for first, second in _NAMES.findall(text)}
        names |= {
            each.asname or each.name
            for statement in parse(text)
            if isinstance(statement, ast.ImportFrom)
            for each in statement.names
        }
        beside = sorted(each for each in names if not each.startswith("_"))
        self.finder.refuse_namespace(module, name, beside)
        raise NoAttributeError(module.name, name, beside)

    def _meaning(self, module: Module, statement: ast.stmt, name: str, hops: int) -> Found:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return Definition(module, statement)
            case ast.Import(names=names):
                one = next(each for each in names if (each.asname or each.name.partition(".")[0]) == name)
                return self.finder.find(one.name if one.asname else name)
            case ast.ImportFrom(names=names):
                original = next(each.name for each in names if (each.asname or each.name) == name)
                return self.name(self._imported(module, statement), original, hops)
            case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(value=ast.expr() as value):
                return self._value(module, value, hops)
            case _:
                raise CannotTellError(f"{name} is bound in a way that reading does not show")

    def _imported(self, module: Module, statement: ast.ImportFrom) -> Module:
        base = statement.module or ""
        if statement.level:
            around = module.package.split(".")
            around = around[: len(around) - statement.level + 1]
            base = ".".join([*around, *([base] if base else [])])
        try:
            return self.finder.find(base)
        except NoModuleError as error:  # an import inside the job's code fails; running will show where
            raise CannotTellError(f"{module.name} imports {base}, which is not there") from error

    def _value(self, module: Module, value: ast.expr, hops: int) -> Found:
        match value:
            case ast.Lambda():
                return Definition(module, value)
            case ast.Name() | ast.Attribute() if names := dotted_names(value):
                return self.dotted(module, names, hops)
            case ast.Constant(value=constant):
                words = {bool: "true or false", str: "a text", int: "a number", float: "a number"}
                return Plain(words.get(type(constant), "None" if constant is None else "a constant"))
            case ast.JoinedStr():
                return Plain("a text")
            case ast.List() | ast.ListComp():
                return Plain("a list")
            case ast.Tuple():
                return Plain("a tuple")
            case ast.Dict() | ast.DictComp():
                return Plain("a dict")
            case ast.Set() | ast.SetComp():
                return Plain("a set")
            case ast.Call():
                raise MadeByCallError(module, value)
            case _:
                raise CannotTellError("it is made by a call")


def dotted_names(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; empty for any other expression."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=inner, attr=name) if names := dotted_names(inner):
            return [*names, name]
        case ast.Subscript(value=inner):  # a generic base: Dataset[Sample]
            return dotted_names(inner)
        case _:
            return []


def _member(found: Definition, name: str) -> Found:
    assert isinstance(found.node, ast.ClassDef)
    for each in reversed(found.node.body):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and each.name == name:
            if isinstance(each, ast.ClassDef) or any(
                dotted_names(mark) == ["staticmethod"] for mark in each.decorator_list
            ):
                return Definition(found.module, each)
            raise CannotTellError(f"{name} is a method")
    if found.node.bases or found.node.decorator_list:
        raise CannotTellError(f"{name} may come from a base of {found.node.name}")
    raise NoAttributeError(f"{found.module.name}:{found.node.name}", name, [])
