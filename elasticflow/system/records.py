"""Files of JSON that a run keeps: whole, absent or damaged, told apart in one place.

A record is one JSON object that is a file. An appended log has one JSON object on each line. Bad content raises
nothing: damage is a value, which says what is wrong and where.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from elasticflow.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Record = Mapping[str, Any]
"""One parsed line of events.jsonl or metrics.jsonl. Any value may be missing or odd: a view never fails."""
LARGEST = 256 << 20  # bytes of a record that is read at all
_REMEDIES = {
    "is a directory": "move it away",
    "is no regular file": "move it away",
    "cannot be read": "give this user the permission to read and write it",
    "cannot be written": "give this user the permission to read and write it",
}


class BadJsonError(ValueError):
    """Bytes that are not one JSON object; the text says what is wrong with them."""


@dataclass(frozen=True)
class Damage:
    """The reason why an existing file cannot be used.

    Attributes:
        place: The file, as messages name it.
        why: The problem, as the rest of a sentence that begins with the file.
    """

    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.place} {self.why}"

    @property
    def remedy(self) -> str | None:
        """Advice that makes the file usable; None if its content is wrong."""
        return next((text for start, text in _REMEDIES.items() if self.why.startswith(start)), None)


def parse(data: bytes | str) -> dict[str, Any]:
    """Return the JSON object that is all of *data*.

    Raises:
        BadJsonError: *data* is something else.
    """
    try:
        text = data.decode() if isinstance(data, bytes) else data
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise BadJsonError(f"is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        why = "is empty" if not error.doc.strip() else f"is no JSON at character {error.pos}"
        raise BadJsonError(why) from None
    except RecursionError:
        raise BadJsonError("is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise BadJsonError(f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadJsonError(f"holds {_KINDS.get(type(value), 'a number')}, not an object")
    return value


_KINDS = {list: "a list", str: "a text", type(None): "null", bool: "a truth value"}


def read(path: Path, largest: int = LARGEST) -> dict[str, Any] | Damage | None:
    """Return the record at *path*, its damage, or None if there is no file."""
    data = read_bytes(path, largest)
    if not isinstance(data, bytes):
        return data
    try:
        return parse(data)
    except BadJsonError as error:
        return Damage(str(path), str(error))


def read_bytes(path: Path, largest: int = LARGEST) -> bytes | Damage | None:
    """Return a file's bytes, its damage, or None if there is no file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:  # Path.open takes no opener
            data = file.read(largest + 1) or b""  # None of a pipe that holds nothing yet
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return damage_of(path, error)
    return data if len(data) <= largest else Damage(str(path), f"is larger than {largest} bytes")


def read_text(path: Path) -> str | Damage | None:
    """Return a file's text, its damage, or None if there is no file."""
    data = read_bytes(path)
    if not isinstance(data, bytes):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return Damage(str(path), f"is not UTF-8 at byte {error.start}")


def damage_of(path: Path, error: OSError) -> Damage:
    """Return the damage of a file whose opening or reading raised *error*."""
    if isinstance(error, IsADirectoryError):
        return Damage(str(path), "is a directory")
    return Damage(str(path), f"cannot be read: {error.strerror or error}")


def require_usable(appended: Iterable[Path], replaced: Iterable[Path]) -> None:
    """Raise RecordError if an existing file of a run cannot be used; the error has the file, the reason and the remedy.

    Args:
        appended: Files that this process reads and appends to.
        replaced: Files that this process replaces.
    """
    replaceable = set(replaced)
    for path in (*appended, *replaceable):
        if (damage := _obstacle(path, is_replaced=path in replaceable)) is not None:
            raise RecordError(str(damage), f"{damage.remedy}; then the same command resumes the run")


def _obstacle(path: Path, *, is_replaced: bool) -> Damage | None:
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return damage_of(path, error)
    if not stat.S_ISREG(mode):
        return Damage(str(path), "is a directory" if stat.S_ISDIR(mode) else "is no regular file")
    if not is_replaced:
        for flag, what in ((os.R_OK, "read"), (os.W_OK, "written")):
            if not os.access(path, flag):
                return Damage(str(path), f"cannot be {what}: Permission denied")
    return None


def printable(value: object) -> str:
    """Return *value* as text that does nothing to a terminal: colours are left out, control characters but line ends are escaped.

    Surrogates, which stand for bytes that are no UTF-8 in a file's name, are escaped, too: no stream takes them.
    """
    text = value if isinstance(value, str) else f"{value!r:.200}"
    if text.isprintable():
        return text
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", _COLOUR.sub("", text))


def printable_in(record: dict[str, Any]) -> dict[str, Any]:
    """Return *record*, which is parsed JSON, with all text in it printable."""
    return {printable(key): _printable_in(item) for key, item in record.items()}


def _printable_in(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case dict():
            return printable_in(value)
        case list():
            return [_printable_in(item) for item in value]
        case _:
            return value


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def int_of(record: Record, key: str) -> int:
    """Return a field as a whole number; 0 if it is missing or no number."""
    return int(float_of(record, key) or 0)


def float_of(record: Record, key: str) -> float | None:
    """Return a field as a finite number; None if it is missing or something else."""
    value = record.get(key)
    number = None if isinstance(value, str) else unix_time(value)
    return number if number is not None and math.isfinite(number) else None


def text_of(record: Record, key: str) -> str | None:
    """Return a field that is a text; None if it is missing or something else."""
    value = record.get(key)
    return value if isinstance(value, str) else None


def texts_of(record: Record, name: str) -> tuple[str, ...]:
    """Return the texts in a field that is a list; none if it is anything else."""
    field = record.get(name)
    return tuple(each for each in field if isinstance(each, str)) if isinstance(field, list) else ()


def unix_time(value: object) -> float | None:
    """Return the Unix time of an RFC 3339 text or a number; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            return None
    if not isinstance(value, str):
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _without_waiting(path: str, flags: int) -> int:
    """Open *path*; do not wait for a writer if it is a pipe."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
