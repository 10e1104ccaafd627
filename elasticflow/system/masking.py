"""Secrets whose values this process knows, kept out of what it writes: its log lines, events, standard streams."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import quote

from elasticflow.events import FIELDS
from elasticflow.system.redaction import is_secret, mask_urls_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

SECRET_NAMES = "ELASTICFLOW_SECRET_NAMES"  # noqa: S105  a name of names
"""Variable of a launch's processes: names of the variables that the job declares secret, with commas between."""
MASKED = "***"
# Characters. A shorter text is part of too many words; a variable that only its name makes secret may hold a switch.
_SHORTEST_DECLARED, _SHORTEST = 4, 8
# Variables that are called like secrets and hold none: places, switches.
_NO_SECRETS = re.compile(
    r"_(FILE|PATH|DIR|HOST|ENDPOINT|NAME|ID)$|(?<!WEBHOOK)_UR[LI]$|^GPG_KEY$", re.IGNORECASE
)


class Mask:
    """Replaces secrets in texts by `***`, also where they are quoted for JSON, for Python or for a URL.

    Args:
        values: The secrets. Each line of a secret with several lines is a secret, too.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        forms = {form for value in values for form in _forms(value)}
        either = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
        self.values: frozenset[str] = frozenset(forms)
        self._text = re.compile(either) if forms else None
        self._bytes = re.compile(either.encode()) if forms else None

    def __bool__(self) -> bool:
        """True if there is any secret."""
        return self._text is not None

    def text(self, text: str) -> str:
        """Return *text* with secrets masked, and with passwords and tokens in URLs masked."""
        if self._text is not None:
            text = self._text.sub(MASKED, text)
        return mask_urls_in(text) if "://" in text else text

    def output(self, data: bytes) -> bytes:
        """Return output without secrets; URLs are left as they are."""
        return data if self._bytes is None else self._bytes.sub(MASKED.encode(), data)

    def value(self, value: Any) -> Any:
        """Return a value of JSON with every text in it as `text` has it; keys stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self.value(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        return value

    def record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line of a log without secrets; a field of the user's that is called like a secret is one."""
        return {
            key: MASKED if key not in FIELDS and is_secret(key) and value is not None else self.value(value)
            for key, value in record.items()
        }


def mask_of(environment: Mapping[str, str], declared: Collection[str] = ()) -> Mask:
    """Return the mask of the secrets in *environment*: variables that are *declared* secret, or called like secrets.

    `SECRET_NAMES` in it declares some, too.
    """
    names = {*declared, *environment.get(SECRET_NAMES, "").split(",")} - {""}
    values = [environment[name] for name in names if len(environment.get(name, "")) >= _SHORTEST_DECLARED]
    values += [
        value
        for name, value in environment.items()
        if len(value) >= _SHORTEST
        and is_secret(name)
        and name != SECRET_NAMES
        and not _NO_SECRETS.search(name)
    ]
    return Mask(values)


def mask_streams() -> None:
    """Mask the output of this process, and of those that it forks from now on, by its environment.

    Output that bypasses `sys.stdout` and `sys.stderr`, from C code or a started program, is not masked.
    """
    mask = mask_of(os.environ)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream: TextIO | None = getattr(sys, name)
        if stream is None or not (mask or isinstance(getattr(stream, "buffer", None), _MaskedOutput)):
            continue
        stream.flush()
        raw = _MaskedOutput(descriptor, mask)
        # Each write goes out at once, as with `python -u`: nothing is lost if the worker is killed.
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True))


class _MaskedOutput(io.RawIOBase):
    """A descriptor that stays open; each write is masked."""

    def __init__(self, descriptor: int, mask: Mask) -> None:
        super().__init__()
        self._descriptor, self._mask = descriptor, mask

    def write(self, data: Any) -> int:
        whole = bytes(data)
        rest = self._mask.output(whole)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        return len(whole)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)


def _forms(value: str) -> set[str]:
    lines = [line.strip() for line in value.splitlines()]
    parts = {value, value.strip(), *(line for line in lines if len(line) >= _SHORTEST)}
    forms = {
        form
        for part in parts
        for form in (part, json.dumps(part)[1:-1], repr(part)[1:-1], quote(part), quote(part, safe=""))
    }
    return {form for form in forms if len(form) >= _SHORTEST_DECLARED}
