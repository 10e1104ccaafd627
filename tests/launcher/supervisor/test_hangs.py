"""A group that stands still on all its nodes, as the supervisor sees it: no process, no store, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.launcher.supervisor.nodes import SETTLE_S
from elasticflow.observe.terminal.event_lines import line_of
from elasticflow.protocol.messages import Frame, Stacks, StalledWorker, Standstill, WorkersEnded
from tests.launcher.lifecycle_trial import worker

if TYPE_CHECKING:
    from tests.launcher.lifecycle_trial import Trial

CODE = Frame("/r/examples/net.py", 12, "forward")
COLLECTIVE = Frame("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", 3, "all_reduce")


@pytest.fixture
def pair(trial: Trial) -> Trial:
    """Return a lifecycle whose first generation runs on two nodes of two workers each."""
    trial.most = 2
    trial.plan(2)
    trial.join("n0")
    trial.join("n1")
    trial.wait(SETTLE_S)
    trial.step(7)
    return trial


def stand(
    trial: Trial, node: str, *, is_so: bool = True, generation: int = 1, is_one_stopped: bool = False
) -> None:
    """Have a node say whether it stands still, and whether a signal has stopped one of its workers."""
    trial.on(Standstill(generation, node, is_so, is_one_stopped))
    trial.wait(0)


def show(trial: Trial, node: str, *frames: Frame, dump: str = "") -> None:
    """Have a node tell where its two workers stand, and the files that they dumped: *dump*, with the rank in it."""
    first = 2 * int(node[1])
    workers = [
        StalledWorker(
            node, first + i, "step", 7, 61.0, 60.0, "S", (frame,), (), f"/{first + i}", dump.format(first + i)
        )
        for i, frame in enumerate(frames)
    ]
    trial.on(Stacks(1, node, tuple(workers)))
    trial.wait(0)


def end(trial: Trial) -> None:
    """Have both nodes say that they killed their workers."""
    for number, node in enumerate(("n0", "n1")):
        workers = tuple(worker(2 * number + i, -9, ended_by_us=True) for i in range(2))
        trial.on(WorkersEnded(1, node, failed=False, workers=workers))


def test_one_node_that_moves_is_waited_for(pair: Trial) -> None:
    """The other one waits for it, for as long as it takes."""
    stand(pair, "n0")
    stand(pair, "n0", is_so=False)
    stand(pair, "n1")
    stand(pair, "n1", generation=9)
    pair.wait(3600)

    assert [] == pair.agents.requests


def test_other_nodes_of_a_stopped_worker_need_not_stand_still_for_as_long(pair: Trial) -> None:
    """They wait for it, and have not waited for long: stacks are asked for at once."""
    stand(pair, "n1", is_one_stopped=True)

    assert [("stacks", 1)] == pair.agents.requests


def test_stacks_of_all_nodes_come_before_the_end(pair: Trial) -> None:
    """The rank that others wait for is named with its own frames, on whichever node; it costs one restart."""
    stand(pair, "n0")
    stand(pair, "n1")
    assert [("stacks", 1)] == pair.agents.requests
    show(pair, "n0", COLLECTIVE, COLLECTIVE)
    assert [("stacks", 1)] == pair.agents.requests
    show(pair, "n1", COLLECTIVE, CODE)
    assert [("stacks", 1), ("stop", 1)] == pair.agents.requests

    hang = next(record for record in pair.records if record["event"] == events.HANG_DETECTED)
    assert (3, "n1", "step", 7, "/3") == tuple(
        hang[key] for key in ("rank", "node", "phase", "step", "stacks")
    )
    assert ["/r/examples/net.py:12 in forward"] == hang["frames"]
    end(pair)
    failed = next(record for record in pair.records if record["event"] == events.WORKER_FAILED)
    assert (3, "n1", "hang") == tuple(failed[key] for key in ("rank", "node", "class"))
    assert failed["error"].startswith(
        "no progress for 61 s in phase step: it is at /r/examples/net.py:12 in forward"
    )
    assert "Stack (most recent call last):" in failed["traceback"]
    assert events.BUDGET_CHARGED in pair.names()
    pair.wait(0)
    assert 2 == pair.agents.formed[-1][0]


def test_dumps_of_nccl_are_told_with_the_hang(pair: Trial) -> None:
    """Those of all ranks that have one: torch's analysis compares them."""
    stand(pair, "n0")
    stand(pair, "n1")
    show(pair, "n0", COLLECTIVE, COLLECTIVE, dump="/logs/flight_recorder/rank_{}")
    show(pair, "n1", COLLECTIVE, CODE)

    hang = next(record for record in pair.records if record["event"] == events.HANG_DETECTED)
    assert ["/logs/flight_recorder/rank_0", "/logs/flight_recorder/rank_1"] == hang["dumps"]
    line = line_of({**hang, "event": events.HANG_DETECTED})
    assert line is not None
    assert "collectives: torchfrtrace /logs/flight_recorder" in line.more


def test_node_that_does_not_answer_is_not_waited_for(pair: Trial) -> None:
    """The agent is held up as well: what the other one told has to do."""
    stand(pair, "n0")
    stand(pair, "n1")
    show(pair, "n0", COLLECTIVE, COLLECTIVE)
    pair.wait(60)

    assert ("stop", 1) == pair.agents.requests[-1]
    assert events.HANG_DETECTED in pair.names()


def test_nobody_answers(pair: Trial) -> None:
    """The group is killed all the same, and that is a hang."""
    stand(pair, "n0")
    stand(pair, "n1")
    pair.wait(60)
    end(pair)

    failed = next(record for record in pair.records if record["event"] == events.WORKER_FAILED)
    assert "hang" == failed["class"]
    (ended,) = (record for record in pair.records if record["event"] == events.GENERATION_ENDED)
    assert 60.0 == ended["seconds_since_failure"]  # since the last step was heard of, not since we killed


def test_group_that_ends_well_as_it_is_to_be_killed_has_finished(pair: Trial) -> None:
    """The request for its stack wakes a stopped worker up: it may have come to the end before the kill."""
    pair.log(events.TRAINING_FINISHED, step=7, epoch=0)
    stand(pair, "n1", is_one_stopped=True)
    show(pair, "n0", COLLECTIVE, COLLECTIVE)
    show(pair, "n1", COLLECTIVE, CODE)
    assert [("stacks", 1), ("stop", 1)] == pair.agents.requests
    for number, node in enumerate(("n0", "n1")):
        workers = (worker(2 * number, 0), worker(2 * number + 1, 0))
        pair.on(WorkersEnded(1, node, failed=False, workers=workers))

    assert ("finished", 0) == pair.ended


def test_hang_is_the_cause_though_the_rank_that_was_named_has_ended_well(pair: Trial) -> None:
    """The others were killed, and it was not: no worker has failed, and the group has."""
    stand(pair, "n0")
    stand(pair, "n1")
    show(pair, "n0", COLLECTIVE, COLLECTIVE)
    show(pair, "n1", COLLECTIVE, CODE)
    pair.on(WorkersEnded(1, "n1", failed=False, workers=(worker(2, -9, ended_by_us=True), worker(3, 0))))
    ends = tuple(worker(rank, -9, ended_by_us=True) for rank in range(2))
    pair.on(WorkersEnded(1, "n0", failed=False, workers=ends))
    pair.wait(0)

    [ended] = [record for record in pair.records if record["event"] == events.GENERATION_ENDED]
    assert ("hang", True) == (ended["class"], "no progress for 61 s in phase step" in ended["reason"])
    assert 2 == pair.agents.formed[-1][0]
