"""Diagnostics as texts: for people in full or in one line, or for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic

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


def render(diagnostics: Sequence[Diagnostic], style: Format = "full", *, colour: bool = False) -> str:
    """Return all diagnostics in one format, without a final newline; without diagnostics, line formats return ""."""
    shown = [_printable(each) for each in diagnostics]
    if style == "full":
        return "\n\n".join(_full(each, colour=colour) for each in shown)
    if style == "concise":
        return "\n".join(_concise(each) for each in shown)
    from elasticflow.jobfile.diagnostics import render_machine  # 5 ms that people need not wait for

    match style:
        case "github":
            return "\n".join(render_machine.as_github(each) for each in shown)
        case "json":
            return render_machine.as_json(shown)
        case "sarif":
            return render_machine.as_sarif(shown)


def _printable(each: Diagnostic) -> Diagnostic:
    """Return a diagnostic without control characters: file names and source lines may hold anything."""
    from elasticflow.jobfile.diagnostics.excerpt import printable

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
        from elasticflow.jobfile.diagnostics.excerpt import excerpt_and_carets

        end = each.end_column if each.end_line == each.line else None
        shown, carets = excerpt_and_carets(each.excerpt, each.column, end)
        blanks = " " * (len(carets) - len(carets.lstrip(" ")))
        lines += [bar, f"{frame}{each.line} |{off} {shown}", f"{bar} {blanks}{tint}{carets.lstrip(' ')}{off}"]
    if each.help is not None:
        first, *more = each.help.split("\n")
        lines.append(f"{frame}{' ' * width} ={off} help: {first}")
        lines += [f"{' ' * width}         {line}" for line in more]
    return "\n".join(line.rstrip() for line in lines)


def _concise(each: Diagnostic) -> str:
    first = each.help.splitlines()[0].rstrip(",;:") if each.help else ""  # a sentence may continue below
    return f"{each.where}: {each.severity}[{each.code}] {each.message}{f' ({first})' if first else ''}"
