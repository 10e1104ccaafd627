"""Where modules lie and what their source binds a name to, without importing anything (floor 1).

`importlib.util.find_spec("torch.optim")` would import torch; this looks at files only, in the order Python does.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Beyond this many characters only the definition asked for is parsed: torch/nn/functional.py takes 24 ms, a slice 1 ms.
_LARGE = 30_000


class CannotTellError(Exception):
    """Reading source does not show it: an extension module, a decorator, a package that is not installed here."""


class NotInstalledError(CannotTellError):
    """The top-level package is neither on the job's path nor installed here."""


class NoModuleError(Exception):
    """There is no such module; `near` holds the names that stand beside it."""

    def __init__(self, name: str, beside: list[str]) -> None:
        super().__init__(name)
        self.name = name
        self.beside = beside


@dataclass(frozen=True)
class Module:
    """A module found by its file.

    Attributes:
        name: Dotted name.
        file: Its source; None for a namespace package.
        folders: Where its submodules are looked for; empty for a plain module.
        is_own: On the job's path, not installed.
    """

    name: str
    file: Path | None
    folders: tuple[Path, ...]
    is_own: bool

    @property
    def package(self) -> str:
        """Name that relative imports start from."""
        return self.name if self.folders else self.name.rpartition(".")[0]


@dataclass(frozen=True)
class Finder:
    """Finds modules: on the job's own path first, then among what is installed."""

    own: tuple[Path, ...]
    installed: tuple[Path, ...]

    def find(self, name: str) -> Module:
        """Return the module.

        Raises:
            NoModuleError: its package is here and has no such module.
            NotInstalledError: the top-level package is not here.
            CannotTellError: it is built in or compiled.
        """
        top, *rest = name.split(".")
        module = _look(top, top, self.own, is_own=True) or _look(top, top, self.installed, is_own=False)
        if module is None:
            if top in sys.builtin_module_names:
                raise CannotTellError(f"{top} is built into Python")
            raise NotInstalledError(top)
        for part in rest:
            inner = _look(f"{module.name}.{part}", part, module.folders, is_own=module.is_own)
            if inner is None:
                if re.search(rf"\b(?:{part}|__path__|sys\.modules)\b", source_of(module)):
                    raise CannotTellError(f"{module.name} makes its own submodules")
                raise NoModuleError(f"{module.name}.{part}", _names_in(module.folders))
            module = inner
        return module

    def names(self) -> list[str]:
        """Return the top-level modules on the job's own path."""
        return _names_in(self.own)


def _look(name: str, part: str, places: tuple[Path, ...], *, is_own: bool) -> Module | None:
    namespace: list[Path] = []
    for place in places:
        folder = place / part
        if (folder / "__init__.py").is_file():
            return Module(name, folder / "__init__.py", (folder,), is_own)
        if (place / f"{part}.py").is_file():
            return Module(name, place / f"{part}.py", (), is_own)
        if any((place / f"{part}{end}").is_file() for end in _compiled()):
            raise CannotTellError(f"{name} is compiled")
        if folder.is_dir():
            namespace.append(folder)
    return Module(name, None, tuple(namespace), is_own) if namespace else None


@functools.cache
def _compiled() -> tuple[str, ...]:
    return (*importlib.machinery.EXTENSION_SUFFIXES, ".pyc")


def _names_in(places: tuple[Path, ...]) -> list[str]:
    names = set()
    for place in places:
        for each in place.iterdir() if place.is_dir() else ():
            if each.suffix == ".py" or (each.is_dir() and each.name.isidentifier()):
                names.add(each.stem)
    return sorted(names - {"__init__", "__pycache__"})


def source_of(module: Module) -> str:
    """Return the module's source; empty for a namespace package.

    Raises:
        CannotTellError: it cannot be read.
    """
    if module.file is None:
        return ""
    facts = module.file.stat()
    return _read(module.file, facts.st_mtime_ns, facts.st_size)


@functools.lru_cache(maxsize=256)
def _read(file: Path, _changed: int, _size: int) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotTellError(f"{file} cannot be read") from error


@functools.lru_cache(maxsize=256)
def parse(text: str) -> list[ast.stmt]:
    """Return the statements of a source text.

    Raises:
        SyntaxError: it is not Python of this version.
    """
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
            return ast.parse(text).body
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(str(error)) from error


def bindings(text: str, name: str) -> tuple[list[ast.stmt], bool]:
    """Return the statements that bind *name* at module level, last first, and whether all of them always run."""
    if len(text) > _LARGE and (one := _slice(text, name)):
        return [one], True
    found: list[ast.stmt] = []
    inner: list[ast.stmt] = []
    for statement in parse(text):
        if _binds(statement, name):
            found.append(statement)
        inner += [each for each in _conditional(statement) if _binds(each, name)]
    return [*reversed(found), *reversed(inner)], not inner


def _slice(text: str, name: str) -> ast.stmt | None:
    """Return the one top-level definition of *name*, parsed alone; None when it is not that simple."""
    heads = [at for word in ("def", "class", "async def") for at in _lines(text, f"{word} {name}", "(:[ \t")]
    rebinding = _lines(text, name, "=: \t")
    if rebinding or len(heads) != 1:
        return None
    start = heads[0]
    while start and text[text.rfind("\n", 0, start - 1) + 1] in "@)":  # its decorators
        start = text.rfind("\n", 0, start - 1) + 1
    end = re.compile(r"^[^\s#)\]}]", re.MULTILINE).search(text, text.find("\n", heads[0]) + 1)
    try:
        body = parse("\n" * text.count("\n", 0, start) + text[start : end.start() if end else len(text)])
    except SyntaxError:
        return None
    return body[0] if len(body) == 1 else None


def _lines(text: str, start: str, then: str) -> list[int]:
    """Return where lines begin with *start* and one of the characters *then*; many times faster than a pattern."""
    found, at = [], 0 if text.startswith(start) else text.find(f"\n{start}") + 1
    while at or text.startswith(start, at):
        if text[at + len(start) : at + len(start) + 1] in then:
            found.append(at)
        at = text.find(f"\n{start}", at) + 1
        if not at:
            break
    return found


def _conditional(statement: ast.stmt) -> list[ast.stmt]:
    """Return the statements inside an `if`, `try` or `with` at module level; not those for type checkers only."""
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
        return statement.orelse
    if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
        direct = [each for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
        handlers = [each for handler in getattr(statement, "handlers", []) for each in handler.body]
        return [deeper for each in (*direct, *handlers) for deeper in (each, *_conditional(each))]
    return []


def _binds(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return statement.name == name
        case ast.Import():
            return any((each.asname or each.name.partition(".")[0]) == name for each in statement.names)
        case ast.ImportFrom():
            return any((each.asname or each.name) == name for each in statement.names)
        case ast.Assign(targets=targets):
            return any(name in _targets(each) for each in targets)
        case ast.AnnAssign(target=ast.Name(id=target), value=value):
            return target == name and value is not None
        case _:
            return False


def _targets(target: ast.expr) -> list[str]:
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [name for part in parts for name in _targets(part)]
        case ast.Starred(value=inner):
            return _targets(inner)
        case _:
            return []  # AdamW.__doc__ = ... binds no name
