"""The first parameter of a factory, found by reading source and importing nothing (floor 2)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_HOPS = 5  # re-exports followed


def first_parameter(entry: str, project_root: Path, job_path: Sequence[str]) -> str | None:
    """Return the name of the first parameter of `package.module:attribute`.

    None where that cannot be told: not found, not Python source, built by other code.
    """
    module, _, attribute = entry.partition(":")
    folders = [*(project_root / part for part in job_path), *map(Path, sys.path)]
    return _first_parameter(module, attribute.split("."), folders, _MOST_HOPS)


def _first_parameter(module: str, names: list[str], folders: Sequence[Path], hops: int) -> str | None:
    source = _source(module, folders)
    if source is None or hops == 0:
        return None
    body: list[ast.stmt] = source.body
    for place, name in enumerate(names):
        for node in reversed(body):
            if isinstance(node, ast.ImportFrom) and place == 0:
                target = _reexport(node, name, module, folders)
                if target is not None:
                    return _first_parameter(target[0], [target[1], *names[1:]], folders, hops - 1)
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return _parameter(node, skip=place > 0)
            if isinstance(node, ast.ClassDef) and node.name == name:
                body = node.body
                break
        else:
            return None
    return next(
        (_parameter(n, skip=True) for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__"),
        None,
    )


def _parameter(function: ast.FunctionDef, *, skip: bool) -> str | None:
    """Return the first parameter's name; *skip* leaves out `self` or `cls`."""
    is_static = any(
        isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list
    )
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if skip and not is_static else names
    return names[0] if names else None


def _reexport(
    node: ast.ImportFrom, name: str, module: str, folders: Sequence[Path]
) -> tuple[str, str] | None:
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            package = module.split(".")
            if node.level:
                is_package = _file(module, folders).name == "__init__.py"  # type: ignore[union-attr]
                package = package[: len(package) - node.level + is_package]
                return ".".join([*package, *([node.module] if node.module else [])]), alias.name
            return node.module or "", alias.name
    return None


def _file(module: str, folders: Sequence[Path]) -> Path | None:
    parts = module.split(".")
    for folder in folders:
        for path in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts).with_suffix(".py")):
            if path.is_file():
                return path
    return None


def _source(module: str, folders: Sequence[Path]) -> ast.Module | None:
    path = _file(module, folders)
    if path is None:
        return None
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
