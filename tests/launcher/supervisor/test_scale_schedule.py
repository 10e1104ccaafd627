"""Schedules of nodes that come and go."""

from __future__ import annotations

import pytest

from elasticflow.errors import ScaleError
from elasticflow.jobfile.tables.launching import NodesTable
from elasticflow.launcher.supervisor.scale_schedule import ALONE, ScaleChange, check_scale, parse_scale


def test_schedule_is_read_in_order_of_time() -> None:
    """Counts, times and the mark of a power cut."""
    assert (ScaleChange(0, 1), ScaleChange(20, 3), ScaleChange(40.5, 2, by_force=True)) == parse_scale(
        "2!@40.5s 1@0s 3@20"
    )


def test_a_change_is_told_as_it_is_written() -> None:
    """What was not reached can be found again in the command."""
    assert ["1@0s", "3@20s", "2!@40.5s"] == [str(each) for each in parse_scale("2!@40.5s 1@0s 3@20")]


@pytest.mark.parametrize("text", ["", "3", "1@0s x@3s", "0@0s", "1@0s -1@3s", "2@5s"])
def test_other_schedules_are_refused_with_an_example(text: str) -> None:
    """The message shows how it is written."""
    with pytest.raises(ScaleError, match="@0s"):
        parse_scale(text)


def test_more_nodes_than_the_job_may_have_are_refused() -> None:
    """The remedy is a flag that can be copied."""
    check_scale(parse_scale("1@0s 3@1s"), NodesTable(max=3))
    check_scale(ALONE, NodesTable())
    with pytest.raises(ScaleError, match=r"--set nodes\.max=3"):
        check_scale(parse_scale("1@0s 3@1s"), NodesTable(max=2))
