from __future__ import annotations

import datetime as dt
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.compiler.entry_point.source_code import (
    WIDTH,
    Call,
    call,
    flat,
    keywords,
    layout,
    literal,
    quoted,
)
from elasticflow.errors import JobRefusedError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
LEAVES = TEXTS | st.integers(-(10**18), 10**18) | st.floats(allow_nan=False) | st.booleans()
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5)
)


@given(VALUES)
def test_literals_are_read_back_as_the_same_value(value: Any) -> None:
    """Python reads a literal back as the value it was made of, on one line and broken over several."""
    assert eval(flat(literal(value, "key"))) == value
    assert eval(layout(literal(value, "key"), before="(", after=")")) == value


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.dictionaries(st.from_regex(r"[a-z]{1,12}", fullmatch=True), VALUES, max_size=6), max_size=8)
)
@pytest.mark.usefixtures("real_processes")
def test_layout_is_what_the_formatter_makes(rows: list[dict[str, Any]]) -> None:
    """The formatter leaves alone what we laid out, whatever the arguments."""
    calls = [Call("some_module.some_factory", keywords(row, "args")) for row in rows]
    source = "".join(f"{layout(each, before='x = ')}\n" for each in calls)
    wide = any(ord(c) > 0x2FF for c in source)  # widths of wide characters are the formatter's own business
    if not wide:
        argv = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={WIDTH}", "-"]
        done = subprocess.run(argv, input=source.encode(), capture_output=True, check=True, timeout=100)
        assert done.stdout.decode() == source


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, 'float("inf")'),
        (-math.inf, 'float("-inf")'),
        (math.nan, 'float("nan")'),
        ((), "()"),
        (("1 epoch",), '("1 epoch",)'),
        ({}, "{}"),
        (None, "None"),
    ],
)
def test_literals_without_a_plain_form(value: Any, expected: str) -> None:
    """Infinities, NaN, and empty or lone tuples have literals too."""
    assert flat(literal(value, "key")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", '"plain"'),
        ('say "hi"', "'say \"hi\"'"),
        ("it's", '"it\'s"'),
        ('it\'s "hi"', "'it\\'s \"hi\"'"),
        ("a\\b\n", '"a\\\\b\\n"'),
    ],
)
def test_quotes_are_double_unless_those_cost_more_escapes(text: str, expected: str) -> None:
    """Strings are quoted as ruff quotes them."""
    assert quoted(text) == expected


def test_keys_that_are_no_identifiers() -> None:
    """Arguments that Python cannot name are handed over in a dict."""
    assert (
        flat(Call("f", keywords({"class": 1, "b": 2, "a-b": 3}, "args")))
        == 'f(b=2, **{"class": 1, "a-b": 3})'
    )


def test_a_call_that_fits_on_the_next_line_stays_together() -> None:
    """A long call moves its arguments to one line of their own before it takes one line for each."""
    two_thirds = "x" * (WIDTH * 2 // 3)
    assert (
        layout(call("f" * (WIDTH // 3), quoted(two_thirds)))
        == f'{"f" * (WIDTH // 3)}(\n    "{two_thirds}"\n)'
    )


@pytest.mark.parametrize(
    "value", [dt.date(2026, 11, 20), dt.time(12), [dt.datetime(2026, 1, 1, tzinfo=dt.UTC)]]
)
def test_dates_are_refused(value: Any) -> None:
    """A date or time of TOML cannot be an argument: the message names the key and what to do."""
    with pytest.raises(
        JobRefusedError, match=r"model\.args\.start(\[0\])?: a \w+ cannot be an argument"
    ) as caught:
        literal(value, "model.args.start")
    assert caught.value.remedy == "write it as a string and let the factory parse it"
