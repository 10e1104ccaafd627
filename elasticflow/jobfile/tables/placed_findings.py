"""One mistake, one finding: what only follows from another finding is left out, and places are looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, written
from elasticflow.jobfile.tables.misplaced_keys import Place, has_header, set_flag, value_at
from elasticflow.jobfile.tables.repairs import repaired
from elasticflow.jobfile.tables.types import ONE_OF
from elasticflow.jobfile.text.layers import MovedLayer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.pydantic_messages import Finding
    from elasticflow.jobfile.text.source import Source


def placed(source: Source, findings: list[Finding]) -> list[Diagnostic]:
    """Return the findings at their places, each mistake once."""
    meant = {key for each in findings if each.belongs for key in each.belongs.keys}
    if ("extends",) in meant:  # whatever is missing may stand in the file it names
        findings = [each for each in findings if not _wanted(each)]
    kept = [each for each in findings if meant.isdisjoint(_wanted(each))]
    wrong = {each.path for each in kept if each.code == codes.OUT_OF_RANGE}
    kept = [each for each in kept if each.code != codes.EXCLUSIVE or each.path not in wrong]
    return [_placed(source, _swallowed(source, each)) for each in _together(kept)]


def _together(findings: list[Finding]) -> list[Finding]:
    """Return the findings; of keys that belong in one table that is not there yet, each names all: one line is pasted."""
    tables: dict[KeyPath, dict[str, str]] = {}
    for each in findings:
        if each.belongs and len(each.belongs.keys) == 1 and each.belongs.value:
            *table, key = each.belongs.keys[0]
            tables.setdefault(tuple(table), {})[str(key)] = each.belongs.value
    return [
        each._replace(belongs=each.belongs._replace(others=tuple(tables[each.belongs.keys[0][:-1]].items())))
        if each.belongs and each.belongs.keys and each.belongs.keys[0][:-1] in tables
        else each
        for each in findings
    ]


def _wanted(finding: Finding) -> list[KeyPath]:
    """Return the keys, any of which would do, whose absence the finding is about."""
    if finding.code == codes.MISSING:
        return [finding.path]
    if finding.code == codes.EXCLUSIVE and len(finding.path) == 1:
        return [(*finding.path, key) for key in ONE_OF[str(finding.path[0])]]
    return []


def _swallowed(source: Source, finding: Finding) -> Finding:
    """Return the finding; about the key itself where it stands in a table below the one that misses it."""
    for wanted in _wanted(finding):
        table = source.raw.get(str(wanted[0]))
        if len(wanted) != 2 or not isinstance(table, dict):
            continue
        for path in _below(table, (wanted[0],)):
            if path[-1] == wanted[-1] and len(path) > 2:
                message = f"{finding.message}: {path[-1]} stands in [{dotted(path[:-1])}]"
                return finding._replace(
                    message=message, path=path, at_key=True, remedy=None, belongs=Place((wanted,))
                )
    return finding


def _below(table: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _below(value, (*path, key))


def _placed(source: Source, finding: Finding) -> Diagnostic:
    path, belongs, remedy = finding.path, finding.belongs, finding.remedy
    found = source.problem(finding.code, finding.message, path, at_key=finding.at_key, remedy=remedy)
    if found.is_flag:
        return found._replace(help=_for_flag(source, finding) or remedy)
    if belongs is None:
        return found
    if any(isinstance(layer, MovedLayer) and layer.look(path) for layer in source.layers):
        return found._replace(help=belongs.in_axis())
    return found._replace(help=belongs.in_file(path, source.raw, has_header=has_header(source, path[:-1])))


def _for_flag(source: Source, finding: Finding) -> str | None:
    """Return what to write instead of a `--set`."""
    value = value_at(finding.path, source.raw)
    if finding.belongs is not None:
        return finding.belongs.in_flag(value)
    meant = repaired(finding.path, value) if finding.remedy and not finding.at_key else None
    return None if meant is None else set_flag(finding.path, written(meant))
