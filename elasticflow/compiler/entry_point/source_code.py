"""Python source out of values and calls, laid out as ruff's formatter would."""

from __future__ import annotations

import keyword
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticflow.errors import JobRefusedError

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


def call(name: str, *positional: Code, **named: Any) -> Call:
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
