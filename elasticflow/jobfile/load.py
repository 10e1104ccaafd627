"""Job file -> Job: every problem of every file and every case at once, each with its place."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import CaseError, JobRefusedError
from elasticflow.jobfile.diagnostics.diagnostic import in_order
from elasticflow.jobfile.diagnostics.render_text import render
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.entry_points.check import OFF_THE_PATH
from elasticflow.jobfile.project import project_root_of
from elasticflow.jobfile.read_tables import read_table
from elasticflow.jobfile.text.layers import MovedLayer, lay_over, table_at, value_at, without
from elasticflow.jobfile.text.source import load_source
from elasticflow.jobfile.validate_source import Validated, ValidationCache, validate_source, without_missing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.jobfile.checks.matrix import Case
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source


_MATRIX = "matrix"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"


class JobFile:
    """A job file as read, its [matrix] expanded.

    Args:
        environment: Variables that references name; None: they are not looked up.
        cache: Results of validating other files; results for this file are added.
        texts: Contents by real path, read in place of the files.

    Attributes:
        source: The merged keys of the file, each with its place.
        cases: The cases by name; empty without a [matrix], or if it is wrong.
        problems: Errors of texts and of [matrix] that could not be read, and warnings about [matrix].
    """

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        root: Path,
        environment: Mapping[str, str] | None,
        cache: ValidationCache | None = None,
        texts: Mapping[str, bytes] | None = None,
    ) -> None:
        self.path = path
        self.root = root
        self.source = load_source(path, overrides, texts)
        self._environment = environment
        self._cache = cache or ValidationCache.empty()
        self.problems: list[Diagnostic] = list(self.source.problems)
        self.cases: dict[str, Case] = self._expand_matrix() if self.has_matrix else {}

    @property
    def is_read(self) -> bool:
        """True if the job file itself could be read."""
        return any(layer.is_file for layer in self.source.layers)

    @property
    def has_errors(self) -> bool:
        """True if a text or [matrix] could not be read, so that keys may be missing."""
        return any(each.severity == "error" for each in self.problems)

    @property
    def has_matrix(self) -> bool:
        """True if the file has a [matrix]: it is several jobs."""
        return _MATRIX in self.source.raw

    def validate(self, case: str | None) -> Validated:
        """Return the result of validating a case; with None, of validating the file without its [matrix]."""
        if not self.is_read:
            return Validated(self.source, None, [])
        if case is None:
            source = replace(self.source, raw=without(self.source.raw, (_MATRIX,)))
        else:
            source = self._with_case(self.cases[case])
        return validate_source(
            source, self.root, self._environment, self._cache, case=case, is_part=self.has_errors
        )

    def _expand_matrix(self) -> dict[str, Case]:
        from elasticflow.jobfile.checks.matrix import expand  # most files have none

        _, problems = read_table(self.source, _MATRIX)
        cases, more = ([], []) if problems else expand(self.source)
        self.problems += [*problems, *more]
        return {case.name: case for case in cases}

    def _with_case(self, case: Case) -> Source:
        """Return the source of a case: its keys lie over the files and under the flags."""
        layers = self.source.layers
        flags = [layer for layer in layers if not layer.is_file]
        own = MovedLayer(case.raw, case.moves, self.source.look)
        raw = self._raw_of_files
        for layer in (own, *flags):
            raw = lay_over(raw, layer)
        raw = without(raw, (_MATRIX,))
        name = value_at(("job", "name"), raw)
        # Messages show an invalid name as it is written.
        if isinstance(name, str) and re.fullmatch(_NAME, name):
            raw["job"] = {**raw["job"], "name": f"{name}-{case.name}"}
        in_files = [layer for layer in layers if layer.is_file]
        return replace(self.source, raw=raw, layers=(*in_files, own, *flags))

    @cached_property
    def _raw_of_files(self) -> TomlTable:
        raw: TomlTable = {}
        for layer in self.source.layers:
            raw = lay_over(raw, layer) if layer.is_file else raw
        return raw


_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_MOST_LISTED = 12


class LoadedJob(NamedTuple):
    """The result of loading a job file, or one of its cases.

    Attributes:
        path: The job file as it was named.
        source: The keys as written, each with its place.
        valid_job: The job; None when a diagnostic is an error, and for a file with [matrix] as a whole.
        diagnostics: Errors, warnings and notes in order of their place.
        case: Name of the case, if this is a case of a file with [matrix].
        cases: Names of all cases, if this is a file with [matrix] as a whole.
        changes: The keys that the case changes, and their values.
    """

    path: Path
    project_root: Path
    source: Source
    valid_job: Job | None
    diagnostics: list[Diagnostic]
    case: str | None = None
    cases: tuple[str, ...] = ()
    changes: Mapping[KeyPath, Any] = MappingProxyType({})

    @property
    def files(self) -> tuple[Path, ...]:
        """The job file and every file it extends, each once."""
        return self.source.files

    @property
    def job(self) -> Job:
        """The job of a result that has one, as `require_job` and `require_cases` return."""
        assert self.valid_job is not None
        return self.valid_job

    @property
    def has_errors(self) -> bool:
        """True if a diagnostic is an error."""
        return any(each.severity == "error" for each in self.diagnostics)

    def as_base(self) -> LoadedJob:
        """Return the result for a file that others extend: no job, and no diagnostics of what these files may give."""
        diagnostics = without_missing(self.diagnostics)
        if "path" not in table_at(self.source.raw, "job"):
            diagnostics = [each for each in diagnostics if OFF_THE_PATH not in each.message]
        return self._replace(valid_job=None, diagnostics=diagnostics)


def load_job(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    case: str | None = None,
    environment: Mapping[str, str] | None = None,
    cache: ValidationCache | None = None,
    texts: Mapping[str, bytes] | None = None,
) -> LoadedJob:
    """Return the job, or every reason why there is none; never raises for the content of the file.

    A file with [matrix] is several jobs: without *case* all of them are checked.

    Args:
        overrides: `key=value` texts that win over the file.
        environment: Variables that `${env:NAME}` names. None: they are not looked up.
        cache: Results of validating other files of this command; results for this file are added.
        texts: Contents by real path, read in place of the files.

    Raises:
        CaseError: the file has no such case.
    """
    root = project_root_of(path)
    file = JobFile(path, overrides, root, environment, cache, texts)
    if case is not None and file.is_read and not file.has_matrix:
        raise CaseError(f"{path} has no [matrix], so there is no case {case}", "leave out --case")
    if case is not None and file.cases:
        return _loaded(file, file.validate(_known_case(file, case)), case)
    if not file.cases:  # no matrix; or a wrong one, and at least the rest of the file can be validated
        return _loaded(file, file.validate(None))
    return _as_a_whole(file, [file.validate(name) for name in file.cases])


def require_job(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    case: str | None = None,
    environment: Mapping[str, str] | None = _NO_VARIABLES,
) -> LoadedJob:
    """Return the loaded job, which has no errors; arguments as for `load_job`.

    Raises:
        JobRefusedError: the job has errors; the message is the rendered diagnostics.
        CaseError: the file has a [matrix], and *case* is not one of its cases.
    """
    loaded = load_job(path, overrides, case=case, environment=environment)
    _refuse_errors(loaded)
    if loaded.cases:
        message = f"{path} is {len(loaded.cases)} job{'s' if len(loaded.cases) > 1 else ''}, one for each case of its [matrix]"
        raise CaseError(message, f"say which one: --case {loaded.cases[0]}\n{_listed(loaded.cases, path)}")
    return loaded


def require_cases(
    path: Path, overrides: Sequence[str] = (), *, environment: Mapping[str, str] | None = _NO_VARIABLES
) -> list[LoadedJob]:
    """Return every case of a file with [matrix], none of which has errors; arguments as for `load_job`.

    Raises:
        JobRefusedError: a case has errors; the message is the rendered diagnostics.
        CaseError: the file has no [matrix].
    """
    file = JobFile(path, overrides, project_root_of(path), environment)
    validated = [file.validate(name) for name in file.cases]
    if not validated:
        _refuse_errors(_loaded(file, file.validate(None)))
        raise CaseError(f"{path} has no [matrix]: it is one job", "leave out --all")
    _refuse_errors(_as_a_whole(file, validated))
    return [_loaded(file, each, name) for name, each in zip(file.cases, validated, strict=True)]


def has_matrix(path: Path, overrides: Sequence[str] = ()) -> bool:
    """Return whether a file has a [matrix]: it is several jobs."""
    return JobFile(path, overrides, project_root_of(path), None).has_matrix


def _loaded(file: JobFile, validated: Validated, case: str | None = None) -> LoadedJob:
    diagnostics = in_order([*file.problems, *validated.diagnostics])
    job = None if file.has_errors else validated.job
    changes: Mapping[KeyPath, Any] = {} if case is None else file.cases[case].changes()
    return LoadedJob(file.path, file.root, validated.source, job, diagnostics, case, changes=changes)


def _as_a_whole(file: JobFile, validated: list[Validated]) -> LoadedJob:
    """Return the file with the findings of all cases; a finding of only some cases names them."""
    names: dict[Diagnostic, list[str]] = {}
    for name, each in zip(file.cases, validated, strict=True):
        for diagnostic in each.diagnostics:
            names.setdefault(diagnostic, []).append(name)
    merged = [
        each
        if len(cases) == len(validated)
        else each._replace(message=f"{each.message} ({_which(cases, len(validated))})")
        for each, cases in names.items()
    ]
    diagnostics = in_order([*file.problems, *merged])
    return LoadedJob(file.path, file.root, file.source, None, diagnostics, cases=tuple(file.cases))


def _which(cases: list[str], count: int) -> str:
    return f"case {cases[0]}" if len(cases) == 1 else f"{len(cases)} of {count} cases, such as {cases[0]}"


def _refuse_errors(loaded: LoadedJob) -> None:
    if loaded.has_errors:
        raise JobRefusedError(render([each for each in loaded.diagnostics if each.severity != "note"]))


def _known_case(file: JobFile, case: str) -> str:
    if case in file.cases:
        return case
    near = nearest(case, file.cases)
    remedy = f'did you mean "{near[0]}"?' if near else _listed(tuple(file.cases), file.path)
    raise CaseError(f"{file.path} has no case {case}", remedy)


def _listed(names: tuple[str, ...], path: Path) -> str:
    shown = f"cases: {', '.join(names[:_MOST_LISTED])}"
    more = len(names) - _MOST_LISTED
    return shown if more <= 0 else f"{shown} and {more} more: elasticflow plan {path}"
