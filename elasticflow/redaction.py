"""Keeping secrets of storage options and URLs out of messages and records."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/@:]*):[^/@]*@")
_QUERY = re.compile(r"(?P<name>(?<=[?&])[^=&#]+)=(?P<value>[^&#]*)")
_SECRET = re.compile(
    r"secret|passw|passphrase|token|credential|connection_string|(^|_)(sas|key)$|(api|access|account)_?key"
    r"|shared_?access|authorization|cookie|signature|^sig$",
    re.IGNORECASE,
)
_OPTIONS = "snapshots.options"
_REFERENCES = re.compile(r"\s*[\"']?(?:\$\{env:[^{}]*\})+[\"']?\s*")  # looked up where the job runs
_LEAST = 4  # shorter values stand in too many words


def is_secret(key: str) -> bool:
    """Return whether an option of this name holds a secret, as far as names tell."""
    return _SECRET.search(key) is not None


def mask_url(url: str) -> str:
    """Return *url* with the password in it, if any, and signatures in its query as `***`."""
    url = _PASSWORD.sub(r"\g<user>:***@", url)
    return _QUERY.sub(lambda m: f"{m['name']}=***" if is_secret(m["name"]) else m[0], url)


def mask(text: str, url: str, options: Mapping[str, Any]) -> str:
    """Return *text* with the secrets of *url* and of *options* as `***`, also where they are quoted or cut out."""
    text = text.replace(url, mask_url(url))
    for value in sorted({*_in_url(url), *_secrets(options)}, key=len, reverse=True):
        for form in (value, quote(value, safe=""), quote(value), unquote(value)):
            text = text.replace(form, "***") if len(form) >= _LEAST else text
    return text


def without_secrets(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `snapshots` table as it may be recorded: what is left out comes from the environment."""
    uri = table["uri"]
    public = None if uri is None else without_password(uri)
    return {**table, "uri": public, "options": _public(table["options"])}


def public_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the `--set` values as they may be recorded: without those that set a secret."""
    kept = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key.strip() == "snapshots.uri" and not _REFERENCES.fullmatch("".join(_in_url(value)) or "-"):
            value = without_password(value)
        tells = key.strip().startswith(_OPTIONS) and (
            is_secret(key.rpartition(".")[2].strip()) or _holds_secret(value)
        )
        if not tells or _REFERENCES.fullmatch(value):
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


def without_password(url: str) -> str:
    """Return *url* without the password in it and without signatures in its query."""
    url = _PASSWORD.sub(r"\g<user>@", url)
    return _QUERY.sub(lambda m: f"{m['name']}=" if is_secret(m["name"]) else m[0], url)


def _in_url(url: str) -> Iterator[str]:
    for password in _PASSWORD.findall(url):
        yield url.partition(f"://{password}:")[2].partition("@")[0]
    yield from (m["value"] for m in _QUERY.finditer(url) if is_secret(m["name"]))


def _secrets(options: Mapping[str, Any], *, all_of_it: bool = False) -> Iterator[str]:
    for key, value in options.items():
        hidden = all_of_it or is_secret(key)
        if isinstance(value, dict):
            yield from _secrets(value, all_of_it=hidden)
        elif isinstance(value, str) and hidden:
            yield value
            # Azure's `AccountName=me;AccountKey=...`: an error may tell the key alone.
            pairs = (part.partition("=") for part in value.split(";"))
            yield from (secret for name, _, secret in pairs if is_secret(name.strip()))
