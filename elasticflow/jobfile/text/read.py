"""Bytes of a job file -> text -> dict, each failure a diagnostic with its place."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic, diagnostic_at
from elasticflow.jobfile.diagnostics.positions import Span
from elasticflow.jobfile.diagnostics.suggestions import nearest

if TYPE_CHECKING:
    from pathlib import Path

TomlTable = dict[str, Any]
"""A table of TOML, not yet validated: only its model knows what its values are."""
MOST_BYTES = 10_000_000
MOST_LEVELS = 40  # the code after the parser walks tables recursively


class UnreadableError(Exception):
    """A text cannot be read; carries the diagnostic."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


def read_text(path: Path, name: str, instead: bytes | None = None) -> str:
    """Return a file's text: UTF-8, a byte order mark dropped, newlines as in TOML.

    With *instead*, these bytes are the content, whether or not the file exists.

    Raises:
        UnreadableError: the file does not exist, is not regular, not readable, too large or not UTF-8.
    """
    try:
        if instead is None and not path.is_file():
            raise UnreadableError(_missing(path, name))
        if instead is None and path.stat().st_size > MOST_BYTES:
            what = "larger than 10 MB: this is no job file"
            raise UnreadableError(Diagnostic(codes.NO_FILE, "error", what, name))
        data = path.read_bytes() if instead is None else instead
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a name a file can have"
        what = f"cannot read {name}: {reason.lower()}"
        raise UnreadableError(Diagnostic(codes.NO_FILE, "error", what, name)) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        good = len(error.object[: error.start].decode("utf-8").replace("\r\n", "\n"))
        text = error.object.decode("utf-8", errors="replace").replace("\r\n", "\n")
        message = f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"
        remedy = "save the file as UTF-8"
        diagnostic = diagnostic_at(
            codes.NOT_UTF8, message, file=name, text=text, span=Span(good, good + 1), remedy=remedy
        )
        raise UnreadableError(diagnostic) from error
    return text.replace("\r\n", "\n")


def _missing(path: Path, name: str) -> Diagnostic:
    if path.is_dir():
        inside = f"name the job files in it: {name.rstrip('/')}/*.toml"
        return Diagnostic(codes.NO_FILE, "error", f"{name} is a folder, not a job file", name, help=inside)
    if path.exists():
        return Diagnostic(codes.NO_FILE, "error", f"{name} is not a regular file", name)
    if path.is_symlink():
        message = f"{name} is a link to {path.readlink()}, which does not exist"
        return Diagnostic(codes.NO_FILE, "error", message, name)
    folder = path.parent
    near = [each.parent / file for each in (path, folder / "jobs" / path.name) for file in near_files(each)]
    remedy = f'did you mean "{near[0]}"?' if near else None
    if set(name) & set("*?["):
        remedy = "no file matches the pattern, so the shell passed it on as it stands"
    elif not folder.is_dir():
        remedy = f"the folder {folder} does not exist either"
    return Diagnostic(codes.NO_FILE, "error", f"no such file: {name}", name, help=remedy)


def near_files(path: Path) -> list[str]:
    """Return the job file beside *path* whose name is most like that of *path*, if one is like it."""
    try:
        names = {each.stem: each.name for each in path.parent.iterdir() if each.suffix == ".toml"}
    except (OSError, ValueError):
        return []
    return [names[stem] for stem in nearest(path.stem, names.keys() - {"pyproject"})]


def parse_toml(text: str, name: str) -> TomlTable:
    """Return the keys of a TOML text.

    Raises:
        UnreadableError: the text is not TOML, or nested too deeply.
    """
    import tomli

    try:
        raw = tomli.loads(text)
        levels = depth(raw)
    except tomli.TOMLDecodeError as error:
        start = min(error.pos, len(text))
        raise UnreadableError(_not_toml(error.msg, text, start, name)) from error
    except RecursionError as error:
        raise UnreadableError(_too_deep(name)) from error
    except ValueError as error:  # an integer beyond Python's own limit
        digits = re.search(r"\d{4000,}", text)
        span = Span(*digits.span()) if digits else Span(0, 0)
        message = "a number with thousands of digits"
        raise UnreadableError(
            diagnostic_at(codes.NOT_TOML, message, file=name, text=text, span=span)
        ) from error
    if levels > MOST_LEVELS:
        raise UnreadableError(_too_deep(name))
    return raw


def _not_toml(reason: str, text: str, start: int, name: str) -> Diagnostic:
    # Most files are TOML.
    from elasticflow.jobfile.text.syntax_errors import explain_syntax_error, other_format

    other = other_format(text)
    message, span, remedy = (
        explain_syntax_error(reason, text, start) if other is None else (other[0], Span(0, 1), other[1])
    )
    return diagnostic_at(codes.NOT_TOML, message, file=name, text=text, span=span, remedy=remedy)


def _too_deep(name: str) -> Diagnostic:
    message = f"tables or arrays are nested more than {MOST_LEVELS} deep"
    return Diagnostic(codes.NOT_TOML, "error", message, name)


def depth(value: object) -> int:
    """Return the depth of nested tables and arrays, found without recursion."""
    deepest, pending = 0, [(value, 0)]
    while pending:
        each, level = pending.pop()
        deepest = max(deepest, level)
        if isinstance(each, dict):
            pending += [(inner, level + 1) for inner in each.values()]
        elif isinstance(each, list):
            pending += [(inner, level + 1) for inner in each]
    return deepest
