"""Asked to leave where no vote is near: while evaluating, waiting for data, building; in real worker groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("shards", [(), ("--shards", "4")])
def test_rank_without_data_does_not_keep_the_others(
    groups: Callable[..., Any], shards: tuple[str, ...]
) -> None:
    """A loader process sleeps over its sample, and its rank alone is asked to leave: all do, and no step is half done.

    The weights count how often each sample was seen: once, also those of the step that was given up.
    """
    group = groups("waiting")
    arguments = ("--counting", "--epochs", "1", "--global-batch-size", "10", "--processes", "1", *shards)
    assert group.run(2, *arguments, "--term-in", "read", "--at", "42").codes == [0, 0]
    left = group.newest().manifest
    assert "drain" == left.trigger
    assert [] == group.lines("training.finished")
    assert 1 == len(group.lines("training.left"))

    assert group.run(3, *arguments).codes == [0, 0, 0]
    steps = [line["step"] for generation in (1, 2) for line in group.lines("step", generation=generation)]
    assert list(range(1, 11)) == steps
    seen = group.newest().tensors["model/seen"]
    assert ((seen - 0.1).abs() < 1e-6).all()


@pytest.mark.parametrize("step", [6, 12])
def test_evaluation_cut_short_is_made_by_whoever_goes_on(groups: Callable[..., Any], step: int) -> None:
    """One rank is asked to leave within it, in the midst of training or at its end: each step is evaluated once."""
    group = groups("evaluating")
    arguments = ("--samples", "96")
    assert group.run(2, *arguments, "--term-in", "metric", "--at", str(step)).codes == [0, 0]
    left = group.newest().manifest
    assert (step, "drain") == (left.step, left.trigger)
    assert [] == group.lines("training.finished")

    assert group.run(3, *arguments).codes == [0, 0, 0]
    evaluated = [[line["step"] for line in group.lines("evaluation", generation=g)] for g in (1, 2)]
    assert [6, 12] == evaluated[0] + evaluated[1]
    assert (step == 6) == (evaluated[0] == [])
    assert 12 == group.newest().manifest.step
    assert 1 == len(group.lines("training.finished", generation=2))
    assert [] == group.lines("training.left", generation=2)


def test_nothing_is_trained_once_asked(groups: Callable[..., Any]) -> None:
    """The model is being built: no step is done, and no snapshot taken."""
    group = groups("building")
    assert group.run(2, "--term-in", "build").codes == [0, 0]

    assert [] == group.lines("training.started")
    assert 1 == len(group.lines("training.left"))
    assert group.catalog.newest() is None
