"""Keeping secrets of storage options and URLs out of messages and records."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# The last @ before a / ends user and password, as for urlsplit: both may have one inside.
_PASSWORD = re.compile(r"(?<=://)(?P<user>[^/:]*):(?P<password>[^/]*)@")
_USER = re.compile(r"(?<=://)[^/\s\"']+(?=@)")
_QUERY = re.compile(r"(?P<name>(?<=[?&])[^=&#]+)=(?P<value>[^&#]*)")
# The same where a URL stands in a text: it ends at a space, a quote or a bracket.
_PASSWORD_IN_TEXT = re.compile(r"(?<=://)(?P<user>[^/:\s\"'<>]*):[^/\s\"'<>]+@")
_QUERY_IN_TEXT = re.compile(r"(?P<name>(?<=[?&])[^=&#\s\"'<>]+)=(?P<value>[^&#\s\"'<>]*)")
_SECRET = re.compile(
    r"secret|passw|passphrase|token(?!iz)|credential|connection_string|(^|_)(sas|key)$|(api|access|account)_?key"
    r"|shared_?access|authorization|cookie|signature|webhook|^sig$",
    re.IGNORECASE,
)
_OPTIONS = "snapshots.options"
# References to the environment are looked up where the job runs.
_REFERENCES = re.compile(r"\s*[\"']?(?:\$\{env:[^{}]*\})+[\"']?\s*")
# Characters; shorter values are parts of too many words.
_SHORTEST = 4
# Addresses whose path is the secret, which allows posting there: the part behind the host, or behind /hooks/.
_WEBHOOK = re.compile(
    r"(?P<place>https?://(?:hooks\.slack\.com|(?:[a-z]+\.)?discord(?:app)?\.com/api/webhooks|chat\.googleapis\.com"
    r"|[\w.-]+\.webhook\.office\.com|[\w.-]+\.logic\.azure\.com(?::\d+)?|[\w.-]+\.api\.powerplatform\.com(?::\d+)?"
    r"|[^\s/\"'<>]+/hooks(?=/[A-Za-z0-9_-]{20,}))/)(?P<secret>[^\s\"'<>]+)",
    re.IGNORECASE,
)
# A part of a path or query that looks drawn by chance.
_DRAWN = re.compile(r"(?<=[/=])(?=[\w-]*[0-9])(?=[\w-]*[A-Za-z])[\w-]{20,}")


def is_secret(key: str) -> bool:
    """Return whether the option called *key* holds a secret, to judge by its name."""
    return _SECRET.search(key) is not None


def is_secret_variable(name: str, value: object) -> bool:
    """Return whether a variable of `[env]` is secret: as its table declares, else to judge by its name."""
    declared = value.get("secret", True) if isinstance(value, dict) else is_secret(name)
    return bool(declared)


def mask_url(url: str) -> str:
    """Return *url* with the password in it, if any, and signatures in its query as `***`."""
    url = _PASSWORD.sub(r"\g<user>:***@", url)
    url = _QUERY.sub(lambda m: f"{m['name']}=***" if is_secret(m["name"]) else m[0], url)
    return _WEBHOOK.sub(r"\g<place>***", url)


def mask_urls_in(text: str) -> str:
    """Return *text* with passwords and signatures of all URLs in it as `***`."""
    text = _PASSWORD_IN_TEXT.sub(r"\g<user>:***@", text)
    text = _QUERY_IN_TEXT.sub(lambda m: f"{m['name']}=***" if is_secret(m["name"]) else m[0], text)
    return _WEBHOOK.sub(r"\g<place>***", text)


def is_secret_address(url: str) -> bool:
    """Return whether *url* holds a password, a signature or what looks like the secret of a webhook."""
    return mask_url(url) != url or _DRAWN.search(url) is not None


def with_starred_users(text: str) -> str:
    """Return *text* with user and password of each URL replaced by as many stars."""
    return _USER.sub(lambda user: "*" * len(user[0]), text)


def with_stars(text: str) -> str:
    """Return *text* with the secrets of webhooks' URLs replaced by as many stars."""
    text = _WEBHOOK.sub(lambda m: m["place"] + "*" * len(m["secret"]), text)
    return _DRAWN.sub(lambda m: "*" * len(m[0]), text) if "://" in text else text


def mask(text: str, url: str, options: Mapping[str, Any]) -> str:
    """Return *text* with the secrets of *url* and of *options* as `***`, also where they stand alone or quoted."""
    text = text.replace(url, mask_url(url))
    for value in sorted({*_in_url(url), *_secrets(options)}, key=len, reverse=True):
        for form in (value, quote(value, safe=""), quote(value), unquote(value)):
            text = text.replace(form, "***") if len(form) >= _SHORTEST else text
    return text


def without_secrets(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `snapshots` table without secrets, as it may be recorded; a later launch takes them from the environment."""
    uri = table["uri"]
    public = None if uri is None else without_password(uri)
    return {**table, "uri": public, "options": _public(table["options"])}


def public_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the `--set` values that set no secret, as they may be recorded."""
    public = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if key.strip() == "snapshots.uri" and not _REFERENCES.fullmatch("".join(_in_url(value)) or "-"):
            value = without_password(value)
        parts = [part.strip() for part in key.split(".")]
        has_secret = key.strip().startswith(_OPTIONS) and (is_secret(parts[-1]) or _holds_secret(value))
        if parts[0] == "env":
            # The declaration of a variable as secret stands elsewhere.
            has_secret = is_secret(parts[-1]) or parts[-1] == "value" or "{" in value.replace("${", "")
        if not has_secret or _REFERENCES.fullmatch(value):
            public.append(f"{key}{equals}{value}")
    return tuple(public)


def _holds_secret(value: str) -> bool:
    """Return whether *value* is an inline table, like `{ secret = "x" }`, that names a secret."""
    return any(is_secret(name) for name in re.findall(r"[\w-]+(?=[\"']?\s*=)", value))


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _public(value) if isinstance(value, dict) else value
        for key, value in options.items()
        if not is_secret(key)
    }


def password_in(url: str) -> str:
    """Return the password in *url*; empty if it has none."""
    match = _PASSWORD.search(url)
    return match["password"] if match else ""


def without_password(url: str) -> str:
    """Return *url* without its password and without the signatures in its query."""
    url = _PASSWORD.sub(r"\g<user>@", url)
    return _QUERY.sub(lambda m: f"{m['name']}=" if is_secret(m["name"]) else m[0], url)


def _in_url(url: str) -> Iterator[str]:
    yield from (m["password"] for m in _PASSWORD.finditer(url))
    yield from (m["value"] for m in _QUERY.finditer(url) if is_secret(m["name"]))


def _secrets(options: Mapping[str, Any], *, are_all_secret: bool = False) -> Iterator[str]:
    for key, value in options.items():
        is_hidden = are_all_secret or is_secret(key)
        if isinstance(value, dict):
            yield from _secrets(value, are_all_secret=is_hidden)
        elif isinstance(value, str) and is_hidden:
            yield value
            # Azure's `AccountName=me;AccountKey=...`: an error may show the key alone.
            pairs = (part.partition("=") for part in value.split(";"))
            yield from (secret for name, _, secret in pairs if is_secret(name.strip()))
