"""Problems of job files with code, place and help, and the formats they are shown in (floor 1, pure)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from elasticflow.spec.positions import Span, place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Severity = Literal["error", "warning", "note"]
Format = Literal["full", "concise", "json", "github", "sarif"]
FORMATS: tuple[str, ...] = get_args(Format)

_MOST_EXCERPT = 160
# What must never reach a terminal or a CI log: quoted values of secret-looking keys, and passwords in URLs.
_SECRET = re.compile(
    r"(?P<key>(?:[\w-]*(?:secret|passw|token(?!iz)|credential|api_?key|access_?key)[\w-]*|\bkey)[\"']?\s*=\s*)"
    r"(?:(?P<quote>[\"'])(?P<value>.*?)(?P=quote)|(?P<bare>[^\s\"',{}\[\]]+))"
    r"|(?P<scheme>://)(?P<user>[^/@\s\"']+)(?=@)",
    re.IGNORECASE,
)
_COLOURS = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "note": "\x1b[1;36m",
    "frame": "\x1b[1;34m",
    "off": "\x1b[0m",
}


@dataclass(frozen=True)
class Diagnostic:
    """One problem.

    Attributes:
        code: Stable code, explained by `elasticflow explain`.
        severity: An error refuses the job, a warning does with --strict, a note never.
        message: What is wrong, in the words of the job file.
        file: Name of the file as the user wrote it, or `--set`.
        line: From 1; None when the file as a whole is meant.
        column: From 1, in code points.
        end_line: Line of the last code point.
        end_column: Column after the last code point.
        help: What to do.
        excerpt: The line of the file, secrets masked.
    """

    code: str
    severity: Severity
    message: str
    file: str
    line: int | None = None
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    help: str | None = None
    excerpt: str | None = None


def at(
    code: str, message: str, *, file: str, text: str, span: Span, severity: Severity = "error", remedy: str | None = None
) -> Diagnostic:  # fmt: skip
    """Return a diagnostic about the span of a file's text."""
    line, column = place(text, span.start)
    end_line, end_column = place(text, max(span.end, span.start))
    excerpt = text.split("\n")[line - 1]
    return Diagnostic(
        code, severity, message, file, line, column, end_line, end_column, remedy, mask_secrets(excerpt)
    )


def mask_secrets(text: str) -> str:
    """Return *text* with each secret-looking value replaced by as many stars."""

    def stars(found: re.Match[str]) -> str:
        if found["scheme"]:
            return found["scheme"] + "*" * len(found["user"])
        if found["bare"]:
            return found["key"] + "*" * len(found["bare"])
        return f"{found['key']}{found['quote']}{'*' * len(found['value'])}{found['quote']}"

    return _SECRET.sub(stars, text)


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return each diagnostic once, sorted by file, place and code."""
    return sorted(
        dict.fromkeys(diagnostics), key=lambda d: (d.file, d.line or 0, d.column or 0, d.code, d.message)
    )


def render(diagnostics: Sequence[Diagnostic], style: Format = "full", *, colour: bool = False) -> str:
    """Return all diagnostics in one format, without a newline at the end; empty for none in a line-based one."""
    match style:
        case "full":
            return "\n\n".join(_full(each, colour=colour) for each in diagnostics)
        case "concise":
            return "\n".join(_concise(each) for each in diagnostics)
        case "github":
            return "\n".join(_github(each) for each in diagnostics)
        case "json":
            return json.dumps([_as_json(each) for each in diagnostics], indent=2, ensure_ascii=False)
        case "sarif":
            return json.dumps(_sarif(diagnostics), indent=2, ensure_ascii=False)


def _full(each: Diagnostic, *, colour: bool) -> str:
    paint = _COLOURS if colour else dict.fromkeys(_COLOURS, "")
    off, frame, tint = paint["off"], paint["frame"], paint[each.severity]
    width = len(str(each.line or ""))
    bar = f"{frame}{' ' * width} |{off}"
    lines = [f"{tint}{each.severity}[{each.code}]{off}: {each.message}"]
    lines.append(f"{frame}{' ' * width}-->{off} {_where(each)}")
    if each.line is not None and each.excerpt is not None and each.column is not None:
        shown, lead = _visible(each.excerpt, each.column)
        carets = "^" * _caret_count(each, len(shown) - lead)
        lines += [
            bar,
            f"{frame}{each.line} |{off} {shown}",
            f"{bar} {_indent(shown, lead)}{tint}{carets}{off}",
        ]
    if each.help is not None:
        first, *more = each.help.split("\n")
        lines.append(f"{frame}{' ' * width} ={off} help: {first}")
        lines += [f"{' ' * width}         {line}" for line in more]
    return "\n".join(line.rstrip() for line in lines)


def _visible(excerpt: str, column: int) -> tuple[str, int]:
    """Return the part of a long line around the column, and where the column is in it."""
    start = max(0, column - 1 - _MOST_EXCERPT // 2) if len(excerpt) > _MOST_EXCERPT else 0
    part = excerpt[start : start + _MOST_EXCERPT]
    return "".join(
        c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in part
    ), column - 1 - start


def _caret_count(each: Diagnostic, room: int) -> int:
    assert each.column is not None
    if each.end_line == each.line and each.end_column is not None:
        return max(1, min(each.end_column - each.column, room))
    return max(1, room)


def _indent(shown: str, lead: int) -> str:
    # Tabs stay tabs and wide characters become two blanks, so that the caret stands where the eye expects it.
    from unicodedata import combining, east_asian_width

    return "".join(
        "\t" if c == "\t" else "" if combining(c) else "  " if east_asian_width(c) in "WF" else " "
        for c in shown[:lead]
    )


def _where(each: Diagnostic) -> str:
    return each.file if each.line is None else f"{each.file}:{each.line}:{each.column}"


def _concise(each: Diagnostic) -> str:
    tail = f" ({each.help.splitlines()[0]})" if each.help else ""
    return f"{_where(each)}: {each.severity}[{each.code}] {each.message}{tail}"


def _github(each: Diagnostic) -> str:
    facts = {"title": f"elasticflow ({each.code})", "file": each.file}
    if each.line is not None:
        facts |= {"line": str(each.line), "col": str(each.column)}
        facts |= {"endLine": str(each.end_line), "endColumn": str(each.end_column)}
    text = f"{_where(each)}: {each.message}" + (f"\n  help: {each.help}" if each.help else "")
    kind = "notice" if each.severity == "note" else each.severity
    values = ",".join(
        f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in facts.items()
    )
    return f"::{kind} {values}::{_escaped(text)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _as_json(each: Diagnostic) -> dict[str, str | int | None]:
    return {
        "code": each.code,
        "severity": each.severity,
        "message": each.message,
        "file": each.file,
        "line": each.line,
        "column": each.column,
        "end_line": each.end_line,
        "end_column": each.end_column,
        "help": each.help,
    }


def _sarif(diagnostics: Sequence[Diagnostic]) -> dict[str, object]:
    results = []
    for each in diagnostics:
        location: dict[str, object] = {"artifactLocation": {"uri": each.file}}
        if each.line is not None:
            location["region"] = {
                "startLine": each.line,
                "startColumn": each.column,
                "endLine": each.end_line,
                "endColumn": each.end_column,
            }
        text = each.message + (f"\nhelp: {each.help}" if each.help else "")
        results.append(
            {
                "ruleId": each.code,
                "level": each.severity,
                "message": {"text": text},
                "locations": [{"physicalLocation": location}],
            }
        )
    rules = [{"id": code} for code in sorted({each.code for each in diagnostics})]
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": {"name": "elasticflow", "rules": rules}}, "results": results}],
    }
