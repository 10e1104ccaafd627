"""[matrix] -> cases: the keys that each case changes, and its name."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show, to_toml
from elasticflow.jobfile.text.layers import leaves, value_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source

AXES = ("matrix", "axes")
_OF_A_RANGE = {"min", "max", "values", "distribution", "low", "high"}  # as in other tools' search spaces


class Axis(NamedTuple):
    """One axis: a key of the job and the values it takes in turn."""

    path: KeyPath
    values: list[Any]


def read_axes(source: Source) -> tuple[list[Axis], list[Diagnostic]]:
    """Return the axes that can be used, and the problems of the others."""
    axes: list[Axis] = []
    problems: list[Diagnostic] = []
    for path, value in leaves(source.raw["matrix"].get("axes", {})):
        wrong = list(_axis_problems(source, path, value))
        problems += wrong
        if not wrong:
            axes.append(Axis(path, value))
    return axes, problems


def _axis_problems(source: Source, path: KeyPath, values: object) -> Iterator[Diagnostic]:
    where, name = (*AXES, *path), dotted(path)
    dots = [part for part in path if isinstance(part, str) and "." in part]
    if dots:
        message = f"{show(dots[0])} in quotes is one key with dots in it"
        remedy = f"write it without quotes: {dots[0]} = ..."
        yield source.problem(codes.AXIS, message, where, at_key=True, remedy=remedy)
    elif not isinstance(values, list) or not values:
        message = f"the axis {name} must be a list of values, not {show(values)}"
        from elasticflow.jobfile.wording.same_values import as_list  # most files hold no mistake

        is_range = path[-1] in _OF_A_RANGE
        meant = as_list(path, values) if isinstance(values, str | int | float) and not is_range else None
        remedy = f"an axis lists its values: {dotted(path[:-1]) if is_range else name} = [1, 2]"
        remedy = f"write {name} = {to_toml(meant)}" if meant else remedy
        yield source.problem(codes.AXIS, message, where, remedy=remedy)
    else:
        seen: set[object] = set()
        for number, value in enumerate(values):
            mark = identity_of(value)
            if mark is None:
                message = f"the axis {name} holds {show(value)}, which gives its cases no name"
                remedy = (
                    "an axis has numbers, texts, true or false; others are given by name: [matrix.cases.NAME]"
                )
                yield source.problem(codes.AXIS, message, (*where, number), remedy=remedy)
            elif mark in seen:
                message = f"the axis {name} has {show(value)} twice"
                yield source.problem(codes.AXIS, message, (*where, number), remedy="keep one of them")
            seen.add(mark)


def identity_of(value: object) -> tuple[bool, str | int | float] | None:
    """Return a key that is equal only for equal values of an axis; None for a value that no axis can have."""
    is_one = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return (isinstance(value, bool), value) if is_one else None  # type: ignore[return-value]  # True equals 1


_Numbers = dict["KeyPath", dict[object, int]]


@dataclass
class Exclusions:
    """The combinations that are left out: for each set of axes, the numbers of their values."""

    groups: dict[tuple[KeyPath, ...], set[tuple[int, ...]]] = field(default_factory=dict)

    def covers(self, chosen: Iterable[tuple[Axis, int]]) -> bool:
        """Return whether a combination is left out."""
        if not self.groups:
            return False
        numbers = {axis.path: number for axis, number in chosen}
        return any(tuple(numbers[path] for path in paths) in out for paths, out in self.groups.items())


def read_exclusions(source: Source, axes: list[Axis]) -> tuple[Exclusions, list[Diagnostic]]:
    """Return the excluded combinations, and the problems of `exclude`: each exclusion must leave something out."""
    exclusions, problems = Exclusions(), []
    numbers: _Numbers = {
        axis.path: {identity_of(value): n for n, value in enumerate(axis.values)} for axis in axes
    }
    for position, table in enumerate(source.raw["matrix"].get("exclude", [])):
        given = dict(leaves(table))
        wrong = list(_exclusion_problems(source, ("matrix", "exclude", position), given, axes, numbers))
        problems += wrong
        if not wrong:
            paths = tuple(sorted(given, key=str))
            chosen = tuple(numbers[path][identity_of(given[path])] for path in paths)
            exclusions.groups.setdefault(paths, set()).add(chosen)
    return exclusions, problems


def _exclusion_problems(
    source: Source, where: KeyPath, given: dict[KeyPath, object], axes: list[Axis], numbers: _Numbers
) -> Iterator[Diagnostic]:
    if not given:
        message = "an exclusion without keys would leave out every combination"
        remedy = "name values of axes, such as { job.seed = 2 }"
        yield source.problem(codes.EXCLUSION, message, where, remedy=remedy)
    for path, value in given.items():
        if path not in numbers:
            message = f"{dotted(path)} is no axis, so this leaves nothing out"
            meant = [dotted(axis) for axis in numbers if axis[-len(path) :] == path]
            remedy = f"axes of this matrix: {', '.join(map(dotted, numbers)) or 'none'}"
            remedy = f'did you mean "{meant[0]}"?' if meant else remedy
            yield source.problem(codes.EXCLUSION, message, (*where, *path), at_key=True, remedy=remedy)
        elif identity_of(value) not in numbers[path]:
            message = f"the axis {dotted(path)} has no {show(value)}, so this leaves nothing out"
            values = next(axis.values for axis in axes if axis.path == path)
            remedy = f"it has {', '.join(map(show, values[:8]))}"
            yield source.problem(codes.EXCLUSION, message, (*where, *path), remedy=remedy)


MOST_CASES = 5_000
MOST_LETTERS = 100
_ABSURD = 10**12  # a larger number tells a reader nothing, and Python may refuse to write it
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FIXED = {("job", "name"): "a case's job is called after the job and the case", ("matrix",): "a case has no cases", ("extends",): "files are extended by files"}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One job of a matrix.

    Attributes:
        name: Unique within the matrix.
        moves: The places of these keys in [matrix], by the beginnings of their paths.
        path: The key to point at when the case as a whole is meant.
    """

    name: str
    raw: TomlTable
    moves: dict[KeyPath, KeyPath]
    path: KeyPath

    def changes(self) -> dict[KeyPath, Any]:
        """Return the keys that the case changes, by their whole paths."""
        return dict(leaves(self.raw))


def expand(source: Source, *, checks_keys: bool = True) -> tuple[list[Case], list[Diagnostic]]:
    """Return the cases of a file whose [matrix] has the right types, and the problems of [matrix].

    The combinations of the axes come first, the last axis changing fastest; then the cases given by name. Only with
    *checks_keys* is each axis checked to be a key of a job.
    """
    table = source.raw["matrix"]
    axes, problems = read_axes(source)
    excluded, more = read_exclusions(source, axes)
    problems += [*more, *_fixed_keys(source, axes), *(_unknown_keys(source, axes) if checks_keys else ())]
    given = table.get("cases", {})
    # Before anything is expanded: a few axes with many values make more cases than any machine holds.
    count = math.prod(len(axis.values) for axis in axes) * bool(axes) + len(given)
    if count > MOST_CASES:
        number = f"{count:,}" if count < _ABSURD else f"more than {_ABSURD:,}"
        message = f"the matrix makes {number} cases, and at most {MOST_CASES:,} are allowed"
        remedy = "fewer values, or several files"
        problems.append(
            source.problem(codes.TOO_MANY_CASES, message, ("matrix",), at_key=True, remedy=remedy)
        )
    if problems:
        return [], problems
    cases = [each for each in _combinations(axes) if not excluded.covers(each[1])]
    named = [_of_axes(name, chosen) for name, chosen in cases]
    for name, keys in given.items():
        path = ("matrix", "cases", name)
        named.append(Case(name, keys, {(): path}, path))
    if not named:
        message = f"the matrix makes no case{': all combinations of its axes are excluded' if axes else ''}"
        remedy = "give it axes, such as optimizer.args.lr = [1e-3, 3e-3] in [matrix.axes], or take it out"
        remedy = "take an exclusion out" if axes else remedy
        problems = [source.problem(codes.NO_CASES, message, ("matrix",), at_key=True, remedy=remedy)]
    problems += _names(source, named)
    return [] if problems else named, [*problems, *_overridden(source, axes)]


Chosen = tuple[tuple[Axis, int], ...]


def _combinations(axes: list[Axis]) -> Iterator[tuple[str, Chosen]]:
    if not axes:
        return
    labels = _labels(axes)
    for numbers in itertools.product(*(range(len(axis.values)) for axis in axes)):
        chosen = tuple(zip(axes, numbers, strict=True))
        parts = [_name_part(labels[axis.path], axis.values[number]) for axis, number in chosen]
        yield "-".join(parts), chosen


def _of_axes(name: str, chosen: Chosen) -> Case:
    raw: TomlTable = {}
    moves: dict[KeyPath, KeyPath] = {(): ("matrix", "axes")}
    for axis, number in chosen:
        inner = raw
        for part in axis.path[:-1]:
            inner = inner.setdefault(str(part), {})
        inner[str(axis.path[-1])] = axis.values[number]
        moves[axis.path] = ("matrix", "axes", *axis.path, number)
    return Case(name, raw, moves, moves[chosen[-1][0].path])


def _labels(axes: list[Axis]) -> dict[KeyPath, str]:
    """Return the label of each axis in the names of cases: the last part of its key, or more parts where axes share it."""
    labels = {}
    for axis in axes:
        others = [each.path for each in axes if each is not axis]
        length = next(
            n for n in range(1, len(axis.path) + 1) if not any(o[-n:] == axis.path[-n:] for o in others)
        )
        labels[axis.path] = ".".join(map(str, axis.path[-length:]))
    return labels


def _name_part(label: str, value: object) -> str:
    """Return an axis' part of a name: `lr0.001`, `precision_bf16`, `entry_Net`."""
    if isinstance(value, bool):
        return f"{label}_{str(value).lower()}"
    if isinstance(value, int | float):
        return f"{label}{value}".replace("+", "")
    text = str(value)
    if re.fullmatch(r"[\w.]+:[\w.]+", text):  # an entry point: its name is enough
        text = text.partition(":")[2]
    text = re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-")
    return f"{label}{text}" if text[:1].isdigit() else f"{label}_{text}"


def _fixed_keys(source: Source, axes: list[Axis]) -> Iterator[Diagnostic]:
    given = source.raw["matrix"].get("cases", {})
    for path, why in _FIXED.items():
        paths = [("matrix", "axes", *path)] if any(axis.path[: len(path)] == path for axis in axes) else []
        paths += [
            ("matrix", "cases", name, *path)
            for name, keys in given.items()
            if value_at(path, keys) is not None
        ]
        for where in paths:
            message = f"a case cannot change {dotted(path)}: {why}"
            yield source.problem(codes.CASE_KEY, message, where, at_key=True, remedy="take it out")


def _unknown_keys(source: Source, axes: list[Axis]) -> Iterator[Diagnostic]:
    """Yield each axis that is no key of a job, once for all its values."""
    # Completion of case names does not load pydantic.
    from elasticflow.jobfile.tables.job import Job, model_of
    from elasticflow.jobfile.wording.type_descriptions import annotation_at

    for axis in axes:
        table = axis.path[0]
        is_known = table in Job.model_fields and (
            len(axis.path) == 1
            or annotation_at(axis.path[:2]) is not None
            or model_of(str(table)).model_config.get("extra") == "allow"
        )
        if not is_known and axis.path not in _FIXED and axis.path[0] != "matrix":
            from elasticflow.jobfile.wording.pydantic_messages import unknown_key

            wrong = axis.path[: 2 if table in Job.model_fields else 1]
            problem = unknown_key(wrong, axis.values if wrong == axis.path else {})
            remedy = problem.suggestion.in_axis() if problem.suggestion else None
            is_table = len(axis.path) > 1
            message = problem.message if is_table else f"the axis {dotted(axis.path)} is not a key of the job"
            yield source.problem(problem.code, message, (*AXES, *wrong), at_key=True, remedy=remedy)


def _overridden(source: Source, axes: list[Axis]) -> Iterator[Diagnostic]:
    """Yield a warning for each axis whose key a flag sets."""
    for axis in axes:
        layer_and_spot = source.look(axis.path)
        if layer_and_spot is not None and not layer_and_spot[0].is_file:
            key = dotted(axis.path)
            message = f"{key} is an axis, and the flag wins: its cases differ in name only"
            remedy = f"change the axis instead: --set 'matrix.axes.{key}=[...]'"
            yield source.problem(
                codes.AXIS_OVERRIDDEN, message, axis.path, at_key=True, severity="warning", remedy=remedy
            )


def _names(source: Source, cases: list[Case]) -> Iterator[Diagnostic]:
    """Yield the problems of the names of cases: each name given twice, and the first name that is not valid."""
    name = value_at(("job", "name"), source.raw)
    remedy = (
        'names are made of the values, anything but letters, digits, "." and "_" as "-":\n'
        "name such cases yourself, [matrix.cases.NAME], and take their values off the axes"
    )
    seen: set[str] = set()
    is_told = False
    for case in cases:
        whole = f"{name}-{case.name}" if isinstance(name, str) else case.name
        if case.name in seen:
            message = f"two cases would be called {show(case.name)}"
            yield source.problem(codes.CASE_NAME, message, case.path, at_key=True, remedy=remedy)
        elif not (NAME.fullmatch(case.name) and len(whole) <= MOST_LETTERS) and not is_told:
            is_told = True
            message = f"a case's job would be called {show(whole)}: a name has at most {MOST_LETTERS} letters"
            if len(whole) <= MOST_LETTERS:
                message = (
                    f'{show(case.name)} is no name for a case: it may have letters, digits, ".", "_" and "-"'
                )
            yield source.problem(codes.CASE_NAME, message, case.path, at_key=True, remedy=remedy)
        seen.add(case.name)
