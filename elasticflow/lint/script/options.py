"""Options of a script, by its argument parser and module constants, and the default value of conditions."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.lint.script.values import passed
from elasticflow.python_source.syntax import argument, called_name, has_unpacked, is_constant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.python_source.script import Script

_MOST_HOPS = 4
_UNKNOWN = object()


class Option(NamedTuple):
    """An option that is off unless it is given.

    Attributes:
        name: The attribute of the parsed arguments, or the variable of the module.
        spelling: The option as typed, `--resume`, or the variable.
        default: Value without the option.
    """

    name: str
    spelling: str
    default: object


class Options:
    """The options of one script, with the defaults that a start without arguments has."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._arguments = {each.name: each for call in script.calls for each in _added(call)}

    def of(self, node: ast.expr) -> Option | None:
        """Return the option that an expression reads; None for other expressions, and if the file changes the option."""
        if isinstance(node, ast.Attribute) and (option := self._arguments.get(node.attr)) is not None:
            later = self._script.names.assigned_attribute(node.attr)
            is_known = all(isinstance(each, ast.Constant) and not each.value for each in later)
            return option if is_known else None
        if isinstance(node, ast.Name):
            return self._of_module(node)
        return None

    def _of_module(self, node: ast.Name) -> Option | None:
        """Return a variable that the module sets to a constant, the option of scripts without a parser."""
        values = self._script.names.assigned(node.id)
        if len(values) != 1 or not isinstance(values[0], ast.Constant):
            return None
        if not isinstance(self._script.scope_of(values[0]), ast.Module):
            return None
        return Option(node.id, node.id, values[0].value)

    def by_default(self, test: ast.expr, hops: int = _MOST_HOPS) -> tuple[bool | None, Option | None]:
        """Return the value of a condition without options, and the option that decides it; None if uncertain."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                value, option = self.by_default(inner, hops)
                return (None if value is None else not value), option
            case ast.BoolOp(op=operation, values=values):
                return self._of_several([self.by_default(each, hops) for each in values], isinstance(operation, ast.And))  # fmt: skip
            case ast.Compare(left=left, ops=[operation], comparators=[ast.Constant(value=other)]):
                option, default = self._value(left, hops)
                return (None if default is _UNKNOWN else _compared(default, operation, other)), option
            case _:
                option, default = self._value(test, hops)
                return (None if default is _UNKNOWN else bool(default)), option

    @staticmethod
    def _of_several(parts: Sequence[tuple[bool | None, Option | None]], is_and: bool) -> tuple[bool | None, Option | None]:  # fmt: skip
        for value, option in parts:
            if value is not None and value is not is_and:  # one part decides
                return value, option
        return (is_and, parts[0][1]) if all(value is is_and for value, _ in parts) else (None, None)

    def _value(self, node: ast.expr, hops: int) -> tuple[Option | None, object]:
        """Return the default of an option, also of one passed to a function; unknown for all other expressions."""
        if (option := self.of(node)) is not None:
            return option, option.default
        given = self._given(node) if hops else []
        found = [self._value(each, hops - 1) for each in given if each is not node]
        if found and len(found) == len(given) and len({repr(value) for _, value in found}) == 1:
            return found[0]
        return None, _UNKNOWN

    def _given(self, node: ast.expr) -> list[ast.expr]:
        """Return the values that calls of this file pass for a parameter, unless it was reassigned before."""
        function = self._script.function_of(node)
        if not isinstance(node, ast.Name) or function is None:
            return []
        if any(value is None or (self._script.function_of(value) is function and value.lineno < node.lineno) for value in self._script.names.assigned(node.id)):  # fmt: skip
            return []
        given = [
            passed(self._script, call, function, node.id) for call in self._script.callers.get(function, [])
        ]
        return [each for each in given if each is not None] if None not in given else []


def _added(call: ast.Call) -> list[Option]:
    """Return the option that a call adds to a parser, if its default is known."""
    if called_name(call) not in {"add_argument", "add_arg"} or has_unpacked(call):
        return []
    flags = [
        each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]
    if not flags or not all(flag.startswith("-") for flag in flags):
        return []
    spelling = next((flag for flag in flags if flag.startswith("--")), max(flags, key=len))
    dest, action, default = argument(call, "dest"), argument(call, "action"), argument(call, "default")
    name = dest.value if isinstance(dest, ast.Constant) else spelling.lstrip("-").replace("-", "_")
    kind = action.value if isinstance(action, ast.Constant) else None
    value: object = None
    if isinstance(default, ast.Constant):
        value = default.value
    elif default is not None:
        return []
    elif kind == "store_false":
        value = True
    return [Option(str(name), spelling, value)]


def _compared(value: object, operation: ast.cmpop, other: object) -> bool | None:
    match operation:
        case ast.Eq() | ast.Is():
            return value == other
        case ast.NotEq() | ast.IsNot():
            return value != other
        case _:
            return None


def required_arguments(script: Script) -> list[str]:
    """Return the required arguments of the script's own parser, as typed: `total_epochs`, `--data`."""
    found = []
    for call in script.calls:
        if called_name(call) != "add_argument" or not call.args:
            continue
        names = [
            each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
        if not names:
            continue
        if names[0].startswith("-"):
            if is_constant(argument(call, "required"), True):
                found.append(max(names, key=len))
        elif not (isinstance(count := argument(call, "nargs"), ast.Constant) and count.value in {"?", "*"}):
            found.append(names[0])
    return found
