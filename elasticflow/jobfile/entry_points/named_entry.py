"""An entry point that a job names, with what it is given and where its findings are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.entry_points.object_arguments import marked

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic, Severity
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.entry_points.uses import Use
    from elasticflow.jobfile.python_source.known_calls import KnownCalls
    from elasticflow.jobfile.python_source.resolve import Resolver
    from elasticflow.jobfile.text.source import Source

_Result = TypeVar("_Result")


class NamedEntry:
    """One entry point of a job.

    Attributes:
        source: The job's keys, each with its place.
        resolver: Finds what the entry names.
        use: Where it stands, and what it is called with.
        module: What stands before the colon.
        attribute: What stands after it.
    """

    def __init__(self, source: Source, resolver: Resolver, use: Use, known: KnownCalls) -> None:
        self.source, self.resolver, self.use = source, resolver, use
        self.module, _, self.attribute = use.text.partition(":")
        self._known = known

    def named_arguments(self) -> dict[str, Any]:
        """Return what is passed by name, as the job file has it, objects marked."""
        if self.use.args is None:
            return {}
        value: Any = self.source.raw
        for part in self.use.args:
            if isinstance(part, int) and isinstance(value, list):
                value = value[part]
            else:
                value = value.get(part) if isinstance(value, dict) else None
        return {key: marked(each) for key, each in value.items()} if isinstance(value, dict) else {}

    def once(self, what: str, make: Callable[[], _Result], *more: object) -> _Result:
        """Return what *make* makes of the entry, made once for all jobs of a file that name it alike."""
        return self._known.once(make, what, self.resolver.finder.own, self.use.text, *more)

    def problem(
        self, code: str, message: str, remedy: str | None, severity: Severity = "error", path: KeyPath = ()
    ) -> Diagnostic:
        """Return what is wrong, shown at the entry, or at the key *path*."""
        where = path or self.use.path
        return self.source.problem(code, message, where, at_key=bool(path), severity=severity, remedy=remedy)

    def note(self, reason: str) -> Diagnostic:
        """Return that the entry is not checked, and why."""
        return self.problem(codes.CANNOT_TELL, f"{self.use.text} is not checked: {reason}", None, "note")
