"""Lines that diagnostics show."""

from __future__ import annotations

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import diagnostic_at
from elasticflow.jobfile.diagnostics.excerpt import mask_secrets
from elasticflow.jobfile.diagnostics.positions import Span


def test_a_line_with_many_problems_is_masked_once() -> None:
    """Time is linear in the problems of a line: it is searched for secrets once, not once for each."""
    mask_secrets.cache_clear()
    text = "args = { " + ", ".join(f"password{i} = 'x{i}'" for i in range(50)) + " }"
    found = [
        diagnostic_at(codes.NOT_TOML, "wrong", file="job.toml", text=text, span=Span(at, at + 1))
        for at in range(50)
    ]
    assert 1 == mask_secrets.cache_info().misses
    assert all("'**'" in (each.excerpt or "") and "x49" not in (each.excerpt or "") for each in found)
