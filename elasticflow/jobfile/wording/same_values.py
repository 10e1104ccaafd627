"""Corrections of a value that its key does not take: only the same value in another type or spelling."""

from __future__ import annotations

import datetime as dt
import re
import shlex
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter, ValidationError

from elasticflow.jobfile.diagnostics.suggestions import SHORT_MODULES, nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.type_checks.annotations import as_numbers
from elasticflow.jobfile.wording.foreign_names import ENTRIES, SAME_VALUES, plain
from elasticflow.jobfile.wording.type_descriptions import annotation_at, choices, keys_at, model_at
from elasticflow.system.units import BYTES, COUNTS, SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.positions import KeyPath

_MOST = 200  # characters; a longer text is not a slip
_YES, _NO = {"true", "yes", "on"}, {"false", "no", "off"}
_AMOUNT = re.compile(r"([0-9][0-9_.]*)\s*([A-Za-z]+)")
_CLOCK = re.compile(r"(?:(\d+)[-:])?(\d+):(\d\d):(\d\d)")  # 1-02:00:00 of Slurm, 01:02:00:00 of Lightning
_CALL = re.compile(r"\s*\(.*\)$", re.DOTALL)


def accepts(path: KeyPath, value: object) -> bool:
    """Return whether the key at *path*, which the models have, takes a value."""
    # Elements of a list have one type, and so have the keys of a free table.
    alike = tuple(0 if isinstance(part, int) else part for part in path)
    if isinstance(alike[-1], str) and not keys_at(alike[:-1]):
        alike = (*alike[:-1], "NAME")
    try:
        _adapter(alike).validate_python(value, strict=True)
    except (ValidationError, RecursionError):
        return False
    return True


@lru_cache(maxsize=256)
def _adapter(path: KeyPath) -> TypeAdapter[Any]:
    model = model_at(path[:-1])
    if model is not None and path[-1] in model.model_fields:
        field = model.model_fields[str(path[-1])]
        annotation: Any = field.annotation
        return TypeAdapter(Annotated[annotation, *field.metadata] if field.metadata else annotation)
    return TypeAdapter(annotation_at(path))


def same_value(path: KeyPath, value: object) -> object | None:
    """Return the same value in a form that the key at *path* takes; None if there is none."""
    if isinstance(value, str) and len(value) > _MOST:
        return None
    return next((each for each in _forms(path, value) if accepts(path, each)), None)


def _forms(path: KeyPath, value: object) -> Iterator[object]:
    """Yield other types and spellings of a value, the nearest first."""
    if isinstance(value, str):
        yield from _forms_of_text(path, value.strip())
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, dt.date | dt.time):
        yield from _forms_of_text(path, str(value))
    if value in (0, 1) and not isinstance(value, bool):
        yield value == 1
    if isinstance(value, str | bool | int | float):
        words = value.strip() if isinstance(value, str) else str(value).lower()
        listed = [str(each) for each in choices(annotation_at(path))]
        if (same := SAME_VALUES.get(words.lower())) in listed:
            yield same
        yield from nearest(words.lower(), listed)
        yield words
    if isinstance(value, list):
        yield from value if len(value) == 1 else ()
    else:
        yield as_list(path, value)


_COMMANDS = {("script", "args"), ("notify", "command"), ("kubernetes", "pre_stop")}


def as_list(path: KeyPath, value: object) -> list[object] | None:
    """Return a value as the list that was meant: of a command its words, of a text with commas or lines their parts.

    None: the text may hold several, and does not show which.
    """
    if not isinstance(value, str):
        return [value]
    if path in _COMMANDS:
        try:
            return list(shlex.split(value))
        except ValueError:
            return None
    if "\n" in value:
        return [line.strip() for line in value.splitlines() if line.strip()]
    if "(" in value:
        return None
    parts = [each.strip() for each in value.strip("[]").split(",") if each.strip()]
    return [next(as_numbers(each), each) for each in parts] if len(parts) > 1 else [value]


def _forms_of_text(path: KeyPath, text: str) -> Iterator[object]:
    yield text
    yield from as_numbers(text)
    if clock := _CLOCK.fullmatch(text):
        seconds = sum(
            int(part or 0) * unit for part, unit in zip(clock.groups(), (86400, 3600, 60, 1), strict=True)
        )
        unit, size = next(each for each in (("h", 3600), ("min", 60), ("s", 1)) if seconds % each[1] == 0)
        yield f"{seconds // size} {unit}"
    if text.lower() in _YES | _NO:
        yield text.lower() in _YES
    yield text.lower()
    if amount := _AMOUNT.fullmatch(text):
        units = {each.lower(): each for each in (*COUNTS, *SECONDS, *BYTES)}
        if path[0] == "slurm":  # whose sizes are binary
            units |= {each: f"{each.upper()}iB" for each in ("m", "g", "t")}
        yield from (f"{amount[1]} {units[each]}" for each in nearest(amount[2].lower(), units))
    yield from _entries(path, _CALL.sub("", text))


def _entries(path: KeyPath, text: str) -> Iterator[str]:
    """Yield `module:name` for a path of a file, for a name with dots only, and for a name of torch's without its module."""
    module, colon, name = text.replace("::", ":").rpartition(":")
    if not colon and not text.endswith(".py"):
        module, _, name = text.rpartition(".")
    module = module.removesuffix(".py").removeprefix("./").removeprefix("src/").replace("/", ".")
    yield f"{SHORT_MODULES.get(module, module)}:{name}"
    if (entry := ENTRIES.get(dotted(path), {}).get(plain(text))) is not None:
        yield entry
