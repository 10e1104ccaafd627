"""find_unused_parameters and what stands beside it."""

from __future__ import annotations

import pytest

from elasticflow.lint.check import lint_source
from tests.lint.scripts import HEAD

CHECKPOINT = "from torch.utils.checkpoint import checkpoint\n"


@pytest.mark.parametrize(
    ("body", "severities"),
    [
        ("DDP(model, find_unused_parameters=True, static_graph=True)", ["warning"]),
        (
            CHECKPOINT + "checkpoint(f, x, use_reentrant=True)\nDDP(model, find_unused_parameters=True)",
            ["warning"],
        ),
        (
            CHECKPOINT + "checkpoint(f, x, use_reentrant=False)\nDDP(model, find_unused_parameters=True)",
            ["note"],
        ),
        ("DDP(model, find_unused_parameters=True)", ["note"]),
        ("DDP(model, find_unused_parameters=args.find)", []),
        ("DDP(model, find_unused_parameters=False)", []),
        ("DDP(model, static_graph=True)", []),
        ("Other(model, find_unused_parameters=True, static_graph=True)", []),
    ],
)
def test_find_unused_parameters(body: str, severities: list[str]) -> None:
    """A warning where it contradicts something, a note where it may be meant."""
    found = lint_source(f"{HEAD}{body}\n".encode(), "train.py")
    assert [each.severity for each in found if each.code == "EF641"] == severities
    assert len(found) == len(severities)
