"""Keeping secrets of storage options and URLs out of messages (floor 0, pure)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/@:]*):[^/@]*@")
_SECRET = re.compile(r"key|secret|token|pass|sas|credential|connection", re.IGNORECASE)


def mask_url(url: str) -> str:
    """Return *url* with the password in it, if any, as `***`."""
    return _PASSWORD.sub(r"\g<user>:***@", url)


def mask_options(text: str, options: Mapping[str, Any]) -> str:
    """Return *text* with the values of all secret-sounding *options* as `***`."""
    for value in _secrets(options):
        text = text.replace(value, "***")
    return text


def _secrets(options: Mapping[str, Any]) -> Iterator[str]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _secrets(value)
        elif isinstance(value, str) and len(value) > 3 and _SECRET.search(key):
            yield value
