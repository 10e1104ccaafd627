"""Keeping secrets of storage options and URLs out of messages and records (floor 0, pure)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/@:]*):[^/@]*@")
_SECRET = re.compile(
    r"secret|passw|passphrase|token|credential|connection_string|(^|_)(sas|key)$|api_?key|access_?key",
    re.IGNORECASE,
)
_OPTIONS = "snapshots.options"


def is_secret(key: str) -> bool:
    """Return whether an option of this name holds a secret, as far as names tell."""
    return _SECRET.search(key) is not None


def mask_url(url: str) -> str:
    """Return *url* with the password in it, if any, as `***`."""
    return _PASSWORD.sub(r"\g<user>:***@", url)


def mask_options(text: str, options: Mapping[str, Any]) -> str:
    """Return *text* with the values of all secret-sounding *options* as `***`."""
    for value in _secrets(options):
        text = text.replace(value, "***")
    return text


def without_secrets(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `snapshots` table as it may be recorded: what is left out comes from the environment."""
    uri = table["uri"]
    public = None if uri is None else _PASSWORD.sub(r"\g<user>@", uri)
    return {**table, "uri": public, "options": _public(table["options"])}


def public_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the `--set` values as they may be recorded: without those that set a secret."""
    kept = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key.strip() == "snapshots.uri":
            value = _PASSWORD.sub(r"\g<user>@", value)
        tells = key.strip().startswith(_OPTIONS) and (
            is_secret(key.rpartition(".")[2].strip()) or _holds_secret(value)
        )
        if not tells:
            kept.append(f"{key}{equals}{value}")
    return tuple(kept)


def _holds_secret(value: str) -> bool:
    """Whether an inline table, like `{ secret = "x" }`, names a secret."""
    return any(is_secret(name) for name in re.findall(r"[\w-]+(?=[\"']?\s*=)", value))


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _public(value) if isinstance(value, dict) else value
        for key, value in options.items()
        if not is_secret(key)
    }


def _secrets(options: Mapping[str, Any], *, all_of_it: bool = False) -> Iterator[str]:
    for key, value in options.items():
        hidden = all_of_it or is_secret(key)
        if isinstance(value, dict):
            yield from _secrets(value, all_of_it=hidden)
        elif isinstance(value, str) and len(value) > 3 and hidden:
            yield value
