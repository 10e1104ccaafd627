"""What is said of connections that a process may not have, or refuses."""

from __future__ import annotations

import resource
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elasticflow.launcher.rendezvous import connections
from elasticflow.launcher.rendezvous.connections import Refusals

if TYPE_CHECKING:
    from elasticflow.compiler.plan.launch_plan import LaunchPlan


@pytest.mark.parametrize(
    ("nodes", "hard", "is_outside", "is_said"),
    [
        (1024, 12_000, False, True),
        (1024, 1 << 20, False, False),
        (1024, resource.RLIM_INFINITY, False, False),
        (1024, 12_000, True, False),
        (1, 64, False, False),
        (64, 4096, False, False),
    ],
)
def test_launch_that_takes_more_files_than_it_may_have_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, nodes: int, hard: int, is_outside: bool, is_said: bool
) -> None:
    """With both numbers and the remedy; where somebody else serves the keys, that process needs them."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (min(1024, hard), hard))
    plan = SimpleNamespace(nodes_max=nodes, nproc_per_node=8, is_store_outside=is_outside)
    said = connections.warning(cast("LaunchPlan", plan))

    assert is_said == (said is not None)
    if said is not None:
        assert "1,024 nodes take 15,460 connections" in said
        assert "12,000 files" in said
        assert "raise `ulimit -Hn` to 15460" in said


def test_server_without_descriptors_names_the_limit() -> None:
    """As the soft limit is now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"{soft:,} files" in connections.exhausted()
    assert "ulimit -n" in connections.exhausted()


def test_refusals_are_told_at_once_and_then_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    counted, told = Refusals(), []
    for second in range(150):
        now = 100.0 + second
        counted.note("10.0.0.9", f"why {second}")
        told.append(counted.take())
    said = [str(each) for each in told if each is not None]
    assert said == [
        "refused a connection from 10.0.0.9: why 0",
        "refused 60 connections, the last from 10.0.0.9: why 60",
        "refused 60 connections, the last from 10.0.0.9: why 120",
    ]
