"""A merged source -> its tables and all its problems; tables that several cases share are validated once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.checks.all import check_program, check_tables
from elasticflow.jobfile.checks.references import References
from elasticflow.jobfile.checks.script import check_script
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import in_order
from elasticflow.jobfile.entry_points.calls import EntryPointCache
from elasticflow.jobfile.entry_points.check import check_entry_points
from elasticflow.jobfile.read_tables import TableCache, read_tables
from elasticflow.jobfile.tables.job import Job

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.text.source import Source


class Validated(NamedTuple):
    """The result of validating a source: the job (None if a diagnostic is an error), and the diagnostics in order."""

    source: Source
    job: Job | None
    diagnostics: list[Diagnostic]


class ValidationCache(NamedTuple):
    """Results of validating jobs: the cases of a file, and the files of one command, have most of them in common."""

    tables: TableCache
    entry_points: EntryPointCache

    @classmethod
    def empty(cls) -> ValidationCache:
        """Return an empty cache."""
        return cls(TableCache(), EntryPointCache())


def validate_source(
    source: Source,
    root: Path,
    environment: Mapping[str, str] | None,
    cache: ValidationCache,
    *,
    case: str | None = None,
    is_part: bool = False,
) -> Validated:
    """Return the job of *source*, which has no [matrix], or its problems.

    Args:
        environment: Variables that references name; None: they are not looked up.
        cache: Results of validating other jobs; results for this job are added.
        case: Name of the case, if the keys are those of a case of a matrix.
        is_part: A text that may hold further keys could not be read: no key may be reported as missing.
    """
    written, references = source, References(source, case, environment)
    source = references.resolved()
    tables, problems = read_tables(source, cache.tables)
    if is_part:
        problems = without_missing(problems)
    entry_problems = check_entry_points(source, root, cache.entry_points)
    problems += [*check_tables(source, tables), *_without_echoes(entry_problems, problems)]
    problems += [*check_program(source, tables, root), *check_script(source, tables, root)]
    problems = [references.mask(each) for each in _without_echoes(problems, references.problems)]
    problems += references.problems
    if any(each.severity == "error" for each in problems):
        return Validated(written, None, in_order(problems))
    # Every table has been validated: built from them, the job's own schema (15 ms) is not needed.
    job = Job.model_construct(_fields_set=set(source.raw), **tables).with_secrets(references.secrets)
    return Validated(written, job, in_order(problems))


def without_missing(problems: list[Diagnostic]) -> list[Diagnostic]:
    """Return the problems except missing keys and tables, which only a whole job must have."""
    return [each for each in problems if each.code not in {codes.MISSING, codes.EXCLUSIVE}]


def _without_echoes(problems: list[Diagnostic], earlier: list[Diagnostic]) -> list[Diagnostic]:
    """Return the problems except those at the places of earlier errors: a wrong reference, a key that is not allowed."""
    places = {
        (each.file, each.line, each.column) for each in earlier if each.severity == "error" and each.line
    }
    return [each for each in problems if (each.file, each.line, each.column) not in places]
