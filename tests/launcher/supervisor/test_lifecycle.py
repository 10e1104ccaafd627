"""What follows from what happens, as a table: no process, no store, no signal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow import errors, events
from elasticflow.compiler.plan.launch_plan import RestartPlan
from elasticflow.launcher.agent.agent_process import AgentEnd
from elasticflow.launcher.fork_server.server_process import HELPER_KILLED
from elasticflow.launcher.restarts.failure_classes import FAILURES
from elasticflow.launcher.restarts.restart_ledger import LedgerEntry
from elasticflow.launcher.supervisor.commands import (
    ClaimGeneration,
    FormGeneration,
    GenerationClaimed,
    Instant,
    Interrupted,
    LeaveAsked,
    RecordEvent,
    RecordFailure,
    SnapshotFenced,
    TimePassed,
    UpdateState,
)
from elasticflow.launcher.supervisor.lifecycle import UNTRAINED_S, Lifecycle, RunSoFar
from elasticflow.launcher.supervisor.nodes import Nodes
from elasticflow.protocol.messages import NodeReady, WorkersEnded, WorkersStarted
from tests.launcher.lifecycle_trial import GRACE_S, worker

if TYPE_CHECKING:
    from tests.launcher.lifecycle_trial import Trial

FREE_AGENTS = FAILURES["agent_lost"].free_times
RAISED = 'Traceback (most recent call last):\n  File "train.py"\nValueError: no such layer\n'


def test_first_generation_waits_for_a_node_and_no_longer(trial: Trial) -> None:
    """Nothing is claimed before a node is there; then the generation is formed without a wait."""
    trial.pass_time()
    assert [] == trial.claimed
    trial.begin()

    assert ["start"] == trial.claimed
    assert [(1, ("n0",), None)] == trial.agents.formed
    assert [events.NODE_JOINED, events.GENERATION_STARTED] == trial.names()


def test_refused_modules_are_told(trial: Trial) -> None:
    """What the fork server would not import beforehand becomes an event each."""
    trial.join(m="reads RANK at import")

    assert ("m", "reads RANK at import") == (trial.records[-1]["module"], trial.records[-1]["reason"])


def test_finish(trial: Trial) -> None:
    """All workers left and rank 0 said that training reached its end: exit code 0."""
    trial.begin()
    trial.step(225, finished=True)
    trial.leave()

    assert ("finished", errors.FINISHED) == trial.ended
    assert 225 == trial.verdict.fields["step"]
    assert "finished" == trial.records[-1]["class"]


def test_drain(trial: Trial) -> None:
    """A signal asks the workers; when all have left the launch ends with 75."""
    trial.begin()
    trial.step(7)
    trial.on(LeaveAsked("SIGTERM"))
    assert [("drain", 1)] == trial.agents.requests
    assert trial.lifecycle.verdict is None
    trial.clock += 2
    trial.leave()

    assert ("interrupted", errors.INTERRUPTED) == trial.ended
    assert [events.DRAIN_REQUESTED, events.GENERATION_ENDED, events.DRAIN_COMPLETED] == trial.names()[-3:]
    assert (7, 2.0) == (trial.records[-1]["step"], trial.records[-1]["seconds"])


def test_training_that_ends_while_draining_is_finished(trial: Trial) -> None:
    """The last step came before the drain: finished, not interrupted."""
    trial.begin()
    trial.on(LeaveAsked("SIGTERM"))
    trial.step(225, finished=True)
    trial.leave()

    assert ("finished", errors.FINISHED) == trial.ended


def test_training_stopped_by_the_jobs_own_code_is_finished(trial: Trial) -> None:
    """StopTraining is no failure and no drain; the last event says who wanted it and why."""
    trial.begin()
    trial.step(12, finished=True)
    trial.log(events.TRAINING_STOPPED, by_rank=1, reason="good enough")
    trial.leave()

    assert ("finished", errors.FINISHED) == trial.ended
    assert "rank 1: good enough" == trial.verdict.fields["stopped"]
    assert "training was stopped by rank 1: good enough" == trial.records[-1]["reason"]


@pytest.mark.parametrize("ready", [False, True])
def test_drain_while_no_generation_runs_ends_at_once(trial: Trial, *, ready: bool) -> None:
    """Before the node is ready, and between two generations: nobody has to be asked."""
    if ready:
        trial.begin()
        trial.fail()
    trial.on(LeaveAsked("SIGINT"))

    assert ("interrupted", errors.INTERRUPTED) == trial.ended
    assert [] == trial.agents.requests
    trial.pass_time()
    assert int(ready) == len(trial.claimed)


def test_clock_that_is_set_after_a_failure_does_not_move_it(trial: Trial) -> None:
    """The next generation has its time on the clock that nobody sets."""
    trial.begin()
    trial.clock_ahead_s = 100.0
    trial.fail()
    trial.clock_ahead_s = 3600.0
    trial.pass_time()

    assert (2, ("n0",), 5.0 - 100.0) == trial.agents.formed[-1]


def test_failure_goes_on_with_the_next_generation_at_once(trial: Trial) -> None:
    """One worker killed: named, charged, and the next generation is formed without a delay."""
    trial.begin()
    trial.step(7)
    trial.fail()
    trial.pass_time()

    assert ["start", "crash"] == trial.claimed
    assert (2, ("n0",), 5.0) == trial.agents.formed[-1]  # failed_at: the earliest end of a worker
    [failed] = [r for r in trial.records if r["event"] == events.WORKER_FAILED]
    assert (1, "killed by SIGKILL", "crash") == (failed["rank"], failed["error"], failed["class"])
    [charged] = [r for r in trial.records if r["event"] == events.BUDGET_CHARGED]
    assert 1 == charged["left"]
    assert 1 == trial.state["restarts"]


def test_second_failure_without_progress_waits(trial: Trial) -> None:
    """The same step was not passed: the next generation comes a second later, not before."""
    trial.begin()
    trial.step(7)
    trial.fail()
    trial.pass_time()
    trial.fail()
    trial.wait(0.9)
    assert 2 == len(trial.claimed)
    trial.wait(0.2)

    assert 3 == len(trial.claimed)


def test_spent_budget_ends_with_3(trial: Trial) -> None:
    """Two restarts allowed: the third failure is the verdict, with the worker that failed."""
    trial.begin()
    for step in (5, 10, 15):
        trial.step(step)
        trial.fail()
        trial.wait(60)

    assert ("failed", errors.BUDGET_SPENT) == trial.ended
    assert 3 == len(trial.claimed)
    assert events.BUDGET_SPENT == trial.names()[-1]
    assert {
        "class": "crash",
        "error": "killed by SIGKILL",
        "why": "3 failures, restarts.budget is 2",
        "rank": 1,
        "exit_code": -9,
        "step": 15,
    }.items() <= trial.verdict.fields.items()


def test_user_error_while_building_ends_with_1(trial: Trial) -> None:
    """An exception before the first step would come again: no restart, its own text in the verdict."""
    trial.begin()
    trial.fail(worker(0, 1, stderr=RAISED), worker(1, 1, stderr=RAISED))

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert "ValueError: no such layer" == trial.verdict.fields["error"]
    assert "an error before the first step would come again" == trial.verdict.fields["why"]


FAULT = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x02 (most recent call first):\n  File "m.py", line 7 in build\n'


def test_same_fault_twice_before_the_first_step_ends_with_1(trial: Trial) -> None:
    """Whatever signal an error of the job's own code ends in: the budget is not burnt with it; once may be the machine."""
    trial.begin()
    trial.fail(worker(0, -11, stderr=FAULT))
    assert trial.lifecycle.verdict is None
    trial.wait(60)
    trial.fail(worker(0, -11, stderr=FAULT))

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    assert "it crashed twice in the same way before the first step" == trial.verdict.fields["why"]


def test_end_of_an_older_generation_changes_nothing(trial: Trial) -> None:
    """A late message about a generation that is gone is not taken for the one that runs."""
    trial.begin()
    trial.step(3)
    trial.fail()
    trial.pass_time()
    before = trial.names()
    trial.fail(generation=1)

    assert before == trial.names()
    assert trial.lifecycle.generation is not None


def test_dead_agent_is_free(trial: Trial) -> None:
    """The agent is started again, its generation follows as soon as it is ready, the budget stays."""
    trial.begin()
    trial.step(7)
    assert trial.agent_died("n0", AgentEnd(-9))
    trial.wait(5)
    assert 1 == len(trial.claimed)  # the new agent is not ready yet
    trial.begin()

    assert ["start", "agent_lost"] == trial.claimed
    assert events.BUDGET_CHARGED not in trial.names()
    assert events.NODE_LOST in trial.names()


def test_agent_that_dies_again_and_again_ends_with_3(trial: Trial) -> None:
    """Free, but not for ever: without a step in between the budget is charged, then spent."""
    trial.begin()
    deaths = 0
    while trial.agent_died("n0", AgentEnd(1)):
        deaths += 1
        trial.join()
        trial.wait(120)
        assert deaths < 20

    assert FREE_AGENTS + trial.budget == deaths
    assert ("failed", errors.BUDGET_SPENT) == trial.ended


def test_agent_killed_for_memory_is_charged_each_time(trial: Trial) -> None:
    """As a worker is: with steps in between it would be started again without end."""
    end = AgentEnd(-9, is_for_memory=True)
    for steps in range(1, trial.budget + 1):
        trial.begin()
        trial.step(7 * steps)
        assert trial.agent_died("n0", end)
        trial.wait(120)
    trial.begin()
    trial.step(70)

    assert not trial.agent_died("n0", end)
    assert ("failed", errors.BUDGET_SPENT) == trial.ended
    assert ("oom", "the agent of n0 was killed by SIGKILL (memory ran out)") == (
        trial.verdict.fields["class"],
        trial.verdict.fields["error"],
    )


def test_agent_that_never_gets_ready_fails_with_its_last_words(trial: Trial) -> None:
    """It ends in the same way each time before it can start anything: no kill, so trying on would be of no use."""
    ends = [AgentEnd(1, f"Traceback of {pid}\nImportError: libgomp.so.1, process {pid}") for pid in range(3)]
    assert [True, True, False] == [trial.agent_died("n0", end) for end in ends]

    assert ("failed", errors.ANSWER_IS_NO) == trial.ended
    verdict = trial.verdict
    error = "the agent of n0 does not get ready, it ended: ImportError: libgomp.so.1, process 2"
    assert f"{error}\n{ends[-1].last_words}" == verdict.fields["error"]
    assert ("agent_lost", "it ended in the same way each time") == (
        verdict.fields["class"],
        verdict.fields["why"],
    )


KILLED = AgentEnd(-9)
WITHOUT_WRITER = AgentEnd(HELPER_KILLED, "its snapshot writer was killed by SIGKILL\n")


@pytest.mark.parametrize("end", [KILLED, WITHOUT_WRITER])
def test_agent_killed_before_it_is_ready_is_started_again(trial: Trial, end: AgentEnd) -> None:
    """As after any other moment: the budget decides, and its generation is the first one still."""
    for _ in range(FREE_AGENTS + 1):
        assert trial.agent_died("n0", end)
    assert 1 == trial.names().count(events.BUDGET_CHARGED)
    trial.join()
    trial.wait(120)
    assert ["start"] == trial.claimed
    trial.step(1, finished=True)
    trial.leave()

    assert ("finished", errors.FINISHED) == trial.ended


def test_first_generation_is_formed_as_soon_as_nodes_are_ready_however_many_agents_were_killed(
    trial: Trial,
) -> None:
    """Agents of two nodes killed eight times before any was ready: no generation was tried, so none is put off."""
    trial.most = 2
    trial.plan(budget=20)
    for node in ("n0", "n1"):
        trial.nodes.expect(node)
    for number in range(8):
        assert trial.agent_died(f"n{number % 2}", KILLED)
        trial.wait(1.5)
    trial.join("n0")
    trial.join("n1")
    trial.pass_time()

    assert [(1, ("n0", "n1"), trial.agents.formed[0][2])] == trial.agents.formed


def test_agent_that_is_killed_each_time_spends_the_budget(trial: Trial) -> None:
    """No loop without an end: the cause is named, and exit code 3 says that it is the budget."""
    deaths = 1
    while trial.agent_died("n0", WITHOUT_WRITER):
        deaths += 1
        assert deaths < 20

    assert FREE_AGENTS + trial.budget + 1 == deaths
    assert ("failed", errors.BUDGET_SPENT) == trial.ended
    expected = "the agent of n0 ended, since its snapshot writer was killed by SIGKILL"
    assert expected == trial.verdict.fields["error"]


def test_new_agent_of_a_node_whose_workers_run_stands_for_an_old_one_that_died(trial: Trial) -> None:
    """What an agent killed a moment later had said is taken for the new one's: the generation does not wait for ever."""
    trial.begin()
    trial.join()
    assert [("stop", 1)] == trial.agents.requests
    trial.wait(1)

    assert ["start", "agent_lost"] == trial.claimed
    assert 2 == len(trial.agents.formed)


def test_workers_that_leave_unasked_go_on_free_of_charge(trial: Trial) -> None:
    """Somebody sent the workers a TERM: they left after a step, so the job continues."""
    trial.begin()
    trial.step(7)
    trial.leave()
    trial.pass_time()

    assert ["start", "drained"] == trial.claimed
    assert events.BUDGET_CHARGED not in trial.names()


def test_workers_that_leave_without_a_step_end_with_3(trial: Trial) -> None:
    """An entry point that returns without training would loop for ever: it is charged like a crash."""
    trial.begin()
    for _ in range(20):
        if trial.lifecycle.verdict is not None:
            break
        trial.leave()
        trial.wait(120)

    assert ("failed", errors.BUDGET_SPENT) == trial.ended
    assert trial.budget + 1 == len(trial.claimed)


def test_grace_ends_a_drain(trial: Trial) -> None:
    """Workers that do not leave within the grace are not waited for: 75 all the same."""
    trial.begin()
    trial.step(7)
    trial.on(LeaveAsked("SIGTERM"))
    trial.wait(GRACE_S - 1)
    assert trial.lifecycle.verdict is None
    trial.wait(2)

    assert ("interrupted", errors.INTERRUPTED) == trial.ended
    assert "the grace ended before the workers left" == trial.verdict.fields["reason"]


def test_workers_that_have_trained_nothing_have_no_grace(trial: Trial) -> None:
    """They may compile the model for minutes, or read a snapshot, and have nothing to save: a few seconds are enough."""
    trial.begin()
    trial.on(LeaveAsked("SIGTERM"))
    assert UNTRAINED_S == trial.records[-1]["grace_s"]
    trial.wait(GRACE_S / 10)
    assert trial.lifecycle.verdict is None
    trial.wait(GRACE_S / 10)

    assert ("interrupted", errors.INTERRUPTED) == trial.ended


def test_drain_during_a_restart_has_all_of_its_grace(trial: Trial) -> None:
    """The run has something to keep: what is said at the request is what it gets, though this generation did no step."""
    trial.begin()
    trial.step(64)
    trial.fail()
    trial.wait(1)
    trial.on(LeaveAsked("SIGTERM"))
    asked = next(record for record in trial.records if record["event"] == events.DRAIN_REQUESTED)
    assert GRACE_S == asked["grace_s"]
    trial.wait(GRACE_S - 1)
    assert trial.lifecycle.verdict is None
    trial.wait(1)

    assert ("interrupted", errors.INTERRUPTED) == trial.ended


@pytest.mark.parametrize("drained", [False, True])
def test_second_signal_ends_with_130(trial: Trial, *, drained: bool) -> None:
    """Now, even where the drain had come to its end a moment before."""
    trial.begin()
    trial.on(LeaveAsked("SIGINT"))
    if drained:
        trial.leave()
    trial.on(Interrupted("a second signal", errors.KILLED_BY_USER))

    assert ("interrupted", errors.KILLED_BY_USER) == trial.ended


def test_second_signal_does_not_unmake_a_finished_run(trial: Trial) -> None:
    """Training reached its end before the signal was looked at: finished."""
    trial.begin()
    trial.step(225, finished=True)
    trial.leave()
    trial.on(Interrupted("a second signal", errors.KILLED_BY_USER))

    assert ("finished", errors.FINISHED) == trial.ended


def test_failure_while_draining_ends_with_75_and_costs_nothing(trial: Trial) -> None:
    """No restart for the sake of a drain: the last committed snapshot holds."""
    trial.begin()
    trial.step(7)
    trial.on(LeaveAsked("SIGTERM"))
    trial.fail()

    assert ("interrupted", errors.INTERRUPTED) == trial.ended
    assert events.BUDGET_CHARGED not in trial.names()


def test_agent_that_dies_while_draining_is_not_started_again(trial: Trial) -> None:
    """Its workers are gone with it: 75 at once."""
    trial.begin()
    trial.on(LeaveAsked("SIGTERM"))

    assert not trial.agent_died("n0", AgentEnd(-9))
    assert ("interrupted", errors.INTERRUPTED) == trial.ended


def test_store_that_does_not_answer_is_tried_again(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation that cannot be claimed costs a restart of class storage, with a delay; the next try forms it."""
    answers = iter((OSError("no route to host"), 3))

    def claim(reason: str, last: int) -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    trial.begin()
    trial.step(7)
    monkeypatch.setattr(trial, "claim", claim)
    trial.fail()
    trial.pass_time()
    assert 1 == len(trial.agents.formed)
    assert trial.lifecycle.verdict is None
    trial.wait(60)

    assert 3 == trial.agents.formed[-1][0]
    charged = [r["class"] for r in trial.records if r["event"] == events.BUDGET_CHARGED]
    assert ["crash", "storage"] == charged


def test_store_that_never_answers_spends_the_budget(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict of a launch whose store stays away names the store's answer."""

    def claim(reason: str, last: int) -> int:
        raise OSError("no route to host")

    monkeypatch.setattr(trial, "claim", claim)
    trial.begin()
    for _ in range(3):
        trial.wait(60)

    assert ("failed", errors.BUDGET_SPENT) == trial.ended
    assert "no generation can be claimed: no route to host" == trial.verdict.fields["error"]


def test_another_launch_has_claimed_the_next_generation(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure here, the run is found to be another host's: this launch ends instead of taking it back."""
    asked: list[int] = []
    trial.begin()
    trial.step(7)
    monkeypatch.setattr(trial, "claim", lambda _, last: asked.append(last))
    trial.fail()
    trial.wait(60)

    assert [1] == asked
    verdict = trial.verdict
    assert ("failed", 1, "taken_over") == (verdict.status, verdict.exit_code, verdict.fields["class"])
    assert "another launch of this run resumes from its snapshots" in verdict.fields["error"]


def test_a_snapshot_refused_for_a_later_generation_ends_the_launch(trial: Trial) -> None:
    """Nothing of the running generation can be saved any more: it is over; what an older one lost means nothing."""
    trial.begin()
    trial.fail()
    trial.wait(60)
    trial.on(SnapshotFenced(1))
    assert trial.lifecycle.verdict is None
    trial.on(SnapshotFenced(2))
    verdict = trial.verdict
    assert "taken_over" == verdict.fields["class"]


def test_what_is_to_be_done_is_returned_in_order() -> None:
    """Nothing else comes out of a lifecycle: the same events at the same times lead to the same commands."""
    plan = RestartPlan(
        budget=2, refill_s=None, refill_steps=None, refill_epochs=None, hang_timeout_s=600, grace_s=GRACE_S
    )
    lifecycle = Lifecycle(plan, Nodes(1, 1), RunSoFar(step=3, restarts=1, is_resumed=True))
    at = Instant(10.0, 1000.0)
    joined = {"node": "n0", "host": "here", "nproc": 2}
    started = {"world_size": 2, "nodes": 1, "reason": "resume", "members": ["n0"]}
    ended = {"class": "crash", "reason": "killed by SIGKILL", "step": 3, "seconds_since_failure": 995.0}
    killed = WorkersEnded(7, "n0", failed=True, workers=(worker(0, -9),))
    entry = LedgerEntry(1000.0, "crash", None, None, 0, 0, 7, "crash: killed by SIGKILL", charged=True)

    for event, expected in (
        (NodeReady("n0", "here", 2), [RecordEvent(events.NODE_JOINED, joined)]),
        (TimePassed(), [ClaimGeneration("resume", 0, ("n0",))]),
        (
            GenerationClaimed(7),
            [
                RecordEvent(events.GENERATION_STARTED, started),
                UpdateState({"generation": 7, "workers": []}),
                FormGeneration(7, (("n0", 2),), None),
            ],
        ),
        (TimePassed(), []),
    ):
        assert expected == lifecycle.on(event, at)
    failed, *rest = lifecycle.on(killed, at)
    assert isinstance(failed, RecordEvent)
    assert events.WORKER_FAILED == failed.event
    assert rest == [
        RecordEvent(events.GENERATION_ENDED, ended),
        UpdateState({"workers": []}),
        RecordFailure(entry),
        RecordEvent(events.BUDGET_CHARGED, {"class": "crash", "left": 1}),
        UpdateState({"restarts": 2}),
    ]
    assert [ClaimGeneration("crash", 7, ("n0",))] == lifecycle.on(TimePassed(), at)


@pytest.fixture
def script(trial: Trial) -> Trial:
    """Return a lifecycle whose workers run a script of their own."""
    plan = trial.lifecycle._recovery._policy.plan
    trial.lifecycle = Lifecycle(plan, trial.nodes, RunSoFar(), script="train.py")
    trial.begin()
    trial.on(WorkersStarted(1, "n0", ()))
    return trial


def test_a_script_has_finished_once_all_its_workers_have_left(script: Trial) -> None:
    """That it runs is told once its workers do; nobody tells that training has reached its end."""
    assert [each["script"] for each in script.records if each["event"] == events.SCRIPT_STARTED] == [
        "train.py"
    ]
    assert script.state["script"] == "train.py"
    script.leave()
    assert script.verdict.status == "finished"


def test_a_script_that_ends_in_the_middle_of_its_loop_has_not_finished(script: Trial) -> None:
    """Its exit code is 0, as by sys.exit(), and no snapshot holds its last steps: it was called finished."""
    script.step(3)
    script.leave()
    assert script.verdict.status == "failed"
    assert script.verdict.fields["error"].startswith("the script ended in the middle of its loop")


def test_a_script_whose_workers_left_because_one_was_asked_to_goes_on(script: Trial) -> None:
    """SIGTERM to a worker, and not to the run: their exit code 0 is not the end of the training."""
    script.step(3)
    script.log(events.TRAINING_LEFT)
    script.leave()
    assert script.lifecycle.verdict is None
    script.wait(1)
    assert len(script.agents.formed) == 2


def test_a_script_has_the_whole_grace_and_has_drained_whenever_it_leaves(script: Trial) -> None:
    """Though no step is known; one that leaves too late is interrupted all the same."""
    script.on(LeaveAsked("SIGTERM"))
    script.wait(GRACE_S - 1)
    assert script.lifecycle.verdict is None
    script.leave()
    assert (script.verdict.status, script.verdict.exit_code) == ("interrupted", 75)


def _anew(script: Trial) -> int:
    return sum(each["event"] == events.SCRIPT_BEGAN_ANEW for each in script.records)


def test_a_script_that_told_no_step_is_said_to_begin_anew_once(script: Trial) -> None:
    """At its first restart, and not at its first start or at later restarts."""
    assert _anew(script) == 0
    for number in (2, 3):
        script.fail()
        script.wait(1)
        script.on(WorkersStarted(number, "n0", ()))
        assert _anew(script) == 1


def test_a_script_that_tells_steps_is_not_said_to_begin_anew(script: Trial) -> None:
    """Its snapshots are ours."""
    script.step(3)
    script.fail(worker(1, 1))
    script.wait(1)
    script.on(WorkersStarted(2, "n0", ()))
    assert _anew(script) == 0


def test_an_error_of_a_script_is_tried_again_once(script: Trial) -> None:
    """It may have trained for days; the same error again ends the run."""
    script.fail(worker(1, 1))
    script.wait(1)
    assert script.lifecycle.verdict is None
    script.on(WorkersStarted(2, "n0", ()))
    started = [each for each in script.records if each["event"] == events.SCRIPT_STARTED]
    assert started[-1]["seconds_since_failure"] is not None
    script.fail(worker(1, 1))
    assert script.verdict.fields["why"] == "the same error came again"


@pytest.mark.parametrize(
    ("shard", "step", "hint"),
    [
        (
            1,
            None,
            "parallel.shard = 2 leaves each worker 1/2 of the parameters, gradients and optimizer's state",
        ),
        (
            2,
            None,
            "parallel.shard = 4 leaves each worker 1/4 of the parameters, gradients and optimizer's state",
        ),
        ("all", None, None),
        (1, 7, None),
    ],
)
def test_a_memory_that_is_full_before_the_first_step_is_told_the_next_degree(
    trial: Trial, shard: int, step: int | None, hint: str | None
) -> None:
    """A model that has trained fits; one that all workers hold together can be cut no further."""
    trial.shard = shard
    trial.plan(0)
    trial.join(nproc=4)
    trial.pass_time()
    if step is not None:
        trial.step(step)
    error = "OutOfMemoryError: CUDA out of memory"
    trial.log(events.WORKER_RAISED, rank=1, error=error, final=False, **{"class": "oom"})
    trial.fail(worker(1, 1))

    assert trial.verdict.fields["class"] == "oom"
    assert trial.verdict.fields["error"] == (error if hint is None else f"{error}\n  help: {hint}")


@pytest.mark.parametrize(
    ("shard", "error", "hint"),
    [
        (
            2,
            "OutOfMemoryError: CUDA out of memory",
            (
                "parallel.shard = 4 leaves each worker 1/4 of the parameters, gradients and optimizer's state; "
                'parallel.offload = "cpu" keeps them in the CPU\'s memory'
            ),
        ),
        (
            "all",
            "OutOfMemoryError: CUDA out of memory",
            "parallel.offload = \"cpu\" keeps the parameters, gradients and optimizer's state in the CPU's memory",
        ),
        ("all", "RuntimeError: DefaultCPUAllocator: not enough memory", None),
    ],
)
def test_a_sharded_job_whose_devices_memory_is_full_is_told_to_offload(
    trial: Trial, shard: int, error: str, hint: str | None
) -> None:
    """The CPU's memory may hold what the device's does not, unless it is the one that is full."""
    trial.shard, trial.may_offload = shard, True
    trial.plan(0)
    trial.join(nproc=4)
    trial.pass_time()
    trial.log(events.WORKER_RAISED, rank=1, error=error, final=False, **{"class": "oom"})
    trial.fail(worker(1, 1))

    assert trial.verdict.fields["error"] == (error if hint is None else f"{error}\n  help: {hint}")
