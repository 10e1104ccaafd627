"""A worker group killed and resumed from its node's memory, against one that was not disturbed; when a rank asks for a held state."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow import events
from elasticflow.protocol.snapshot_settings import AUTO
from elasticflow.runtime.snapshot.memory_tier import MemoryTier
from elasticflow.snapshots.client.writer_process import WriterStart, start_writer
from elasticflow.system import fault_injection
from tests.command_line import forks
from tests.runtime.test_trajectory import assert_same
from tests.snapshots import in_pieces

if TYPE_CHECKING:
    from collections.abc import Callable

YEAR_S = 365 * 86400.0


@pytest.mark.e2e
def test_killed_and_gone_on_from_memory_equals_undisturbed(groups: Callable[[str], Any]) -> None:
    """BatchNorm and dropout: a rank killed between two snapshots costs the step it was in, and no bit."""
    whole, parts = groups("whole"), groups("parts")
    assert whole.run(2).codes == [0, 0]
    # It outlives workers, as an agent's does.
    with forks():
        writer = start_writer(WriterStart(str(parts.folder.path), "test"))
    parts.environment = {"ELASTICFLOW_WRITER": writer.address}
    arguments = ("--memory", "1 step", "--every", "5 steps")
    try:
        assert -9 == parts.run(2, *arguments, "--kill-at", "9", ends=False).codes[0]
        assert [0, 0] == parts.run(2, *arguments).codes
    finally:
        writer.close()

    assert_same(whole.newest(), parts.newest())
    (started,) = parts.lines("training.started", generation=2)
    assert (8, True) == (started["step"], started["from_memory"])
    assert started["restored_from"].startswith("000000000008-0001-")
    steps = [line["step"] for generation in (1, 2) for line in parts.lines("step", generation=generation)]
    assert list(range(1, 14)) == steps
    snapshots = {found.name: found for found in parts.catalog.committed()}
    assert {5, 6, 7, 8} & {found.step for found in snapshots.values() if found.generation == 1}
    for found in snapshots.values():
        assert found.parent is None if found.generation == 1 else found.parent in snapshots
    # On a busy machine the request of step 10 is only met at the end, by what is newest then: the end asks for nothing more.
    assert 13 == max(found.step for found in snapshots.values())


@pytest.mark.e2e
def test_the_last_snapshot_is_taken_by_a_launch_that_has_no_step_left(
    groups: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store had no room for it: the next generation resumes from memory at the end, where it waited for ever for slots unasked for."""
    group = groups("run")
    monkeypatch.setenv(fault_injection.VARIABLE, "commit.before_manifest=raise:ENOSPC@1")
    with forks():
        writer = start_writer(WriterStart(str(group.folder.path), "test"))
    group.environment = {"ELASTICFLOW_WRITER": writer.address}
    arguments = ("--memory", AUTO, "--every", "100 steps")
    try:
        assert [1, 1] == group.run(2, *arguments, ends=False).codes
        assert group.catalog.newest() is None
        assert [0, 0] == group.run(2, *arguments).codes
    finally:
        writer.close()
    (started,) = group.lines("training.started", generation=2)
    assert (13, True) == (started["step"], started["from_memory"])
    assert 13 == group.catalog.newest().step


def test_wall_clock_that_jumps_changes_nothing(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of 128 MiB, expected to take a quarter of a second: asked for after 12.5 s of the clock that nobody sets.

    The wall clock jumps by a year, back and forth, each time that it is read.
    """
    now, jumps = 1000.0, itertools.cycle((YEAR_S, -YEAR_S))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(jumps))
    slot = SimpleNamespace(lock=lambda: True, unlock=lambda: None)
    link: Any = SimpleNamespace(
        slots=[slot, slot], declined=None, is_requested=False, reserve=lambda *_, **__: None
    )
    nothing: Any = None
    tier = MemoryTier(me, link, nothing, nothing, nothing, AUTO)
    tier.reserve(in_pieces.state_of({"w": torch.empty(1 << 25)}))
    tier.is_settled = True
    asked = []
    for _ in range(20):
        now += 1.0
        asked.append(tier._asks() == 1)
    assert [False] * 12 + [True] * 8 == asked


def test_missing_slot_is_asked_for_once_and_told_once(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold is due, and the writer keeps the slot: after a second one more is asked for. The writer has no memory: one event."""
    now, told, asked = 1000.0, [], []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(me, "event", lambda name, **fields: told.append((name, fields)))
    slot = SimpleNamespace(lock=lambda: False)
    link: Any = SimpleNamespace(
        slots=[slot, slot],
        declined=None,
        is_requested=False,
        reserve=lambda *_, **__: None,
        receive_waiting=lambda: None,
        no_more=None,
        reserve_more=lambda: asked.append(now),
    )
    nothing: Any = None
    tier = MemoryTier(me, link, nothing, nothing, nothing, AUTO)
    tier.reserve(in_pieces.state_of({"w": torch.empty(1 << 20)}))
    tier.is_settled = True
    for _ in range(10):
        now += 0.75
        assert tier._asks() < 0
    assert [1002.25] == asked
    assert [] == told
    link.no_more = "it is full"
    for _ in range(10):
        now += 0.75
        assert tier._asks() < 0
    assert [(events.HELD_PAUSES, {"reason": "it is full"})] == told
