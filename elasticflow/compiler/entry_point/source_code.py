"""Python source out of values and calls, laid out as ruff's formatter would."""

from __future__ import annotations

import keyword
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.errors import JobRefusedError

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


WIDTH = 110


@dataclass(frozen=True)
class Call:
    """`name(argument, key=argument)`; each argument is a prefix (`key=`, or nothing) and a value."""

    name: str
    arguments: tuple[tuple[str, Code], ...]


@dataclass(frozen=True)
class Display:
    """A list, tuple or dict; each item is a prefix (`"key": `, or nothing) and a value."""

    opening: str
    items: tuple[tuple[str, Code], ...]
    closing: str


Code = str | Call | Display
"""An expression: finished text, or something that may be broken over several lines."""


def flat(code: Code) -> str:
    """Return *code* on one line."""
    if isinstance(code, Call):
        return f"{code.name}({_joined(code.arguments)})"
    if isinstance(code, Display):
        lone_comma = "," if code.opening == "(" and len(code.items) == 1 else ""
        return f"{code.opening}{_joined(code.items)}{lone_comma}{code.closing}"
    return code


def _joined(parts: tuple[tuple[str, Code], ...]) -> str:
    return ", ".join(prefix + flat(code) for prefix, code in parts)


def layout(code: Code, *, indent: int = 0, before: str = "", after: str = "") -> str:
    """Return *before*, *code* and *after* on one line if it fits, else broken as ruff breaks it.

    Args:
        indent: Columns before the first character of every line.
        before: Text before the expression on the first line, like `x = `.
        after: Text after the expression on the last line, like a comma.
    """
    margin = " " * indent
    line = f"{margin}{before}{flat(code)}{after}"
    if len(line) <= WIDTH or isinstance(code, str):
        return line
    parts = code.arguments if isinstance(code, Call) else code.items
    if not parts:
        return line
    opening, closing = (f"{code.name}(", ")") if isinstance(code, Call) else (code.opening, code.closing)
    body = f"{margin}    {_joined(parts)}"
    # A call keeps its arguments together on the next line if they fit there; a list or dict never does.
    if isinstance(code, Display) or len(body) > WIDTH:
        body = "\n".join(layout(part, indent=indent + 4, before=prefix, after=",") for prefix, part in parts)
    return f"{margin}{before}{opening}\n{body}\n{margin}{closing}{after}"


@dataclass(frozen=True)
class Name:
    """A name in the generated file, told apart from a string."""

    text: str


def call(name: str, /, *positional: Code, **named: Any) -> Call:
    """Return a call whose named arguments are code (Call, Display, Name), or values that are written as literals."""
    arguments = [("", argument) for argument in positional]
    arguments += [(f"{key}=", literal(value, key)) for key, value in named.items()]
    return Call(name, tuple(arguments))


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None: a call leaves the others out."""
    return {name: value for name, value in options.items() if value is not None}


def keywords(args: Mapping[str, Any], where: str) -> tuple[tuple[str, Code], ...]:
    """Return *args* as keyword arguments."""
    plain = {key: value for key, value in args.items() if key.isidentifier() and not keyword.iskeyword(key)}
    rest = {key: value for key, value in args.items() if key not in plain}
    arguments = [(f"{key}=", literal(value, f"{where}.{key}")) for key, value in plain.items()]
    if rest:
        arguments.append(("**", literal(rest, where)))
    return tuple(arguments)


def literal(value: Any, where: str) -> Code:
    """Return the Python literal of a TOML value.

    Args:
        value: A string, number, boolean, None, list, tuple, dict, or a Name.
        where: The key, for the error.

    Raises:
        JobRefusedError: the value is a date or time, which a job cannot pass on.
    """
    match value:
        case Call() | Display():
            return value
        case Name():
            return value.text
        case Mapping():
            items = [(f"{quoted(key)}: ", literal(item, f"{where}.{key}")) for key, item in value.items()]
            return Display("{", tuple(items), "}")
        case list() | tuple():
            opening, closing = "()" if isinstance(value, tuple) else "[]"
            items = [("", literal(item, f"{where}[{number}]")) for number, item in enumerate(value)]
            return Display(opening, tuple(items), closing)
        case _:
            return _scalar(value, where)


def _scalar(value: object, where: str) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value).replace("e+", "e")  # 1e16, as formatters write it
    raise JobRefusedError(
        f"{where}: a {type(value).__name__} cannot be an argument",
        "write it as a string and let the factory parse it",
    )


def quoted(text: str) -> str:
    """Return *text* as a string literal, in double quotes unless those cost more escapes."""
    quote = '"' if text.count('"') <= text.count("'") else "'"
    body = "".join(c if c in "'\"" else repr(c)[1:-1] for c in text)
    return quote + body.replace(quote, "\\" + quote) + quote
