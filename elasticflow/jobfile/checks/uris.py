"""URIs and paths that name no place: a missing slash, an unknown protocol, a variable that is not expanded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.text.layers import value_at
from elasticflow.storage.urls import EXTRAS
from elasticflow.system.redaction import mask_url, with_starred_users

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.text.source import Source

_WELL_KNOWN = ("file", "local", "memory", *EXTRAS)
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FEW_SLASHES = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?::/?|//)(?=[^/:])")
_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)|%([A-Za-z_][A-Za-z0-9_]*)%")
_OF_WINDOWS = re.compile(r"[A-Za-z]:[\\/]|\\\\")


def check_uris(source: Source, keys: tuple[tuple[str, str], ...]) -> Iterator[Diagnostic]:
    """Yield the values of *keys*, URIs and paths, that name no place."""
    for table, key in keys:
        path = (table, key)
        value, written = value_at(path, source.raw), value_at(path, source.written or source.raw)
        if not isinstance(value, str):
            continue
        if problem := _unexpanded(written, key) or _wrong(value, key):
            message, remedy = problem
            yield source.problem(codes.NO_SUCH_PLACE, f"{dotted(path)} {message}", path, remedy=remedy)


def _unexpanded(uri: str, key: str) -> tuple[str, str] | None:
    """Return the problem and the remedy of a URI that holds a variable as a shell would expand it."""
    match = _VARIABLE.search(with_starred_users(uri))
    if match:
        name = match[1] or match[2]
        name = "HOME" if name == "USERPROFILE" else name
        meant = f"{uri[: match.start()]}${{env:{name}}}{uri[match.end() :]}"
        return f"holds {match[0]}, which nothing expands", f"write {key} = {_pasteable(meant)}"
    if key != "uri" and uri.startswith("~"):
        meant = "${env:HOME}" + uri[1:]
        return "begins with ~, which nothing expands", f"write {key} = {_pasteable(meant)}"
    return None


def _wrong(uri: str, key: str) -> tuple[str, str] | None:
    if uri != uri.strip():
        return "begins or ends with a blank", f"write {key} = {_pasteable(uri.strip())}"
    if _OF_WINDOWS.match(uri):
        return (
            "is a path of Windows, and jobs run on Linux",
            "name a folder as Linux does, or an object store",
        )
    return None if key == "log_dir" else _wrong_protocol(uri, key)


def _wrong_protocol(uri: str, key: str) -> tuple[str, str] | None:
    first = uri.rpartition("::")[2]  # a chain of fsspec: simplecache::s3://bucket
    match = _PROTOCOL.match(first)
    if match is None:
        few = _FEW_SLASHES.match(first)
        if few is None or few[1].lower() not in _WELL_KNOWN:
            return None  # a path
        meant = (
            f"{few[1]}://{'/' if few[1].lower() in {'file', 'local'} else ''}{first[few.end() :].lstrip('/')}"
        )
        return (
            "would be a folder of that name: two slashes follow a protocol",
            f"write {key} = {_pasteable(meant)}",
        )
    protocol, rest = match[1].lower(), first[match.end() :]
    if protocol == "hf" and key == "uri":
        # HfFileSystem of huggingface_hub 2.4 creates no file exclusively.
        problem = "is on the Hugging Face Hub, which creates no file exclusively and makes a commit of each in a repository"
        return problem, "a bucket of the Hub is reached as S3: `elasticflow guide snapshots` has the options"
    if not _is_known(protocol):
        near = nearest(protocol, _WELL_KNOWN, 0.5)
        meant = f"did you mean {_pasteable(near[0] + '://' + rest)}?\n" if near else ""
        return f'has the protocol "{protocol}", which does not exist', f"{meant}{_protocols()}"
    if protocol in EXTRAS and not rest.strip("/"):
        return "names no bucket or host", f'write {key} = "{protocol}://bucket/name"'
    if EXTRAS.get(protocol) in {"s3", "gcs"} and rest.startswith("/"):
        meant = f"{protocol}://{rest.lstrip('/')}"
        return "names no bucket: three slashes follow the protocol", f"write {key} = {_pasteable(meant)}"
    return None


def _is_known(protocol: str) -> bool:
    """Return whether the protocol is ours or fsspec's, to which packages may add; called only for uncommon protocols."""
    if protocol in _WELL_KNOWN:
        return True
    from importlib.metadata import entry_points

    if any(each.name == protocol for each in entry_points(group="fsspec.specs")):
        return True
    from fsspec.registry import known_implementations, registry

    return protocol in known_implementations or protocol in registry


def _protocols() -> str:
    by_extra: dict[str, list[str]] = {}
    for protocol, extra in EXTRAS.items():
        by_extra.setdefault(extra, []).append(f"{protocol}://")
    listed = [
        f"{', '.join(names)} (elasticflow[{extra}])" for extra, names in by_extra.items() if extra != "http"
    ]
    return (
        f"there are {', '.join(listed[:2])},\n{', '.join(listed[2:])}, others that fsspec knows, and folders"
    )


def _pasteable(uri: str) -> str:
    """Return a URI without its password, ready to be pasted."""
    return show(mask_url(uri)) if len(uri) < 50 else f'"{mask_url(uri)}"'
