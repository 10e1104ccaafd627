"""Problems of job files with code, place and help, and the formats they are shown in (floor 1, pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from elasticflow.spec.positions import Span, place

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Severity = Literal["error", "warning", "note"]
Format = Literal["full", "concise", "json", "github", "sarif"]
FORMATS: tuple[str, ...] = get_args(Format)

_COLOURS = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "note": "\x1b[1;36m",
    "frame": "\x1b[1;34m",
    "bold": "\x1b[1m",
    "off": "\x1b[0m",
}


class Diagnostic(NamedTuple):
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

    @property
    def is_flag(self) -> bool:
        """Whether it is about the command line and not about a file."""
        return self.file.startswith("--")

    @property
    def where(self) -> str:
        """File, line and column as editors and terminals read them."""
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"


def at(
    code: str, message: str, *, file: str, text: str, span: Span, severity: Severity = "error", remedy: str | None = None
) -> Diagnostic:  # fmt: skip
    """Return a diagnostic about the span of a file's text."""
    from elasticflow.spec.findings.excerpts import line_at  # most files have nothing to say

    line, column = place(text, span.start)
    end_line, end_column = place(text, max(span.end, span.start))
    excerpt = line_at(text, span.start)
    return Diagnostic(code, severity, message, file, line, column, end_line, end_column, remedy, excerpt)


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return each diagnostic once, sorted by file, place and code."""
    return sorted(
        dict.fromkeys(diagnostics), key=lambda d: (d.file, d.line or 0, d.column or 0, d.code, d.message)
    )


def render(diagnostics: Sequence[Diagnostic], style: Format = "full", *, colour: bool = False) -> str:
    """Return all diagnostics in one format, without a newline at the end; empty for none in a line-based one."""
    shown = [_printable(each) for each in diagnostics]
    if style == "full":
        return "\n\n".join(_full(each, colour=colour) for each in shown)
    if style == "concise":
        return "\n".join(_concise(each) for each in shown)
    from elasticflow.spec.findings import machine_formats  # 5 ms that people need not wait for

    match style:
        case "github":
            return "\n".join(machine_formats.as_github(each) for each in shown)
        case "json":
            return machine_formats.as_json(shown)
        case "sarif":
            return machine_formats.as_sarif(shown)


def _printable(each: Diagnostic) -> Diagnostic:
    """Return it without what a terminal would obey: file names and source lines may hold anything."""
    from elasticflow.spec.findings.excerpts import printable

    return each._replace(
        message=printable(each.message),
        file=printable(each.file).replace("\n", "\N{REPLACEMENT CHARACTER}"),
        help=None if each.help is None else printable(each.help),
    )


def _full(each: Diagnostic, *, colour: bool) -> str:
    paint = _COLOURS if colour else dict.fromkeys(_COLOURS, "")
    off, frame, tint = paint["off"], paint["frame"], paint[each.severity]
    width = len(str(each.line or ""))
    bar = f"{frame}{' ' * width} |{off}"
    lines = [f"{tint}{each.severity}[{each.code}]{off}{paint['bold']}: {each.message}{off}"]
    lines.append(f"{frame}{' ' * width}-->{off} {each.where}")
    if each.line is not None and each.excerpt is not None and each.column is not None:
        from elasticflow.spec.findings.excerpts import layout

        end = each.end_column if each.end_line == each.line else None
        shown, carets = layout(each.excerpt, each.column, end)
        blanks = " " * (len(carets) - len(carets.lstrip(" ")))
        lines += [bar, f"{frame}{each.line} |{off} {shown}", f"{bar} {blanks}{tint}{carets.lstrip(' ')}{off}"]
    if each.help is not None:
        first, *more = each.help.split("\n")
        lines.append(f"{frame}{' ' * width} ={off} help: {first}")
        lines += [f"{' ' * width}         {line}" for line in more]
    return "\n".join(line.rstrip() for line in lines)


def _concise(each: Diagnostic) -> str:
    tail = f" ({each.help.splitlines()[0]})" if each.help else ""
    return f"{each.where}: {each.severity}[{each.code}] {each.message}{tail}"
