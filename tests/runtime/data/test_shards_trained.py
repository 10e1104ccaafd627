"""Training on data shards in real worker groups, drained, killed and resized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.e2e

PROGRAM = "train_shards.py"


def test_every_sample_once_at_changing_sizes(groups: Callable[..., Any]) -> None:
    """At 2, 1, 3 and 2 workers, with loader processes and other batch sizes: each sample twice in two epochs."""
    group = groups("run", PROGRAM)
    arguments = ("--counting", "--micro-batch-size", "3")
    assert group.run(2, *arguments, "--term-at", "2").codes == [0, 0]
    assert group.newest().state["position"]["cursors"] == [6, 0, 6, 6, 5, 1]
    assert group.run(1, *arguments, "--kill-at", "7", ends=False).codes == [-9]
    assert group.run(3, *arguments, "--processes", "2", "--term-at", "9").codes == [0] * 3
    assert group.run(2, *arguments, "--global-batch-size", "6", "--processes", "1").codes == [0, 0]
    found = group.newest()
    assert found.manifest.samples == 2 * 64
    assert found.tensors["model/seen"].round(decimals=3).tolist() == [2.0] * 64
    assert found.state["position"]["cursors"] == [0] * 6
    assert found.manifest.epoch == 2
    (started,) = group.lines("training.started")
    assert started["steps"] is None


def assert_same(expected: Any, actual: Any) -> None:
    """Check that two snapshots hold the same bits at the same position."""
    assert expected.state["position"] == actual.state["position"]
    assert expected.state["state"] == actual.state["state"]
    assert [key for key, tensor in expected.tensors.items() if not tensor.equal(actual.tensors[key])] == []


def test_exact_is_the_same_through_drains_and_kills(groups: Callable[..., Any]) -> None:
    """One worker undisturbed; two drained, three killed and two to the end: the same bits, loader processes or not."""
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    assert whole.run(1, "--exact", "3").codes == [0]
    assert parts.run(2, "--exact", "3", "--processes", "2", "--term-at", "3").codes == [0, 0]
    assert parts.run(3, "--exact", "3", "--kill-at", "8", ends=False).codes[0] == -9
    assert parts.run(2, "--exact", "3", "--processes", "1").codes == [0, 0]
    assert_same(whole.newest(), parts.newest())


def test_exact_is_the_same_where_epochs_end_short(groups: Callable[..., Any]) -> None:
    """One worker and three, with a smaller batch at each epoch's end."""
    alone, three = groups("alone", PROGRAM), groups("three", PROGRAM)
    arguments = ("--exact", "3", "--tail", "short", "--lengths", "13,0,24,9,17,4")
    assert alone.run(1, *arguments).codes == [0]
    assert three.run(3, *arguments).codes == [0] * 3
    assert_same(alone.newest(), three.newest())


def test_batch_mode_goes_on_without_a_trace(groups: Callable[..., Any]) -> None:
    """At one world size a drained and resumed run has the bits of an undisturbed one."""
    whole, parts = groups("whole", PROGRAM), groups("parts", PROGRAM)
    assert whole.run(2).codes == [0, 0]
    assert parts.run(2, "--term-at", "5").codes == [0, 0]
    assert parts.run(2, "--processes", "1").codes == [0, 0]
    assert_same(whole.newest(), parts.newest())
