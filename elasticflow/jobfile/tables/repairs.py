"""A value that is not right -> the one that was most likely meant, which is right.

Many ways of writing a value are tried, and what the key's own type accepts is offered: nothing here knows a key.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import tomli
from pydantic import BaseModel, TypeAdapter, ValidationError

from elasticflow.jobfile.diagnostics.suggestions import SHORT_MODULES, nearest, only_near
from elasticflow.jobfile.tables.foreign_names import SAME_VALUES
from elasticflow.jobfile.tables.type_descriptions import annotation_at, choices, model_at
from elasticflow.jobfile.tables.types import ENTRY
from elasticflow.jobfile.type_checks.annotations import as_numbers
from elasticflow.system.units import BYTES, COUNTS, SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.jobfile.diagnostics.positions import KeyPath

# Units as they are written elsewhere, in small letters; those of job files are looked up without regard to case.
_UNITS = {
    "m": "min", "mn": "min", "hr": "h", "hrs": "h", "secs.": "s", "w": "weeks", "week": "weeks",
    "it": "steps", "its": "steps", "iter": "steps", "iters": "steps", "iteration": "steps", "iterations": "steps",
    "batch": "steps", "batches": "steps", "update": "steps", "updates": "steps", "ba": "steps", "st": "steps",
    "ep": "epochs", "eps": "epochs", "ex": "samples", "examples": "samples", "example": "samples",
    "k": "KiB", "kb": "kB", "ki": "KiB", "g": "GiB", "gi": "GiB", "mi": "MiB", "t": "TiB", "ti": "TiB", "bytes": "B", "byte": "B",
}  # fmt: skip
_TIMES = {"k": 10**3, "thousand": 10**3, "m": 10**6, "million": 10**6, "b": 10**9}
# An interval of one, said without the number.
_ONE = frozenset(
    {"epoch", "step", "hour", "minute", "day", "each epoch", "every epoch", "every step", "per epoch"}
)
_CLOCK = re.compile(r"(?:(\d+)[-:])?(\d{1,3}):(\d\d):(\d\d)")
_PARTS = re.compile(r"(\d+)\s*([a-z]+)")
_AMOUNT = re.compile(
    r"(?:every\s+)?([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*(k|thousand|million)?\s*([a-zA-Z]*)\.?"
)
_SMALL_IS_GOOD = re.compile(
    r"loss|err|perplexity|ppl|nll|mae|mse|rmse|wer|cer|fid|bpb|bpc|distance|divergence"
)
_YES, _NO = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}
_QUOTES = "\"'`\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb"
_MOST = 200  # longer texts are no slips


def accepts(path: KeyPath) -> Callable[[object], bool]:
    """Return whether the key at *path*, which the models know, takes a value."""
    return _accepting(_adapter(path))


def _accepting(adapter: TypeAdapter[Any]) -> Callable[[object], bool]:
    def is_good(value: object) -> bool:
        try:
            adapter.validate_python(value, strict=True)
        except (ValidationError, RecursionError):
            return False
        return True

    return is_good


def _adapter(path: KeyPath) -> TypeAdapter[Any]:
    model = model_at(path[:-1])
    if model is not None and path[-1] in model.model_fields:
        field = model.model_fields[str(path[-1])]
        annotation: Any = field.annotation
        return TypeAdapter(Annotated[annotation, *field.metadata] if field.metadata else annotation)
    return TypeAdapter(annotation_at(path))


def repaired(path: KeyPath, value: object) -> object | None:
    """Return what was most likely meant by the value of a key that the models know; None if nothing is near."""
    is_good, annotation = accepts(path), annotation_at(path)
    if isinstance(value, str) and len(value) > _MOST:
        return None
    for each in _ways(value, annotation):
        if is_good(each):
            return each
    return _with_module(path, value) if isinstance(value, str) and is_good("module:name") else None


def certain(path: KeyPath, value: object) -> object | None:
    """Return what alone can have been meant by the value of a key that the models know; None where something else can."""
    is_good = accepts(path)
    if isinstance(value, str) and len(value) > _MOST:
        return None
    meant: dict[str, object] = {}
    for each in _same_in_other_words(value, annotation_at(path)):
        if is_good(each):
            meant.setdefault(repr(each), each)
    return next(iter(meant.values())) if len(meant) == 1 else None


def _same_in_other_words(value: object, annotation: Any) -> Iterator[object]:
    """Yield what says the same as a value: another spelling, other units, and words that are misspelt."""
    if isinstance(value, bool):
        return
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if value in (0, 1):
        yield value == 1
    if not isinstance(value, str):
        return
    text = value.strip().strip(_QUOTES).strip()
    lower = text.lower()
    words = [str(each) for each in choices(annotation)]
    if words and (same := SAME_VALUES.get(lower)) in words:
        yield same
    elif words and (near := only_near(lower, words)) is not None:
        yield near
    yield from as_numbers(text) if not words else ()
    if lower in {"true", "yes", "on"} | {"false", "no", "off"}:
        yield lower in _YES
    yield from _amounts(text)
    yield from _entries(text)


def key_repaired(path: KeyPath) -> str | None:
    """Return what was most likely meant by a key that its free table does not take."""
    table = annotation_at(path[:-1])
    if get_origin(table) is not dict or not isinstance(path[-1], str) or len(path[-1]) > _MOST:
        return None
    is_good = _accepting(TypeAdapter(get_args(table)[0]))
    return next((str(each) for each in _of_text(path[-1]) if isinstance(each, str) and is_good(each)), None)


def with_units(path: KeyPath, number: str) -> list[str]:
    """Return a bare number with each of two units that make it right."""
    is_good = accepts(path)
    units = ("step" if number == "1" else "steps", "s", "min", "GiB", "MB")
    texts = [f"{number} {unit}" for unit in units if is_good(f"{number} {unit}")]
    return [each for each in texts if not (each.endswith(" s") and "step" in texts[0])][:2]


def _ways(value: object, annotation: Any) -> Iterator[object]:
    """Yield other ways to write a value, the likeliest first."""
    if isinstance(value, str):
        yield from _of_text(value)
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, dt.date | dt.time):
        yield str(value)
    if value in (0, 1) and not isinstance(value, bool):
        yield value == 1
    is_plain = isinstance(value, str | bool | int | float)
    words = value if isinstance(value, str) else json.dumps(value) if is_plain else ""
    if (same := SAME_VALUES.get(words.strip().lower())) is not None:
        yield same
    if isinstance(value, str):
        yield from nearest(value.strip().lower(), [str(each) for each in choices(annotation)])
    if is_plain:
        yield words
    yield from _as_table(value, annotation)
    yield from _as_list(value)


def _as_list(value: object) -> Iterator[object]:
    """Yield lists that say what a bare value says, and bare values that say what a list says."""
    if isinstance(value, list):
        yield from value if len(value) == 1 else ()
        yield [next(iter(_of_text(each)), each) if isinstance(each, str) else each for each in value]
        return
    if isinstance(value, str) and ("," in value or " " in value):
        yield [each for each in re.split(r"[,\s]+", value.strip("[]() ")) if each]
        yield [each.strip() for each in value.split(",") if each.strip()]
    yield [value]
    if isinstance(value, str):
        yield from ([each] for each in _of_text(value))


def _of_text(text: str) -> Iterator[object]:
    """Yield what a text may have been meant to be."""
    text = text.strip().strip(_QUOTES).strip()
    yield text
    yield from as_numbers(text)
    if many := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(k|thousand|million)", text.lower()):
        yield round(float(many[1]) * _TIMES[many[2]])
    if text.lower() in _YES | _NO:
        yield text.lower() in _YES
    yield from _amounts(text)
    yield from _entries(text)
    yield text.lower()
    yield from _bests(text)
    host = re.sub(r"^\w+://", "", text).strip("/")
    yield from (host, f"{host}:29400")
    for between, others in (("-", "._-"), ("_", "_")):
        name = re.sub(rf"[^A-Za-z0-9{re.escape(others)}]+", between, text).strip(between)[:100]
        if name[:1].isalpha() or (name[:1].isdigit() and between == "-"):
            yield name


def _amounts(text: str) -> Iterator[str]:
    """Yield a number with its unit, in the spelling of job files."""
    lower = text.lower()
    yield from _sums_of_time(lower)
    if lower in _ONE:
        yield f"1 {lower.split()[-1]}"
    match = _AMOUNT.fullmatch(text) or _AMOUNT.fullmatch(lower)
    if match is None:
        if turned := re.fullmatch(r"([a-z]+)[\s:=]+([0-9.]+)", lower):
            yield from _amounts(f"{turned[2]} {turned[1]}")
        return
    number, times, unit = match.groups()
    amount = float(number.replace("_", "")) * _TIMES.get((times or "").lower(), 1)
    units_by_name = {each.lower(): each for each in (*COUNTS, *SECONDS, *BYTES)}
    units = [
        units_by_name.get(unit.lower()),
        _UNITS.get(unit.lower()),
        *nearest(unit.lower(), units_by_name),
        *(units_by_name[each] for each in nearest(unit.lower(), units_by_name)),
    ]
    if unit.lower() == "ms":
        amount, units = amount / 1000, ["s"]
    if unit.lower() in {"w", "week", "weeks"}:
        amount, units = amount * 7, ["d"]
    shown = f"{amount:.6f}".rstrip("0").rstrip(".")
    yield from (f"{shown} {each}" for each in units if each)
    if times and not unit:
        yield f"{shown} steps"


def _sums_of_time(lower: str) -> Iterator[str]:
    """Yield what `1-12:00:00` and `1 h 30 min` come to."""
    if clock := _CLOCK.fullmatch(lower):
        days, hours, minutes, seconds = (int(each or 0) for each in clock.groups())
        yield _time(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    parts = _PARTS.findall(lower)
    if len(parts) > 1 and not _PARTS.sub("", lower).strip(" ,+"):
        seconds_of = [SECONDS.get(_UNITS.get(unit, unit)) for _, unit in parts]
        if all(seconds_of):
            amounts = (int(number) for number, _ in parts)
            yield _time(int(sum(n * (each or 0) for n, each in zip(amounts, seconds_of, strict=True))))


def _time(seconds: int) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _entries(text: str) -> Iterator[str]:
    """Yield `module:name` for other spellings of it: a file, dots only, a call, blanks."""
    bare = re.sub(r"\s*\(.*\)$", "", text, flags=re.DOTALL)
    bare = re.sub(r"\s*(::|:|#|@|->)\s*", ":", bare)
    module, colon, name = bare.rpartition(":")
    if colon:
        module = (
            re.sub(r"\.py$", "", module).removeprefix("./").strip("/").replace("/", ".").replace("\\", ".")
        )
        yield f"{module}:{name}"
    elif "." in bare and not bare.endswith(".py"):
        module, _, name = bare.replace("/", ".").rpartition(".")
        yield f"{SHORT_MODULES.get(module, module)}:{name}"


def _bests(text: str) -> Iterator[str]:
    """Yield `max metric` or `min metric`."""
    words = re.findall(r"[A-Za-z_]\w*", text.replace("-", "_"))
    sides = {
        "max": "max",
        "maximize": "max",
        "highest": "max",
        "min": "min",
        "minimize": "min",
        "lowest": "min",
    }
    named = [each for each in words if each.lower() not in sides]
    side = next((sides[each.lower()] for each in words if each.lower() in sides), None)
    if len(named) == 1 and len(words) <= 2:
        metric = named[0]
        start, _, rest = metric.partition("_")
        if side is None and start.lower() in sides and rest:
            side, metric = sides[start.lower()], rest
        if side is None:
            side = "min" if _SMALL_IS_GOOD.search(metric.lower()) else "max"
        yield f"{side} {metric}"


def _as_table(value: object, annotation: Any) -> Iterator[object]:
    """Yield tables that say what a bare value says."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    if is_model and not isinstance(value, dict):
        yield from ({key: value} for key in annotation.model_fields)
    if isinstance(value, dict):
        words = [each for each in value.values() if isinstance(each, str)]
        if len(words) == len(value) == 2:
            yield from _bests(" ".join(words))
        if len(value) == 1:
            [(key, inner)] = value.items()
            yield inner
            yield from _amounts(f"{inner} {key}")
        numbers = [each for each in value.values() if isinstance(each, int | float)]
        if len(numbers) == len(words) == 1 and len(value) == 2:
            yield from _amounts(f"{numbers[0]} {words[0]}")
    if isinstance(value, str) and "=" in value and (get_origin(annotation) is dict or is_model):
        with contextlib.suppress(tomli.TOMLDecodeError):
            yield tomli.loads(f"v = {{ {value.strip('{} ')} }}")["v"]
    if get_origin(annotation) is dict and get_args(annotation):
        texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        if texts and all(isinstance(each, str) and re.fullmatch(ENTRY, each) for each in texts):
            yield {each.rpartition(":")[2].rpartition(".")[2]: each for each in texts}


def _with_module(path: KeyPath, value: str) -> str | None:
    """Return the entry point that a name without its module was meant to be, of those torch has for this key."""
    from elasticflow.jobfile.type_checks.bare_names import with_module

    return None if ":" in value else with_module(path, value.strip())
