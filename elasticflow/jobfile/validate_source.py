"""A merged source -> its tables and everything that is wrong with it; what cases share is judged once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.checks.all import check_tables
from elasticflow.jobfile.composition.references import References
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import in_order
from elasticflow.jobfile.entry_points.calls import EntryPointCache
from elasticflow.jobfile.entry_points.check import check_entry_points
from elasticflow.jobfile.tables.job import Job
from elasticflow.jobfile.tables.validate import TableCache, read_tables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.text.source import Source


class Validated(NamedTuple):
    """What became of a source: the job, None when a diagnostic is an error, and the diagnostics in order."""

    job: Job | None
    diagnostics: list[Diagnostic]


class ValidationCache(NamedTuple):
    """What was found out while jobs were checked: the cases of a file, and the files of one command, share most."""

    tables: TableCache
    calls: EntryPointCache

    @classmethod
    def nothing(cls) -> ValidationCache:
        """Return what is known at the beginning."""
        return cls(TableCache(), EntryPointCache())


class Judge:
    """Judges sources of one project.

    Args:
        root: The project's root.
        environment: Variables that references name; None: they are not looked up.
        known: What other jobs have told; added to.
    """

    def __init__(
        self, root: Path, environment: Mapping[str, str] | None, known: ValidationCache | None = None
    ) -> None:
        self._root = root
        self._environment = environment
        self._tables, self._calls = known or ValidationCache.nothing()

    def judge(self, source: Source, case: str | None = None, *, is_part: bool = False) -> Validated:
        """Return the job of *source*, which has no [matrix], or what is wrong with it.

        Args:
            source: The merged keys.
            case: The case they are, if they are one of a matrix.
            is_part: Something that might have given keys could not be read: none must be called missing.
        """
        references = References(source, case, self._environment)
        source = references.resolved()
        tables, found = read_tables(source, self._tables)
        if is_part:
            found = [each for each in found if each.code not in {codes.MISSING, codes.EXCLUSIVE}]
        entries = check_entry_points(source, self._root, self._calls)
        found += [*check_tables(source, tables), *_without_echoes(entries, found)]
        found = [references.mask(each) for each in _without_echoes(found, references.problems)]
        found += references.problems
        if any(each.severity == "error" for each in found):
            return Validated(None, in_order(found))
        # Every table has been validated: built from them, the job's own schema (15 ms) is not needed.
        job = Job.model_construct(_fields_set=set(source.raw), **tables).with_secrets(references.secrets)
        return Validated(job, in_order(found))


def _without_echoes(found: list[Diagnostic], before: list[Diagnostic]) -> list[Diagnostic]:
    """Return the findings but those about what is known to be wrong: its reference, or that it stands there at all."""
    told = {(each.file, each.line, each.column) for each in before if each.severity == "error" and each.line}
    return [each for each in found if (each.file, each.line, each.column) not in told]
