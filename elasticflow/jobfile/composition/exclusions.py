"""Combinations that a matrix leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticflow.jobfile.composition.axes import Axis, leaves, mark_of
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.source import Source


_Numbers = dict["KeyPath", dict[object, int]]


@dataclass
class Exclusions:
    """What is left out: for each set of axes, combinations of their values by number."""

    groups: dict[tuple[KeyPath, ...], set[tuple[int, ...]]] = field(default_factory=dict)

    def covers(self, chosen: Iterable[tuple[Axis, int]]) -> bool:
        """Return whether a combination is left out."""
        if not self.groups:
            return False
        numbers = {axis.path: number for axis, number in chosen}
        return any(tuple(numbers[path] for path in paths) in out for paths, out in self.groups.items())


def read_exclusions(source: Source, axes: list[Axis]) -> tuple[Exclusions, list[Diagnostic]]:
    """Return what is left out, and what is wrong with it: each exclusion must leave something out."""
    exclusions, problems = Exclusions(), []
    numbers: _Numbers = {
        axis.path: {mark_of(value): n for n, value in enumerate(axis.values)} for axis in axes
    }
    for place, table in enumerate(source.raw["matrix"].get("exclude", [])):
        given = dict(leaves(table))
        found = list(_problems(source, ("matrix", "exclude", place), given, axes, numbers))
        problems += found
        if not found:
            paths = tuple(sorted(given, key=str))
            chosen = tuple(numbers[path][mark_of(given[path])] for path in paths)
            exclusions.groups.setdefault(paths, set()).add(chosen)
    return exclusions, problems


def _problems(
    source: Source, place: KeyPath, given: dict[KeyPath, object], axes: list[Axis], numbers: _Numbers
) -> Iterator[Diagnostic]:
    if not given:
        message = "an exclusion without keys would leave out every combination"
        remedy = "name values of axes, such as { job.seed = 2 }"
        yield source.problem(codes.EXCLUSION, message, place, remedy=remedy)
    for path, value in given.items():
        if path not in numbers:
            message = f"{dotted(path)} is no axis, so this leaves nothing out"
            meant = [dotted(axis) for axis in numbers if axis[-len(path) :] == path]
            remedy = f"axes of this matrix: {', '.join(map(dotted, numbers)) or 'none'}"
            remedy = f'did you mean "{meant[0]}"?' if meant else remedy
            yield source.problem(codes.EXCLUSION, message, (*place, *path), at_key=True, remedy=remedy)
        elif mark_of(value) not in numbers[path]:
            message = f"the axis {dotted(path)} has no {show(value)}, so this leaves nothing out"
            values = next(axis.values for axis in axes if axis.path == path)
            remedy = f"it has {', '.join(map(show, values[:8]))}"
            yield source.problem(codes.EXCLUSION, message, (*place, *path), remedy=remedy)
