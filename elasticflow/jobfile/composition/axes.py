"""Axes of a matrix: keys of the job, each with a list of values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.source import Source

AXES = ("matrix", "axes")


class Axis(NamedTuple):
    """One axis: a key of the job and the values it takes in turn."""

    path: KeyPath
    values: list[Any]


def read_axes(source: Source) -> tuple[list[Axis], list[Diagnostic]]:
    """Return the axes that can be used, and what is wrong with the others."""
    axes: list[Axis] = []
    problems: list[Diagnostic] = []
    for path, value in leaves(source.raw["matrix"].get("axes", {})):
        found = list(_problems(source, path, value))
        problems += found
        if not found:
            axes.append(Axis(path, value))
    return axes, problems


def leaves(table: dict[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield what stands in a table of tables, by its path."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _problems(source: Source, path: KeyPath, values: object) -> Iterator[Diagnostic]:
    place, name = (*AXES, *path), dotted(path)
    dots = [part for part in path if isinstance(part, str) and "." in part]
    if dots:
        message = f"{show(dots[0])} in quotes is one key with dots in it"
        remedy = f"write it without quotes: {dots[0]} = ..."
        yield source.problem(codes.AXIS, message, place, at_key=True, remedy=remedy)
    elif not isinstance(values, list) or not values:
        message = f"the axis {name} must be a list of values, not {show(values)}"
        example = (
            f"{name} = [{show(values)}]" if isinstance(values, str | int | float) else f"{name} = [1, 2]"
        )
        yield source.problem(codes.AXIS, message, place, remedy=f"write {example}")
    else:
        seen: set[object] = set()
        for number, value in enumerate(values):
            mark = mark_of(value)
            if mark is None:
                message = f"the axis {name} holds {show(value)}, which gives its cases no name"
                remedy = (
                    "an axis has numbers, texts, true or false; others are given by name: [matrix.cases.NAME]"
                )
                yield source.problem(codes.AXIS, message, (*place, number), remedy=remedy)
            elif mark in seen:
                message = f"the axis {name} has {show(value)} twice"
                yield source.problem(codes.AXIS, message, (*place, number), remedy="keep one of them")
            seen.add(mark)


def mark_of(value: object) -> tuple[bool, str | int | float] | None:
    """Return what tells a value of an axis from the others; None for what cannot be one."""
    is_one = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return (isinstance(value, bool), value) if is_one else None  # type: ignore[return-value]  # True equals 1
