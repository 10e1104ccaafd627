"""The possible meanings of a name in a job, and the errors if it cannot be found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from elasticflow.python_source.modules import CannotTellError, Module, UnresolvedError

if TYPE_CHECKING:
    import ast


class NoAttributeError(UnresolvedError):
    """The module or class binds no such name.

    Attributes:
        beside: Callable names that the module or class does bind.
        methods: The plain methods of a class in the job's own code, which need an object of the class.
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
        line = "" if error.lineno is None else f", line {error.lineno}"
        super().__init__(f"{file_seen_from_here(module)}{line}: {error.msg}")


class MadeByCallError(CannotTellError):
    """The name stands for the result of a call: `curriculum = Curriculum()`."""

    def __init__(self, module: Module, call: ast.Call) -> None:
        super().__init__("it is made by a call")
        self.module = module
        self.call = call


class MethodError(CannotTellError):
    """The name is a method, which needs an object of its class."""

    def __init__(self, owner: Definition, definition: Definition, name: str) -> None:
        super().__init__(f"{name} is a method")
        self.owner = owner
        self.definition = definition


def file_seen_from_here(module: Module) -> str:
    """Return a module's file relative to the current folder, or its full path if it lies outside."""
    assert module.file is not None  # only source has lines
    current = Path.cwd()
    return str(module.file.relative_to(current) if module.file.is_relative_to(current) else module.file)


class Definition(NamedTuple):
    """A function, class or lambda.

    Attributes:
        module: The module in whose namespace the source is read.
        num_bound: Number of positional arguments bound by `functools.partial`, or by the class of a class method.
        preset: Names of the keyword arguments bound by `functools.partial`.
    """

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
    num_bound: int = 0
    preset: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """File and line, the file relative to the current folder if it lies inside."""
        return f"{file_seen_from_here(self.module)}:{self.node.lineno}"


class PlainValue(NamedTuple):
    """Something that cannot be called, in words: "a number", "a module"."""

    words: str


Resolved = Definition | Module | PlainValue


class DottedNames(Protocol):
    """Finds the meaning of dotted names; `resolve.Resolver` implements it."""

    def dotted(self, module: Module, names: list[str]) -> Resolved:
        """Return the meaning of a dotted name inside *module*."""
