"""What a name of a job can turn out to be, and why it cannot be found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from elasticflow.python_source.modules import CannotTellError, Module, UnresolvedError

if TYPE_CHECKING:
    import ast


class NoAttributeError(UnresolvedError):
    """The module or class binds no such name.

    Attributes:
        beside: Names that it does bind and that can be called through it.
        methods: Of a class of the job's own code: its plain methods, which are called on an object of it.
    """

    def __init__(self, module: str, name: str, beside: list[str], methods: tuple[str, ...] = ()) -> None:
        super().__init__(name)
        self.module = module
        self.name = name
        self.beside = beside
        self.methods = methods


class UnreadableModuleError(UnresolvedError):
    """A module of the job is not valid Python here."""

    def __init__(self, module: Module, error: SyntaxError) -> None:
        super().__init__(f"{file_seen_from_here(module)}, line {error.lineno}: {error.msg}")


class MadeByCallError(CannotTellError):
    """The name stands for what a call returns: `curriculum = Curriculum()`."""

    def __init__(self, module: Module, call: ast.Call) -> None:
        super().__init__("it is made by a call")
        self.module = module
        self.call = call


class MethodError(CannotTellError):
    """The name is a method: it is called on an object of its class.

    Attributes:
        owner: The class that was named.
        definition: The method, its `self` bound.
    """

    def __init__(self, owner: Definition, definition: Definition, name: str) -> None:
        super().__init__(f"{name} is a method")
        self.owner = owner
        self.definition = definition


def file_seen_from_here(module: Module) -> str:
    """Return a module's file as seen from the current folder, or its full name when it lies outside."""
    assert module.file is not None  # only source has lines
    current = Path.cwd()
    return str(module.file.relative_to(current) if module.file.is_relative_to(current) else module.file)


class Definition(NamedTuple):
    """A function, class or lambda.

    Attributes:
        module: The module whose names its source uses.
        node: Its source.
        num_bound: Places that are taken: by `functools.partial`, or by the class of a class method.
        preset: Names that `functools.partial` gives a value.
    """

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    num_bound: int = 0
    preset: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """File and line, the file as seen from the current folder where it lies inside."""
        return f"{file_seen_from_here(self.module)}:{self.node.lineno}"


class PlainValue(NamedTuple):
    """Something that cannot be called, in words: "a number", "a module"."""

    words: str


Resolved = Definition | Module | PlainValue


class DottedNames(Protocol):
    """Finds what dotted names mean; `resolve.Resolver` does."""

    def dotted(self, module: Module, names: list[str]) -> Resolved:
        """Return what a dotted name means inside *module*."""
