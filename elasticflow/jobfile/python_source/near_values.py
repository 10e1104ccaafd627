"""The value that was most likely meant by one that a parameter does not take."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.python_source.annotations import fits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.python_source.modules import Module

_NUMBER, _TRUTH = "a number", "true or false"


def in_words_of_default(default: ast.expr | None, value: object) -> str:
    """Return what a parameter without an annotation takes, by its default; empty unless a text says just that.

    `"1e-3"` for `lr=0.1` is a slip; `"auto"` for it may be meant.
    """
    if isinstance(default, ast.UnaryOp):
        default = default.operand
    if not isinstance(value, str) or not isinstance(default, ast.Constant):
        return ""
    if isinstance(default.value, bool):
        return _TRUTH if value.lower() in {"true", "false"} else ""
    if isinstance(default.value, int | float):
        return _NUMBER if next(as_numbers(value.strip()), None) is not None else ""
    return ""


def near_value(value: object, wanted: ast.expr | str, module: Module | None = None) -> str | None:
    """Return what was most likely meant, as the job file writes it."""
    from elasticflow.jobfile.diagnostics.toml_literals import written

    for each in ways(value):
        if isinstance(wanted, str):
            kind: type | tuple[type, ...] = bool if wanted == _TRUTH else (int, float)
            is_good = isinstance(each, kind) and (isinstance(each, bool) is (wanted == _TRUTH))
        else:
            is_good = module is not None and fits(each, wanted, module)
        if is_good and (type(each), each) != (type(value), value):
            return _as_typed(value, each) or written(each)
    return None


def _as_typed(value: object, meant: object) -> str | None:
    """Return a number as it stands in the text that it was given as: 1e-3 is easier to know again than 0.001."""
    import tomli

    if not isinstance(value, str) or isinstance(meant, str | list | dict):
        return None
    try:
        is_same = tomli.loads(f"v = {value}") == {"v": meant}
    except tomli.TOMLDecodeError:
        return None
    return value.strip() if is_same else None


def ways(value: object) -> Iterator[object]:
    """Yield other ways to write the value of an argument, the likeliest first."""
    if isinstance(value, str):
        text = value.strip()
        yield from as_numbers(text)
        if text.lower() in {"true", "false"}:
            yield text.lower() == "true"
        if "," in text:
            parts = [each.strip() for each in text.strip("[]() ").split(",") if each.strip()]
            yield [next(as_numbers(each), each) for each in parts]
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if isinstance(value, list):
        yield [next(as_numbers(each), each) if isinstance(each, str) else each for each in value]
        yield from value if len(value) == 1 else ()
    elif not isinstance(value, dict):
        yield from ([value], str(value))


def as_numbers(text: str) -> Iterator[int | float]:
    """Yield the number that a text is: `8`, `1_000`, `1,000`, `1e-3`, `50%`."""
    bare = text.replace(",", "") if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+", text) else text
    for kind in (int, float):
        try:
            if len(bare) < 30 and bare.isascii() and re.match(r"[+-]?[.\d]", bare):
                yield kind(bare)
        except ValueError:
            continue
    if re.fullmatch(r"\d+(\.\d+)?\s?%", text):
        yield float(text.rstrip("% ")) / 100
