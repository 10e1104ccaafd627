"""The table that is made on a machine with a GPU, out of figures that were made up."""

from __future__ import annotations

from tests.gpu.measure import table
from tests.measured.benchmarks.recovery_figures import OURS, Try


def test_table_says_what_passed_where_and_how_fast() -> None:
    """It is bound to a commit; what failed and what is too slow stands out."""
    bound_to = {"commit": "abc", "GPU": "1 x H200"}
    outcomes = {"tests.a.test_one": "passed", "tests.a.test_two": "failure"}
    text = table(bound_to, outcomes, {"gpu": {OURS: [Try(0.7), Try(0.9), Try(0.8)]}}, 61.2)
    assert "commit: abc, GPU: 1 x H200." in text
    assert "1 of 2 tests marked `gpu` passed; all of this took 61 s." in text
    assert "| tests.a.test_two | failure |" in text
    assert "- BROKEN: gpu: 0.80 s, at most 0.5 s" in text
