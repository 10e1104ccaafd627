"""Where the time of a step goes, as a trace says: self time, parts, kernels."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.errors import RecordError
from elasticflow.observe.profile_trace import Trace, _operators, read_trace, top

if TYPE_CHECKING:
    from pathlib import Path


def span(
    name: str, begin: float, duration: float, category: str = "cpu_op", thread: int = 1
) -> dict[str, Any]:
    """Return what a trace has of a call."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": duration,
    }


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    """Return the path of a trace."""
    path = folder / "rank0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_time_is_that_of_the_operator_itself(tmp_path: Path) -> None:
    """What it calls is not its own; another thread calls nothing of it; what calls itself counts once in total."""
    events = [
        span("ProfilerStep#1", 0, 100, "user_annotation"),
        span("elasticflow: forward", 0, 40, "user_annotation"),
        span("Optimizer.step#AdamW.step", 50, 30, "user_annotation"),
        span("linear", 0, 30),
        span("addmm", 5, 20),
        span("linear", 40, 10),
        span("linear", 41, 4),
        span("copy", 5, 20, thread=2),
        span("gemm", 7, 12, "kernel", thread=7),
        {"ph": "i", "name": "[memory]", "ts": 3},
    ]
    trace = read_trace(written(tmp_path, events))

    assert [100.0] == trace.steps_us
    assert [("forward", 40.0), ("optimizer", 30.0), ("other", 30.0)] == list(trace.parts.items())
    found = {each.name: (each.self_us, each.total_us, each.calls) for each in trace.operators}
    assert {"linear": (20.0, 40.0, 3), "addmm": (20.0, 20.0, 1), "copy": (20.0, 20.0, 1)} == found
    assert [("gemm", 12.0)] == [(each.name, each.self_us) for each in trace.kernels]
    assert ["linear"] == [each.name for each in top(trace.operators, "calls", 1)]
    assert 3 == len(top(trace.operators, "total", 0))


def test_shapes_tell_calls_apart(tmp_path: Path) -> None:
    """Where the trace has them."""
    events = [
        {**span("mm", 0, 1), "args": {"Input Dims": [[2, 3]]}},
        {**span("mm", 2, 1), "args": {"Input Dims": [[4, 3]]}},
    ]
    found = read_trace(written(tmp_path, events)).operators
    assert [("mm", "[[2, 3]]"), ("mm", "[[4, 3]]")] == [(each.name, each.shapes) for each in found]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"traceEvents": [{"ph": "X"}]}', b"{"])
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes) -> None:
    """Cut, empty, or another file."""
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(RecordError, match=r"rank0\.json\.gz is no trace"):
        read_trace(path)
    path.write_bytes(b"not compressed")
    with pytest.raises(RecordError, match=r"rank0\.json\.gz is no trace"):
        read_trace(path)


def test_a_trace_without_steps_has_no_parts(tmp_path: Path) -> None:
    """The run ended while it warmed up."""
    assert Trace() == read_trace(written(tmp_path, []))


Calls = list[tuple[int, int, int]]


@st.composite
def nested(draw: st.DrawFn, begin: int = 0, end: int = 1000, depth: int = 3) -> Calls:
    """Draw calls within one another: begin, end and name."""
    found: Calls = []
    while begin < end and len(found) < 20 and draw(st.booleans()):
        first = draw(st.integers(begin, end - 1))
        last = draw(st.integers(first + 1, end))
        found.append((first, last, draw(st.integers(0, 3))))
        if depth:
            found += draw(nested(first, last, depth - 1))
        begin = last
    return found


@given(nested())
def test_self_times_add_up_to_the_time_in_any_operator(calls: Calls) -> None:
    """Nothing is counted twice or lost, whatever calls what."""
    events = [span(str(name), begin, end - begin) for begin, end, name in calls]
    covered = {moment for begin, end, _ in calls for moment in range(begin, end)}
    operators = list(_operators(events))

    assert len(covered) == sum(each.self_us for each in operators)
    assert all(0 <= each.self_us <= each.total_us for each in operators)
    assert len(calls) == sum(each.calls for each in operators)
