"""The imports of one function of the entry point."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.source_code import WIDTH

if TYPE_CHECKING:
    from collections.abc import Iterable

_MARGIN = "    "


class Imports:
    """Names of `package.module:attribute` inside one function: each entry is imported once, under a unique name.

    Args:
        taken: Names that have another meaning inside the function.

    Attributes:
        needs_data: The function's code also looks up attributes of the variable `dataset`.
    """

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = frozenset(taken)
        self.needs_data = False
        self._names: dict[tuple[str, str], str] = {}  # (module, imported name) -> name in the function

    def name_of(self, entry: str) -> str:
        """Return the name of *entry* in the function's code, and add its import."""
        module, _, attribute = entry.partition(":")
        first, *rest = attribute.split(".")
        if (module, first) not in self._names:
            self._names[module, first] = self._free_name(module, first)
        return ".".join([self._names[module, first], *rest])

    def lines(self) -> str | None:
        """Return the import statements in isort's order, all lines but the first indented; None without imports."""
        standard: list[str] = []
        others: list[str] = []
        of_modules: dict[str, dict[str, str]] = {}
        for (module, first), name in self._names.items():
            if (module, first) != ("builtins", name):
                of_modules.setdefault(module, {})[first] = name
        for module in sorted(of_modules, key=lambda name: (_natural(name.lower()), name)):
            is_standard = module.partition(".")[0] in sys.stdlib_module_names
            (standard if is_standard else others).extend(_statements(module, of_modules[module]))
        parts = [f"\n{_MARGIN}".join(statements) for statements in (standard, others) if statements]
        return f"\n\n{_MARGIN}".join(parts) or None

    def _free_name(self, module: str, first: str) -> str:
        used = {*self._taken, *self._names.values()}
        last = module.rpartition(".")[2]
        name = next((each for each in (first, f"job_{first}", f"{last}_{first}") if each not in used), first)
        while name in used:
            name += "_"
        return name


def _statements(module: str, names: dict[str, str]) -> list[str]:
    """Return the statements that import *names* (name -> alias) from a module; each renamed import is one statement."""
    plain = sorted((name for name, alias in names.items() if name == alias), key=_order)
    renamed = sorted(
        ((name, alias) for name, alias in names.items() if name != alias), key=lambda pair: _order(pair[0])
    )
    statements = [_statement(module, plain)] if plain else []
    return statements + [_statement(module, [f"{name} as {alias}"]) for name, alias in renamed]


def _statement(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) + len(_MARGIN) <= WIDTH:
        return line
    body = "".join(f"{_MARGIN}{_MARGIN}{name},\n" for name in names)
    return f"from {module} import (\n{body}{_MARGIN})"


def _order(name: str) -> tuple[int, list[tuple[int, str]], str]:
    """Return the sorting key of an imported name: constants, then classes, then other names."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, _natural(name.lower()), name


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key under which 2 comes before 10."""
    return [(int(each), "") if each.isdigit() else (-1, each) for each in re.findall(r"\d+|\D+", text)]
