"""The same bits at every world size, in real worker groups."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.e2e


def digests(groups: Callable[..., Any], world_size: int, *arguments: str) -> dict[str, str]:
    """Return the digest of each model's trajectory, equal on all ranks."""
    group = groups(f"{world_size}{'-'.join(arguments)}", "train_exact.py")
    assert group.run(world_size, *arguments).codes == [0] * world_size
    found: list[dict[str, str]] = json.loads((group.folder.path / "digests.json").read_text())
    assert found == [found[0]] * world_size
    return found[0]


def test_every_world_size_gives_the_same_bits(groups: Callable[..., Any]) -> None:
    """MLP, CNN with BatchNorm, tied transformer in bf16: one digest of all steps for 1 to 5 workers of 8 shards."""
    alone = digests(groups, 1)
    for world_size in (2, 3, 4, 5):
        assert alone == digests(groups, world_size)
    assert alone == digests(groups, 2, "--processes", "1")


def test_drained_killed_and_resized_equals_one_worker_undisturbed(groups: Callable[..., Any]) -> None:
    """Two workers drained, three killed, five to the end: the bits of one worker that nobody disturbed."""
    arguments = ("--shards", "8", "--every", "3 steps", "--tail", "short")
    whole, parts = groups("whole"), groups("parts")
    assert whole.run(1, *arguments).codes == [0]
    assert parts.run(2, *arguments, "--term-at", "4").codes == [0, 0]
    assert parts.run(3, *arguments, "--kill-at", "9", ends=False).codes[0] == -9
    assert parts.run(5, *arguments, "--processes", "1").codes == [0] * 5
    expected, actual = whole.newest(), parts.newest()
    assert expected.state["position"] == actual.state["position"]
    assert expected.state["state"] == actual.state["state"]
    assert [k for k, t in expected.tensors.items() if not t.equal(actual.tensors[k])] == []


def test_plain_data_parallelism_does_not(groups: Callable[..., Any]) -> None:
    """What the fixed order is there for: DistributedDataParallel's weights depend on the world size."""
    alone, pair = digests(groups, 1, "--plain"), digests(groups, 2, "--plain")
    assert all(alone[name] != pair[name] for name in alone)


def test_an_operation_without_a_deterministic_form_is_refused_by_name(groups: Callable[..., Any]) -> None:
    """The error names the operation and what to do."""
    ended = groups("put", "train_exact.py").run(1, "--put")
    assert ended.codes != [0]
    assert "cannot use put_" in ended.errors[0]
