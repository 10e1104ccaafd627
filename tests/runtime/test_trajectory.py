"""Interrupted and resumed runs against undisturbed ones, in real worker groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.snapshot.restore import SnapshotContent

pytestmark = pytest.mark.e2e

Groups = "Callable[[str], Any]"


def assert_same(expected: SnapshotContent, actual: SnapshotContent) -> None:
    """Check that two snapshots hold the same bits at the same position."""
    assert expected.state["position"] == actual.state["position"]
    assert expected.state["state"] == actual.state["state"]
    assert expected.tensors.keys() == actual.tensors.keys()
    different = [
        k
        for k, t in expected.tensors.items()
        if not torch.equal(t.view(torch.uint8), actual.tensors[k].view(torch.uint8))
    ]
    assert different == []


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        (2, []),
        (3, []),
        (2, ["--micro-batch-size", "3", "--tail", "short", "--draws-from", "4"]),
        (2, ["--processes", "1"]),
        (3, ["--odd", "--sums", "--micro-batch-size", "3", "--draws-from", "5"]),
        (1, ["--precision", "bf16"]),
    ],
    ids=["2", "3", "2-micro-short-draws", "2-loader-process", "3-odd-sums-draws", "1-bf16"],
)
def test_drained_and_resumed_equals_undisturbed(
    groups: Callable[[str], Any], world_size: int, arguments: list[str]
) -> None:
    """BatchNorm, dropout, noise in the data and AdamW: a drain and a resume leave no trace in any bit."""
    whole = groups("whole")
    assert whole.run(world_size, *arguments).codes == [0] * world_size
    parts = groups("parts")
    assert parts.run(world_size, *arguments, "--term-at", "5").codes == [0] * world_size
    assert parts.newest().manifest.step == 5
    assert parts.newest().manifest.trigger == "drain"
    assert parts.run(world_size, *arguments).codes == [0] * world_size
    assert_same(whole.newest(), parts.newest())
    assert parts.lines("step", generation=2)[0]["step"] == 6


def test_killed_and_resumed_equals_undisturbed(groups: Callable[[str], Any]) -> None:
    """A rank killed in the middle of an epoch costs the steps since the last snapshot, and no bit."""
    whole, parts = groups("whole"), groups("parts")
    assert whole.run(2, "--every", "3 steps").codes == [0, 0]
    parts.environment = {
        fault_injection.VARIABLE: "commit.before_manifest=stall:0.5@1"
    }  # as on a busy machine
    assert parts.run(2, "--every", "3 steps", "--kill-at", "8", ends=False).codes[0] == -9
    parts.environment = {}
    # The writer dies with rank 0, maybe before its second commit.
    assert parts.newest().manifest.step in (3, 6)
    assert parts.run(2, "--every", "3 steps").codes == [0, 0]
    assert_same(whole.newest(), parts.newest())


def test_every_sample_once_at_changing_world_sizes(groups: Callable[[str], Any]) -> None:
    """At 2, then 1, then 3 workers every sample of both epochs is seen exactly once, across an epoch's edge."""
    arguments = ["--counting", "--samples", "45", "--global-batch-size", "10", "--micro-batch-size", "2"]
    group = groups("run")
    assert group.run(2, *arguments, "--term-at", "3").codes == [0, 0]
    assert group.run(1, *arguments, "--term-at", "6").codes == [0]
    assert group.run(3, *arguments).codes == [0, 0, 0]
    found = group.newest()
    assert found.manifest.samples == 90
    assert (found.tensors["model/seen"] * 10).round(decimals=4).tolist() == [2.0] * 45
