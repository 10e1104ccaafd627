"""What follows from what happens on several nodes, as a table: no process, no store, no signal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elasticflow import errors, events
from elasticflow.launcher.agent.agent_process import AgentEnd
from elasticflow.launcher.supervisor.commands import LeaveAsked
from elasticflow.launcher.supervisor.nodes import SETTLE_S
from elasticflow.protocol.child_processes import ANSWER_S
from elasticflow.protocol.messages import DevicesChecked, NodeLeaving, WorkersEnded
from tests.launcher.lifecycle_trial import GRACE_S, worker

if TYPE_CHECKING:
    from tests.launcher.lifecycle_trial import Trial


@pytest.fixture
def cluster(trial: Trial) -> Trial:
    """Return a lifecycle of one to three nodes with a budget of two restarts."""
    trial.least, trial.most = 1, 3
    trial.plan(2)
    return trial


def start(trial: Trial, *nodes: str) -> None:
    """Have *nodes* join and form the first generation."""
    for node in nodes:
        trial.join(node)
    trial.wait(SETTLE_S)
    assert nodes == trial.agents.formed[-1][1]


def test_full_set_ends_the_wait(cluster: Trial) -> None:
    """Three of at most three are there: nobody else can come; torch 2.13 waits 30 s for fewer than the most."""
    for node in ("n0", "n1", "n2"):
        cluster.join(node)
        cluster.pass_time()

    assert [(1, ("n0", "n1", "n2"), None)] == cluster.agents.formed


def test_fewer_wait_a_moment_for_others(cluster: Trial) -> None:
    """Each arrival begins the moment anew; then those that are there begin."""
    cluster.join("n0")
    cluster.wait(SETTLE_S * 0.9)
    cluster.join("n1")
    cluster.wait(SETTLE_S * 0.9)
    assert [] == cluster.agents.formed
    cluster.wait(SETTLE_S * 0.2)

    assert [(1, ("n0", "n1"), None)] == cluster.agents.formed


def test_first_generation_waits_for_those_known_to_come(cluster: Trial) -> None:
    """However long the second one imports, the first generation is not formed twice."""
    cluster.nodes.expect("n0")
    cluster.nodes.expect("n1")
    cluster.join("n0")
    cluster.wait(60)
    assert [] == cluster.agents.formed
    cluster.join("n1")
    cluster.wait(SETTLE_S)

    assert [(1, ("n0", "n1"), None)] == cluster.agents.formed


def test_told_ranks_decide_the_order(cluster: Trial) -> None:
    """With a static rendezvous a node's place is given, whoever comes first; a lost one's place is taken again."""
    for node, rank in (("b", 1), ("c", 2), ("a", 0)):
        cluster.join(node, nproc=1, rank=rank)
    cluster.pass_time()
    assert ("a", "b", "c") == cluster.agents.formed[-1][1]
    cluster.step(7)
    cluster.lose("b")
    cluster.join("d", nproc=1, rank=1)
    cluster.killed("a")
    cluster.killed("c")
    cluster.pass_time()

    assert ("a", "d", "c") == cluster.agents.formed[-1][1]


def test_too_few_nodes_are_told_once(trial: Trial) -> None:
    """One of at least two: said once, and training begins with the second."""
    trial.least, trial.most = 2, 3
    trial.plan(2)
    trial.join("n0")
    trial.wait(10)
    trial.wait(10)
    assert [events.NODE_AWAITED] == [name for name in trial.names() if name == events.NODE_AWAITED]
    trial.join("n1")
    trial.wait(SETTLE_S)

    assert [(1, ("n0", "n1"), None)] == trial.agents.formed


def test_arrivals_cause_one_drain(cluster: Trial) -> None:
    """Two nodes that come one after the other are taken in together, free of charge, without a step lost."""
    start(cluster, "n0")
    cluster.step(7)
    cluster.join("n1")
    cluster.wait(SETTLE_S * 0.5)
    assert [] == cluster.agents.requests
    cluster.join("n2")
    cluster.wait(SETTLE_S)
    assert [("drain", 1)] == cluster.agents.requests
    cluster.leave("n0")
    cluster.pass_time()

    assert (2, ("n0", "n1", "n2"), None) == cluster.agents.formed[-1]
    assert ["start", "resized"] == cluster.claimed
    assert events.BUDGET_CHARGED not in cluster.names()
    assert [("drain", 1)] == cluster.agents.requests


def test_nodes_above_the_most_are_spares(cluster: Trial) -> None:
    """A fourth node changes nothing until one is lost, then it steps in."""
    start(cluster, "n0", "n1", "n2")
    cluster.join("n3")
    cluster.wait(SETTLE_S)
    assert [] == cluster.agents.requests
    cluster.step(7)
    cluster.lose("n1")
    assert [("stop", 1)] == cluster.agents.requests
    cluster.killed("n0")
    cluster.killed("n2")
    cluster.pass_time()

    assert ("n0", "n2", "n3") == cluster.agents.formed[-1][1]
    charged = [r["class"] for r in cluster.records if r["event"] == events.BUDGET_CHARGED]
    assert ["node_lost"] == charged


def test_spare_stays_out_while_the_others_are_enough(cluster: Trial) -> None:
    """A worker fails while a fourth node waits: the same three continue."""
    start(cluster, "n0", "n1", "n2")
    cluster.join("n3")
    cluster.wait(SETTLE_S)
    cluster.step(7)
    cluster.fail(worker(2, -9), node="n1")
    cluster.killed("n0")
    cluster.killed("n2")
    cluster.pass_time()

    assert (2, ("n0", "n1", "n2")) == cluster.agents.formed[-1][:2]


def test_failure_on_one_node_kills_the_group_on_all(cluster: Trial) -> None:
    """The others would wait for it in a collective; the next generation waits until they are gone."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    cluster.fail(worker(2, -9), node="n1")
    assert [("stop", 1)] == cluster.agents.requests
    cluster.pass_time()
    assert 1 == len(cluster.agents.formed)
    cluster.killed("n0")
    cluster.pass_time()

    assert ("n0", "n1") == cluster.agents.formed[-1][1]
    [failed] = [r for r in cluster.records if r["event"] == events.WORKER_FAILED]
    assert (2, "n1") == (failed["rank"], failed["node"])


def test_first_failure_is_found_where_clocks_disagree(cluster: Trial) -> None:
    """The exceptions of both nodes are dated by their own clocks: that of n1 is an hour ahead, and its worker failed first."""
    start(cluster, "n0", "n1")
    for rank, at in ((0, "1970-01-01T00:16:38Z"), (2, "1970-01-01T01:16:37Z")):
        cluster.log(
            events.WORKER_RAISED, rank=rank, timestamp=at, **{"class": "user_error"}, error=f"of rank {rank}"
        )
    for node, rank, ahead_s in (("n0", 0, 0.0), ("n1", 2, 3600.0)):
        end = replace(worker(rank, 1), at=cluster.clock - 1 + ahead_s)
        sent_at = cluster.clock + ahead_s
        cluster.on(WorkersEnded(1, node, failed=True, workers=(end,), sent_at=sent_at))

    [failed] = [r for r in cluster.records if r["event"] == events.WORKER_FAILED]
    assert (2, "n1", "of rank 2") == (failed["rank"], failed["node"], failed["error"])


def test_lost_node_is_the_cause_though_its_peers_fail_first(cluster: Trial) -> None:
    """Survivors see a closed connection before the loss is noticed: charged once, as a lost node."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    cluster.fail(worker(0, 1, stderr="RuntimeError: Connection closed by peer"), node="n0")
    cluster.wait(2)
    assert 1 == len(cluster.agents.formed)
    cluster.lose("n1")
    cluster.pass_time()

    assert ("n0",) == cluster.agents.formed[-1][1]
    charged = [r["class"] for r in cluster.records if r["event"] == events.BUDGET_CHARGED]
    assert ["node_lost"] == charged


def test_leaving_node_is_drained_and_let_go(cluster: Trial) -> None:
    """A preempted node's wish costs nothing: all leave after a step, the others continue, it may end."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    cluster.on(NodeLeaving("n0"))
    assert [("drain", 1)] == cluster.agents.requests
    cluster.leave("n0")
    assert [] == cluster.agents.released
    assert {"n0": "node n1 to end, as node n0 did"} == cluster.state["activities"]
    cluster.leave("n1")
    cluster.pass_time()

    assert ["n0"] == cluster.agents.released
    assert (2, ("n1",), None) == cluster.agents.formed[-1]
    assert ["start", "preempted"] == cluster.claimed
    assert events.BUDGET_CHARGED not in cluster.names()


def test_spare_that_leaves_is_let_go_at_once(cluster: Trial) -> None:
    """It runs nothing: nobody is drained."""
    start(cluster, "n0", "n1", "n2")
    cluster.join("n3")
    cluster.on(NodeLeaving("n3"))

    assert ["n3"] == cluster.agents.released
    assert [] == cluster.agents.requests


def test_drain_for_a_resize_that_takes_too_long_is_cut_short(cluster: Trial) -> None:
    """Workers that do not leave within the grace are killed; the job continues with all, free of charge."""
    start(cluster, "n0")
    cluster.step(7)
    cluster.join("n1")
    cluster.wait(SETTLE_S)
    cluster.wait(GRACE_S)
    assert [("drain", 1), ("stop", 1)] == cluster.agents.requests
    cluster.killed("n0")
    cluster.pass_time()

    assert ("n0", "n1") == cluster.agents.formed[-1][1]
    assert events.BUDGET_CHARGED not in cluster.names()


def test_signal_during_a_resize_ends_the_launch(cluster: Trial) -> None:
    """The workers are leaving already; when they have, nothing is formed any more."""
    start(cluster, "n0")
    cluster.step(7)
    cluster.join("n1")
    cluster.wait(SETTLE_S)
    cluster.on(LeaveAsked("SIGTERM"))
    cluster.leave("n0")

    assert ("interrupted", errors.INTERRUPTED) == cluster.ended
    assert [("drain", 1)] == cluster.agents.requests


def fail_twice(cluster: Trial) -> None:
    """Have a worker of n1 fail first in two generations, without a step between."""
    for _ in range(2):
        cluster.fail(worker(2, -7), node="n1")
        cluster.killed("n0")
        cluster.wait(60)


def test_node_that_fails_twice_in_a_row_is_excluded(cluster: Trial) -> None:
    """Its workers failed first in two generations, others never did: the job continues without it."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    fail_twice(cluster)

    assert ("n0",) == cluster.agents.formed[-1][1]
    assert events.NODE_EXCLUDED in cluster.names()


def test_node_is_not_excluded_for_failures_with_steps_between(cluster: Trial) -> None:
    """A finished step puts an end to the row."""
    start(cluster, "n0", "n1")
    for step in (7, 14):
        cluster.step(step)
        cluster.pass_time()
        cluster.fail(worker(2, -7), node="n1")
        cluster.killed("n0")
        cluster.wait(60)

    assert events.NODE_EXCLUDED not in cluster.names()


def test_agent_of_a_spare_that_keeps_dying_is_let_go(cluster: Trial) -> None:
    """It is started again, but not for ever, and the job does not notice."""
    start(cluster, "n0", "n1", "n2")
    deaths = 0
    while cluster.agent_died("n3", AgentEnd(1)):
        deaths += 1
        assert deaths < 20

    assert cluster.lifecycle.verdict is None
    assert events.BUDGET_CHARGED not in cluster.names()


def test_agent_of_a_spare_that_others_kill_is_started_again(cluster: Trial) -> None:
    """A kill says nothing about the next agent, and the node may be needed later."""
    start(cluster, "n0", "n1", "n2")
    for _ in range(5):
        cluster.join("n3")
        assert cluster.agent_died("n3", AgentEnd(-9))

    assert [] == cluster.agents.forgotten


def test_agent_of_a_node_that_is_needed_is_no_spare(cluster: Trial) -> None:
    """Others are ready, but too few: it is started again at the budget's cost, not let go."""
    cluster.least = 2
    cluster.plan(2)
    cluster.join("n0")
    assert all(cluster.agent_died("n1", AgentEnd(-9)) for _ in range(4))

    assert 1 == cluster.names().count(events.BUDGET_CHARGED)
    assert 4 == cluster.names().count(events.START_FAILED)


def test_dead_agent_of_several_is_free_and_not_waited_for(cluster: Trial) -> None:
    """The other node continues alone; the agent is started again and taken in as soon as it is ready."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    assert cluster.agent_died("n0", AgentEnd(-9))
    cluster.killed("n1")
    cluster.pass_time()
    assert (2, ("n1",)) == cluster.agents.formed[-1][:2]
    cluster.step(9)
    cluster.join("n0")
    cluster.wait(SETTLE_S)
    cluster.leave("n1")
    cluster.pass_time()

    assert (3, ("n1", "n0")) == cluster.agents.formed[-1][:2]
    assert events.BUDGET_CHARGED not in cluster.names()


ECC = "Traceback (most recent call last):\n  ...\ntorch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n"


def fail_on_device(trial: Trial, node: str) -> None:
    """Have a worker of *node* fail on its device; the other nodes' agents kill theirs."""
    trial.fail(worker(2, 1, stderr=ECC), node=node)
    for other in trial.agents.formed[-1][1]:
        if other != node:
            trial.killed(other)


def tell_checked(trial: Trial, node: str, *faults: str, notes: tuple[str, ...] = ()) -> None:
    """Have the agent of *node* tell the result of its check."""
    generation = trial.agents.checked[-1][1]
    trial.on(DevicesChecked(generation, node, devices=1, faults=faults, notes=notes, seconds=2.0))


def test_devices_of_a_node_are_checked_before_its_workers_start_again(cluster: Trial) -> None:
    """The next generation waits for the result, which is told; an error that a device outlives leaves nobody out."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    fail_on_device(cluster, "n1")
    assert [(("n1",), 1)] == cluster.agents.checked
    cluster.wait(120)
    assert 1 == len(cluster.agents.formed)

    tell_checked(cluster, "n1", notes=("GPU-a: 1 uncorrected ECC errors",))
    cluster.pass_time()
    assert ("n0", "n1") == cluster.agents.formed[-1][1]
    [told] = [record for record in cluster.records if record["event"] == events.DEVICES_CHECKED]
    assert ("n1", [], "1 device computed right in 2.0 s; GPU-a: 1 uncorrected ECC errors") == (
        told["node"],
        told["faults"],
        told["reason"],
    )
    assert [] == [name for name in cluster.names() if name == events.NODE_EXCLUDED]


def test_node_with_a_faulty_device_is_left_out_by_name(cluster: Trial) -> None:
    """The others continue without it, also when its agent is started again."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    fail_on_device(cluster, "n1")
    tell_checked(cluster, "n1", "cuda:0: computes a known sum wrong")
    cluster.wait(60)
    assert ("n0",) == cluster.agents.formed[-1][1]
    cluster.join("n1")
    cluster.wait(60)

    assert [] == cluster.agents.requests[1:]
    assert ("n0",) == cluster.agents.formed[-1][1]
    [excluded] = [record for record in cluster.records if record["event"] == events.NODE_EXCLUDED]
    assert {
        "event": events.NODE_EXCLUDED,
        "node": "n1",
        "reason": "cuda:0: computes a known sum wrong",
    } == excluded


def test_too_few_nodes_without_faulty_devices_end_the_launch(cluster: Trial) -> None:
    """The error names node and device; waiting for another node would be waiting for a person."""
    start(cluster, "n0")
    cluster.step(7)
    fail_on_device(cluster, "n0")
    tell_checked(cluster, "n0", "cuda:0: computes a known sum wrong")

    assert ("failed", errors.ANSWER_IS_NO) == cluster.ended
    assert cluster.verdict.fields["error"] == (
        "node n0 has a device that is not to be used: cuda:0: computes a known sum wrong"
    )
    assert "of at least 1" in cluster.verdict.fields["why"]


def test_node_that_fails_twice_on_its_device_is_excluded_if_others_are_enough(trial: Trial) -> None:
    """Without progress between, and though its check finds nothing; a node that is needed is tried until the budget is spent."""
    trial.least, trial.most = 1, 2
    trial.plan(5)
    start(trial, "n0", "n1")
    for _ in range(2):
        fail_on_device(trial, "n1")
        tell_checked(trial, "n1")
        trial.wait(60)
    assert ("n0",) == trial.agents.formed[-1][1]
    for _ in range(3):
        fail_on_device(trial, "n0")
        tell_checked(trial, "n0")
        trial.wait(60)
    assert trial.lifecycle.verdict is None
    fail_on_device(trial, "n0")
    assert ("failed", errors.BUDGET_SPENT) == trial.ended


def test_node_that_is_lost_while_it_is_checked_is_not_waited_for(cluster: Trial) -> None:
    """The others continue as soon as it counts as lost."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    fail_on_device(cluster, "n1")
    cluster.lose("n1")
    cluster.wait(60)

    assert ("n0",) == cluster.agents.formed[-1][1]


def test_node_whose_agent_was_replaced_while_it_was_checked_is_not_waited_for(cluster: Trial) -> None:
    """The new agent was not asked, and answers nothing."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    fail_on_device(cluster, "n1")
    cluster.join("n1")
    cluster.wait(60)

    assert {"n0", "n1"} == set(cluster.agents.formed[-1][1])
    assert 2 == len(cluster.agents.formed)


def test_check_that_no_agent_answers_is_not_waited_for_for_ever(cluster: Trial) -> None:
    """The run goes on with the node, and tells that its devices were not checked."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    fail_on_device(cluster, "n1")
    cluster.wait(3 * ANSWER_S + 60)

    assert ("n0", "n1") == cluster.agents.formed[-1][1]
    assert 2 == len(cluster.agents.formed)
    [told] = [record for record in cluster.records if record["event"] == events.DEVICES_CHECKED]
    assert ("n1", [], "not checked: its agent gave no answer within") == (
        told["node"],
        told["faults"],
        told["reason"].rpartition(" within ")[0] + " within",
    )


@pytest.mark.parametrize(("device", "checked"), [("cuda:0", [(("n1",), 1)]), ("cpu", [])])
def test_worker_that_does_not_end_is_told_and_its_node_checked(
    cluster: Trial, device: str, checked: list[tuple[tuple[str, ...], int]]
) -> None:
    """SIGKILL does not end a process in a driver's call: its device may still be in use. On the CPU no device is suspected."""
    start(cluster, "n0", "n1")
    cluster.log(events.TRAINING_STARTED, step=0, epoch=0, device=device)
    cluster.step(7)
    cluster.fail(worker(0, -9))
    stuck = replace(worker(2, -9, ended_by_us=True), remains="D")
    cluster.on(WorkersEnded(1, "n1", failed=False, workers=(stuck,)))

    [told] = [record for record in cluster.records if record["event"] == events.WORKER_STUCK]
    assert {"event": events.WORKER_STUCK, "rank": 2, "node": "n1", "pid": 102, "state": "D"} == told
    assert checked == cluster.agents.checked


def fail_for_want_of_devices(trial: Trial, node: str) -> None:
    """Have a worker of *node* refuse to train there, before a step."""
    raised = {
        "rank": 2,
        "class": "user_error",
        "error": "8 workers, and torch sees 7 devices",
        "final": False,
    }
    trial.log(events.WORKER_RAISED, **raised, exception={"type": "elasticflow.errors.DeviceError"})
    trial.fail(worker(2, 1), node=node)
    for other in trial.generation.running if trial.lifecycle.generation else ():
        trial.killed(other)


def test_node_without_the_devices_of_the_launch_is_left_out(cluster: Trial) -> None:
    """It came to a run that trains: the others continue, and the budget is not touched; a new agent of it is tried again."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    cluster.fail(worker(0, -7), node="n0")
    cluster.killed("n1")
    cluster.wait(60)
    fail_for_want_of_devices(cluster, "n1")
    cluster.pass_time()

    assert ("n0",) == cluster.agents.formed[-1][1]
    assert 1 == cluster.names().count(events.BUDGET_CHARGED)
    [excluded] = [record for record in cluster.records if record["event"] == events.NODE_EXCLUDED]
    assert ("n1", "8 workers, and torch sees 7 devices") == (excluded["node"], excluded["reason"])
    cluster.step(8)
    cluster.join("n1")
    cluster.wait(60)
    assert ("drain", 3) == cluster.agents.requests[-1]


@pytest.mark.parametrize("has_trained", [False, True])
def test_devices_that_no_node_can_do_without_end_the_launch(trial: Trial, *, has_trained: bool) -> None:
    """Nothing has trained yet, so that the job may be wrong; or too few nodes would be left."""
    trial.least, trial.most = (2, 2) if has_trained else (1, 2)
    trial.plan(5)
    start(trial, "n0", "n1")
    if has_trained:
        trial.step(7)
        trial.fail(worker(0, -7), node="n0")
        trial.killed("n1")
        trial.wait(60)
    fail_for_want_of_devices(trial, "n1")

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert events.NODE_EXCLUDED not in trial.names()


def test_machine_with_a_faulty_device_is_left_out_under_a_new_name(cluster: Trial) -> None:
    """Each `run --join` has a new name; other agents of the machine that are there already stay."""
    start(cluster, "n0", "host-1")
    cluster.step(7)
    fail_on_device(cluster, "host-1")
    tell_checked(cluster, "host-1", "cuda:0: computes a known sum wrong")
    cluster.wait(60)
    cluster.lose("host-1")
    cluster.join("host-2")
    cluster.wait(60)

    assert ("n0",) == cluster.agents.formed[-1][1]
    excluded = [record["node"] for record in cluster.records if record["event"] == events.NODE_EXCLUDED]
    assert ["host-1", "host-2"] == excluded


def test_node_that_failed_twice_is_tried_again_with_a_new_agent(cluster: Trial) -> None:
    """Its failures need not be its machine's."""
    start(cluster, "n0", "n1")
    cluster.step(7)
    fail_twice(cluster)
    cluster.step(8)
    cluster.join("n1")
    cluster.wait(60)

    assert ("drain", 3) == cluster.agents.requests[-1]


def test_nodes_that_fill_no_shard_group_wait_as_spares(trial: Trial) -> None:
    """A copy of the model spans two nodes: the third begins with the fourth, and steps in for a lost one."""
    trial.least, trial.most, trial.shard = 1, 4, 4
    trial.plan(2)
    trial.join("n0")
    trial.wait(SETTLE_S)
    assert [] == trial.agents.formed
    awaited = next(record for record in trial.records if record["event"] == events.NODE_AWAITED)
    assert {"present": 1, "least": 2}.items() <= awaited.items()
    trial.join("n1")
    trial.join("n2")
    trial.wait(SETTLE_S)
    assert (1, ("n0", "n1"), None) == trial.agents.formed[-1]
    trial.step(7)
    trial.wait(SETTLE_S)
    assert [] == trial.agents.requests
    trial.lose("n0")
    trial.killed("n1")
    trial.pass_time()
    assert ("n1", "n2") == trial.agents.formed[-1][1]
    trial.step(8)
    trial.join("n3")
    trial.join("n4")
    trial.wait(SETTLE_S)
    assert ("drain", 2) == trial.agents.requests[-1]


def test_a_full_set_that_fits_no_shard_group_is_formed_for_its_workers_to_say_so(trial: Trial) -> None:
    """Two workers are no multiple of three, and nobody else can come."""
    trial.shard = 3
    trial.plan(2)
    trial.begin()
    assert [(1, ("n0",), None)] == trial.agents.formed


def test_a_node_without_which_no_shard_group_is_left_is_not_excluded(trial: Trial) -> None:
    """Two nodes hold the copy together: the one that fails twice is needed, as a least node is."""
    trial.least, trial.most, trial.shard = 1, 2, 4
    trial.plan(3)
    trial.join("n0")
    assert not trial.nodes.are_enough
    trial.join("n1")
    assert trial.nodes.are_enough
    assert not trial.nodes.can_spare("n1")
    trial.join("n2")
    assert trial.nodes.can_spare("n1")


def test_nodes_of_several_sizes_that_fill_no_shard_group_wait_for_one_more(trial: Trial) -> None:
    """Two, one and two workers are no multiple of four, from the first node on; three more make two groups."""
    trial.least, trial.most, trial.shard = 1, 4, 4
    trial.plan(2)
    for node, nproc in (("n0", 2), ("n1", 1), ("n2", 2)):
        trial.join(node, nproc=nproc)
    trial.wait(SETTLE_S)
    assert [] == trial.agents.formed
    awaited = next(record for record in trial.records if record["event"] == events.NODE_AWAITED)
    assert awaited["present"] < awaited["least"]
    trial.join("n3", nproc=3)
    trial.pass_time()
    assert ("n0", "n1", "n2", "n3") == trial.agents.formed[-1][1]
