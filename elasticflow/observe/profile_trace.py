"""Reads a trace of torch's profiler, without torch, and sums the time of its steps by part and operator."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.errors import RecordError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

# elasticflow's marks of the parts of a step (`runtime/measuring/marks.py`), and torch's mark of an optimizer's step.
_MARK, _OPTIMIZER, _STEP = "elasticflow: ", "Optimizer.step#", "ProfilerStep#"
_OPERATOR, _KERNELS = "cpu_op", frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
REST = "other"


@dataclass
class Operator:
    """An operator, or a kernel of a GPU.

    Attributes:
        name: Name in torch.
        shapes: Shapes of its inputs; empty if the trace lacks them.
        self_us: Microseconds in the operator itself, without the operators that it calls.
        total_us: Microseconds in the operator and all that it calls.
    """

    name: str
    shapes: str = ""
    calls: int = 0
    self_us: float = 0.0
    total_us: float = 0.0


@dataclass
class Trace:
    """The times in a trace.

    Attributes:
        steps_us: Microseconds of each step, in order.
        parts: Microseconds in the parts of the steps, by name, the longest first: `forward`, `backward`, `optimizer`, `data`...;
            `other` is the time outside of all parts.
    """

    steps_us: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    kernels: list[Operator] = field(default_factory=list)


def read_trace(path: Path) -> Trace:
    """Return the times in the trace at *path*.

    Raises:
        RecordError: the file cannot be read, or is no trace.
    """
    try:
        with gzip.open(path) as file:
            content = json.load(file)
        events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        return _summary(events)
    except (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(f"{path} is no trace that can be read: {error}") from error


def _summary(events: Sequence[Mapping[str, Any]]) -> Trace:
    steps = sorted((event for event in events if str(event["name"]).startswith(_STEP)), key=_begin)
    # With a GPU the trace has each step a second time, as the time of its kernels.
    steps = [step for step in steps if step.get("cat") != "gpu_user_annotation"]
    steps_us = [float(step["dur"]) for step in steps]
    parts: dict[str, float] = defaultdict(float)
    for event in events:
        if (name := _part(event)) is not None:
            parts[name] += float(event["dur"])
    covered = sum(parts.values())
    if steps_us and sum(steps_us) > covered:
        parts[REST] = sum(steps_us) - covered
    return Trace(
        steps_us,
        dict(sorted(parts.items(), key=lambda item: (item[0] == REST, -item[1]))),
        list(_operators([event for event in events if event.get("cat") == _OPERATOR])),
        list(_kernels([event for event in events if event.get("cat") in _KERNELS])),
    )


def _part(event: Mapping[str, Any]) -> str | None:
    """Return the name of the part of a step that an event times; None for other events."""
    name = str(event["name"])
    if event.get("cat") != "user_annotation":
        return None
    if name.startswith(_MARK):
        return name.removeprefix(_MARK)
    return "optimizer" if name.startswith(_OPTIMIZER) else None


def _begin(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _operators(events: Iterable[Mapping[str, Any]]) -> Iterator[Operator]:
    """Yield the operators, each with its own time without that of operators below it; calls nest by thread."""
    found: dict[tuple[str, str], Operator] = {}
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    for calls in threads.values():
        # An operator begins before the operators that it calls; of two that begin at the same time the longer is the
        # caller.
        calls.sort(key=lambda event: (_begin(event), -float(event["dur"])))
        callers: list[tuple[float, Operator]] = []
        for event in calls:
            begin, duration = _begin(event), float(event["dur"])
            while callers and callers[-1][0] <= begin:
                callers.pop()
            operator = _add(found, event)
            operator.self_us += duration
            if callers:
                callers[-1][1].self_us -= duration
            # A recursive call counts once.
            if all(caller is not operator for _, caller in callers):
                operator.total_us += duration
            callers.append((begin + duration, operator))
    yield from found.values()


def _kernels(events: Iterable[Mapping[str, Any]]) -> Iterator[Operator]:
    found: dict[tuple[str, str], Operator] = {}
    for event in events:
        kernel = _add(found, event)
        kernel.self_us += float(event["dur"])
        kernel.total_us = kernel.self_us
    yield from found.values()


def _add(found: dict[tuple[str, str], Operator], event: Mapping[str, Any]) -> Operator:
    """Count the call in an event, and return its operator."""
    name = str(event["name"])
    shapes = (event.get("args") or {}).get("Input Dims")
    key = name, "" if shapes is None else json.dumps(shapes)
    operator = found.setdefault(key, Operator(*key))
    operator.calls += 1
    return operator


def top(operators: Iterable[Operator], by: str, most: int) -> list[Operator]:
    """Return the *most* operators that take the longest, or are called most often.

    Args:
        by: "self", "total" or "calls".
        most: Number of operators to return; 0 for all.
    """
    keys = {
        "self": lambda each: each.self_us,
        "total": lambda each: each.total_us,
        "calls": lambda each: each.calls,
    }
    ordered = sorted(operators, key=keys[by], reverse=True)
    return ordered[:most] if most else ordered
