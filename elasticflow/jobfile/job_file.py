"""A job file and the cases of its [matrix], each a source of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from elasticflow.jobfile.read_tables import read_table
from elasticflow.jobfile.text.layers import MovedLayer, lay_over, value_at, without
from elasticflow.jobfile.text.source import load_source
from elasticflow.jobfile.validate_source import Validated, ValidationCache, validate_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.jobfile.checks.matrix import Case
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
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
