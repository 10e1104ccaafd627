"""Problems of job files with code, place and help."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.jobfile.diagnostics.positions import Span, line_and_column

if TYPE_CHECKING:
    from collections.abc import Iterable

Severity = Literal["error", "warning", "note"]


class Diagnostic(NamedTuple):
    """One problem.

    Attributes:
        code: Stable code, explained by `elasticflow guide`.
        severity: An error refuses the job, a warning does with --strict, a note never.
        message: The problem, in the words of the job file.
        file: Name of the file as the user wrote it, or `--set`.
        line: From 1; None when the file as a whole is meant.
        column: From 1, in code points.
        end_line: Line of the last code point.
        end_column: Column after the last code point.
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
        """True if the diagnostic is about the command line, not about a file."""
        return self.file.startswith("--")

    @property
    def where(self) -> str:
        """File, line and column as editors and terminals read them."""
        return self.file if self.line is None else f"{self.file}:{self.line}:{self.column}"


def diagnostic_at(
    code: str, message: str, *, file: str, text: str, span: Span, severity: Severity = "error", remedy: str | None = None
) -> Diagnostic:  # fmt: skip
    """Return a diagnostic about the span of a file's text."""
    from elasticflow.jobfile.diagnostics.excerpt import line_at  # most files have nothing to say

    line, column = line_and_column(text, span.start)
    end_line, end_column = line_and_column(text, max(span.end, span.start))
    excerpt = line_at(text, span.start)
    return Diagnostic(code, severity, message, file, line, column, end_line, end_column, remedy, excerpt)


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Return each diagnostic once, sorted by file, place and code."""
    return sorted(
        dict.fromkeys(diagnostics), key=lambda d: (d.file, d.line or 0, d.column or 0, d.code, d.message)
    )
