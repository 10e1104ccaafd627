"""One command for all machines: who leads, who takes part, and what follows when a launch is over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from elasticflow.errors import (
    FINISHED,
    INTERRUPTED,
    LaunchNotFoundError,
    LeaderMissingError,
    LedElsewhereError,
    NodeRefusedError,
    RendezvousError,
    RunLockedError,
)
from elasticflow.launcher import join
from elasticflow.launcher import lead_or_join as tested
from elasticflow.launcher.supervisor.launch_record import Request
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.jobfile.tables.job import Job

ADDRESS = StoreAddress("head", 29400)
LED_ELSEWHERE = LedElsewhereError("a run of this job is led by another process")


class _Plan:
    """What is asked of a plan."""

    def __init__(self, *, is_store_outside: bool) -> None:
        self.is_store_outside = is_store_outside


class _World:
    """The other machines of a run: answers to whoever asks, one after the other."""

    def __init__(self, outcomes: list[int | None], *, asked: bool = False, run_id: str = "r") -> None:
        self.outcomes, self.asked, self.run_id = iter(outcomes), asked, run_id
        self.refusals: Iterator[OSError | None] = iter([])
        self.told_late: Iterator[int | None] = iter([])
        self.said: list[str] = []
        self.lasts: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch, *, is_store_outside: bool) -> None:
        """Stand in for stores and agents."""
        world = self

        class Node:
            folder = RunFolder(Path("runs/job") / world.run_id)
            was_asked = world.asked

            def __init__(self, *_: object) -> None:
                pass

            def take_part(self) -> int | None:
                return next(world.outcomes)

        def await_launch(_keys: object, _address: object, last: int, _say: object, **_: object) -> int:
            world.lasts.append(last)
            return len(world.lasts)

        class Place:
            endpoint = ADDRESS.endpoint

            def under(self, _: str) -> None:
                return None

        plan = _Plan(is_store_outside=is_store_outside)
        monkeypatch.setattr(tested, "plan_to_join", lambda *_: (plan, Place()))
        monkeypatch.setattr(tested, "why_not_served", lambda _: next(world.refusals, None))
        monkeypatch.setattr(tested, "connect", lambda _: None)
        monkeypatch.setattr(join, "_code_told_late", lambda *_: next(world.told_late, None))
        monkeypatch.setattr(tested, "await_launch", await_launch)
        monkeypatch.setattr(tested, "Node", Node)
        monkeypatch.setattr(tested, "_AGAIN_S", 0.001)

    def call(
        self,
        node_rank: int | None,
        lead: Callable[[Request], int],
        why_leader_is_lost: Callable[[], str | None] = lambda: None,
    ) -> int:
        """Return what the machine of *node_rank* comes to."""

        class AnyJob:
            job = cast("Job", None)

        request = Request(AnyJob.job, (), (), Path(), RunFolder(Path("runs/job/r")), node_rank=node_rank)
        return tested.lead_or_join(
            request, ADDRESS, self.said.append, lambda _: None, lead, why_leader_is_lost
        )


def _never(_: Request) -> int:
    raise AssertionError("this machine does not lead")


def test_first_machine_leads_and_the_others_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store goes with who leads, the machine of rank 0 does, and nobody else; without a rank, the one named."""
    world = _World([FINISHED, FINISHED])
    world.install(monkeypatch, is_store_outside=False)

    assert 7 == world.call(0, lambda _: 7)
    assert FINISHED == world.call(1, _never)
    monkeypatch.setattr(tested, "is_here", lambda host: host == "head")
    assert 7 == world.call(None, lambda _: 7)
    monkeypatch.setattr(tested, "is_here", lambda _: False)
    assert FINISHED == world.call(None, _never)


def test_machine_stays_while_the_run_is_led_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that ends before the run, or whose leader is gone, is not the end; a launch that failed is."""
    world = _World([INTERRUPTED, None, 1])
    world.install(monkeypatch, is_store_outside=False)
    world.refusals = iter([None, ConnectionRefusedError("refused"), None])

    assert 1 == world.call(1, _never)
    assert [0, 0, 0] == world.lasts
    assert "waiting for head:29400: refused" in world.said


def test_machine_that_is_asked_to_leave_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code, asked for here, ends the command."""
    world = _World([INTERRUPTED], asked=True)
    world.install(monkeypatch, is_store_outside=False)

    assert INTERRUPTED == world.call(1, _never)


def test_any_machine_leads_where_the_store_outlives_who_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that comes first; when it is gone, one of the others."""
    world = _World([INTERRUPTED, None])
    world.install(monkeypatch, is_store_outside=True)
    tries: Iterator[int | LedElsewhereError] = iter([LED_ELSEWHERE, LED_ELSEWHERE, 0])

    def lead(_: Request) -> int:
        outcome = next(tries)
        if isinstance(outcome, LedElsewhereError):
            raise outcome
        return outcome

    assert 0 == world.call(3, lead)
    assert [0, 1] == world.lasts


def test_run_that_a_silent_leader_has_ended_is_not_led_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped after the last step; by the time this machine would lead, it has told its exit code."""
    world = _World([None])
    world.install(monkeypatch, is_store_outside=True)
    world.told_late = iter([FINISHED])
    tries: Iterator[LedElsewhereError] = iter([LED_ELSEWHERE])

    def lead(_: Request) -> int:
        raise next(tries)

    assert FINISHED == world.call(3, lead)


def test_another_run_at_the_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of a job do not mix."""
    world = _World([], run_id="other")
    world.install(monkeypatch, is_store_outside=False)

    with pytest.raises(NodeRefusedError, match="run other is led at head:29400, not r"):
        world.call(1, _never)


def test_leader_that_does_not_come_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code has a scheduler start the same command again."""
    world = _World([])
    world.install(monkeypatch, is_store_outside=False)
    world.refusals = iter([OSError("no such host")] * 1000)
    monkeypatch.setattr(tested, "_PATIENCE_S", 0.01)

    with pytest.raises(LeaderMissingError, match="nobody leads the run") as raised:
        world.call(1, _never)
    assert INTERRUPTED == raised.value.exit_code


def test_leader_that_the_scheduler_has_lost_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked now and then while nobody answers, and not before."""
    world = _World([INTERRUPTED])
    world.install(monkeypatch, is_store_outside=False)
    world.refusals = iter([None, *[ConnectionRefusedError("refused")] * 1000])
    answers = iter([None, None, "Slurm has taken n1"])

    with pytest.raises(LeaderMissingError, match="at head:29400: Slurm has taken n1"):
        world.call(1, _never, lambda: next(answers))
    assert [] == list(answers)


def test_store_that_went_away_in_that_moment_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It answered when this machine was to lead; a scheduler would take the code of a refusal as the run's end."""
    world = _World([])
    world.install(monkeypatch, is_store_outside=True)
    tries: Iterator[int] = iter([1, 2, 0])

    def lead(_: Request) -> int:
        if (code := next(tries)) > 0:
            raise RendezvousError("no store for the rendezvous at head:29400: Connection refused")
        return code

    assert 0 == world.call(None, lead)
    assert 1 == len(world.said)

    def lead_never(_: Request) -> int:
        raise RendezvousError("no store for the rendezvous at head:29400: what answers is no store")

    monkeypatch.setattr(tested, "_PATIENCE_S", 0.05)
    with pytest.raises(LeaderMissingError, match="is no store"):
        world.call(None, lead_never)


def _locked(_: Request) -> int:
    raise RunLockedError("run r is running (process 1)")


def test_machine_that_finds_the_run_locked_takes_part_where_the_store_is_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has the lock leads in a moment; where the head serves the store, nobody else may have it."""
    world = _World([FINISHED])
    world.install(monkeypatch, is_store_outside=True)
    assert FINISHED == world.call(None, _locked)

    world.install(monkeypatch, is_store_outside=False)
    with pytest.raises(RunLockedError):
        world.call(0, _locked)


def test_lock_of_a_run_that_is_not_led_here_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that is led elsewhere, or at another store, is refused as running."""
    world = _World([])
    world.install(monkeypatch, is_store_outside=True)

    def nobody_leads(*_: object, **__: object) -> int:
        world.lasts.append(0)
        raise LaunchNotFoundError("nobody leads a run of this job")

    monkeypatch.setattr(tested, "await_launch", nobody_leads)
    with pytest.raises(RunLockedError, match="is running"):
        world.call(None, _locked)
    assert 10 == len(world.lasts)


def test_what_answers_in_the_leaders_place_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program, or a proxy with nobody behind it, answers at once: it is asked now and then, for ten minutes."""
    world = _World([])
    world.install(monkeypatch, is_store_outside=False)
    monkeypatch.setattr(tested, "_PATIENCE_S", 0.05)

    def refuse(_: object) -> None:
        raise RendezvousError("no store at head:29400: what answers is no store")

    monkeypatch.setattr(tested, "connect", refuse)
    with pytest.raises(LeaderMissingError, match=r"nobody leads .* what answers is no store") as raised:
        world.call(1, _never)
    assert INTERRUPTED == raised.value.exit_code
