"""What follows from what happens to a launch: generations, budget, drain, verdict (floor 3).

Knows no process, no store and no signal: it is told, and asks its `Nodes` to form or drain. So it can be
tested as a table.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from elasticflow import errors, events
from elasticflow.launcher.failures import Failure, first_failure
from elasticflow.launcher.generation import Generation
from elasticflow.launcher.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.journal import Journal
    from elasticflow.launcher.restarts import Restarts


class Nodes(Protocol):
    """The agents, as far as they can be asked for something."""

    def form(self, generation: int, nodes: tuple[str, ...], failed_at: float | None) -> None:
        """Have *nodes* form *generation*."""

    def request(self, what: str, generation: int) -> None:
        """Ask the workers of *generation* to `drain`."""


@dataclass(frozen=True)
class _Drain:
    reason: str
    asked: float
    deadline: float


@dataclass(frozen=True)
class _Next:
    """The generation to be formed as soon as it is time and a node is there."""

    at: float
    reason: str
    failed_at: float | None = None


class Course:
    """Decides what comes next, until there is a verdict.

    Attributes:
        generation: The generation that runs, or None between two.
        verdict: How the launch ended, or None while it goes on.
    """

    def __init__(
        self,
        journal: Journal,
        restarts: Restarts,
        nodes: Nodes,
        claim: Callable[[str, int], int | None],
        first: str,
        grace_s: float,
    ) -> None:
        """Begin with a generation for the reason *first*; *claim* takes a reason and the last number that it gave.

        It returns the next number, or None if another launch of the run has one after the last.
        """
        self._journal = journal
        self._restarts = restarts
        self._nodes = nodes
        self._claim = claim
        self._grace_s = grace_s
        self._started = time.monotonic()
        self._node: tuple[str, int] | None = None  # the node that is ready, and its number of workers
        self._next: _Next | None = _Next(0.0, first)
        self._drain: _Drain | None = None
        self.generation: Generation | None = None
        self.verdict: Verdict | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the node's agent is ready and runs no generation."""
        return self.generation is None and self._node is not None

    @property
    def is_draining(self) -> bool:
        """Whether a drain was asked for."""
        return self._drain is not None

    # --- what happens -----------------------------------------------------------------------------------

    def node_joined(self, node: str, host: str, nproc: int, refused: list[dict[str, str]]) -> None:
        """A node's agent is ready to start *nproc* workers."""
        self._node = (node, nproc)
        self._journal.event(events.NODE_JOINED, node=node, host=host, nproc=nproc)
        for module in refused:
            self._journal.event(events.PRELOAD_REFUSED, **module)

    def time_passed(self) -> None:
        """Form the next generation if it is time; end a drain that takes too long."""
        now = time.monotonic()
        if (
            self._next is not None
            and self._node is not None
            and now >= self._next.at
            and self.verdict is None
        ):
            coming, self._next = self._next, None
            self._form(coming, *self._node)
        if self._drain is not None and now >= self._drain.deadline:
            self.interrupt("the grace ended before the workers left")

    def asked_to_leave(self, reason: str) -> None:
        """Drain: all workers leave after the same step, with a snapshot."""
        now = time.monotonic()
        self._drain = _Drain(reason, now, now + self._grace_s)
        self._journal.event(events.DRAIN_REQUESTED, reason=reason, grace_s=self._grace_s)
        if self.generation is None:
            self.interrupt(reason)
        else:
            self._nodes.request("drain", self.generation.number)

    def group_ended(self, message: dict[str, Any]) -> None:
        """The workers of a generation have ended, as an agent's message says."""
        generation = self.generation
        if generation is None or generation.number != message["generation"]:
            return
        if not message["failed"]:
            self._group_left(generation)
            return
        failure = first_failure(generation.reports(message["node"], message["workers"]))
        assert failure is not None, "a failed group has a failed worker"
        self._journal.event(events.WORKER_FAILED, **failure.fields())
        self._end(failure.failure_class, failure.error)
        if self._drain is not None:
            self.interrupt(f"a worker failed while draining: {failure.error}")
            return
        failed_at = min(worker["at"] for worker in message["workers"])
        self._restart_or_fail(generation, failure.failure_class, failure.error, failure, failed_at)

    def agent_died(self, node: str, code: int, last_words: str) -> bool:
        """Return whether to start the agent again; its workers have died with it."""
        error = f"the agent ended with code {code}"
        self._journal.event(events.NODE_LOST, node=node, reason=error)
        was_ready, self._node = self._node is not None, None
        generation = self._end("agent_lost", error)
        if self._drain is not None:
            self.interrupt("the agent died while draining")
        elif not was_ready and self._journal.state["generation"] == 0:
            self._fail("crash", f"{error} before it was ready:\n{last_words}", errors.ANSWER_IS_NO)
        else:
            self._restart_or_fail(generation, "agent_lost", error)
        return self.verdict is None

    def fenced(self, generation: int) -> None:
        """A snapshot of *generation* was refused, since a later one exists."""
        is_ours = self.generation is not None and self.generation.number == generation
        if is_ours and self.verdict is None:  # else this launch itself has gone on to a later one
            self._taken_over()

    def interrupt(self, reason: str, code: int = errors.INTERRUPTED) -> None:
        """End the launch now; the same command goes on. A run that has finished or failed stays so."""
        if self.verdict is None or (code == errors.KILLED_BY_USER and self.verdict.status == "interrupted"):
            self.verdict = Verdict(
                "interrupted", code, events.RUN_INTERRUPTED, {"reason": reason, **self._figures()}
            )

    # --- what follows -----------------------------------------------------------------------------------

    def _form(self, coming: _Next, node: str, nproc: int) -> None:
        """Claim the next generation number at the snapshot URI and have the workers started."""
        try:
            number = self._claim(coming.reason, self._journal.generation)
        except OSError as error:  # the store does not answer: it may at the next try
            self._restart_or_fail(None, "storage", f"no generation can be claimed: {error}")
            return
        if number is None:
            self._taken_over()
            return
        self.generation = Generation(number)
        self._journal.generation = number
        self._journal.event(events.GENERATION_STARTED, world_size=nproc, nodes=1, reason=coming.reason)
        self._journal.update(at_once=True, generation=number, workers=[])
        self._nodes.form(number, (node,), coming.failed_at)

    def _group_left(self, generation: Generation) -> None:
        """All workers left with code 0: the end of training, or a drain."""
        if generation.is_finished:
            stopped = generation.stopped
            reason = "training reached its end" if stopped is None else f"training was stopped by {stopped}"
            self._end("finished", reason)
            fields = {**self._figures(), "restarts": self._journal.state["restarts"], "stopped": stopped}
            self.verdict = Verdict("finished", errors.FINISHED, events.RUN_FINISHED, fields)
            return
        self._end("drained", "all workers left after the same step")
        if self._drain is None:  # somebody asked the workers, not us: the job goes on
            # Leaving without a single step, again and again, would go on for ever if it were free.
            kind = "crash" if generation.step is None else "drained"
            self._restart_or_fail(generation, kind, "the workers left before training reached its end")
            return
        seconds = round(time.monotonic() - self._drain.asked, 3)
        self._journal.event(events.DRAIN_COMPLETED, step=self._journal.state["step"], seconds=seconds)
        self.interrupt(self._drain.reason)

    def _end(self, kind: str, reason: str) -> Generation | None:
        """Return the generation that ran, which now does not."""
        generation, self.generation = self.generation, None
        if generation is not None:
            step = self._journal.state["step"]
            self._journal.event(events.GENERATION_ENDED, **{"class": kind}, reason=reason, step=step)
        self._journal.update(at_once=True, workers=[])
        return generation

    def _restart_or_fail(
        self,
        generation: Generation | None,
        kind: str,
        error: str,
        failure: Failure | None = None,
        failed_at: float | None = None,
    ) -> None:
        """Go on with another generation or give the verdict."""
        decision = self._restarts.decide(generation or Generation(0), kind, error, failure)
        if decision.restart:
            self._next = _Next(time.monotonic() + decision.delay_s, kind, failed_at or time.time())
        else:
            code = errors.BUDGET_SPENT if decision.spent else errors.ANSWER_IS_NO
            self._fail(kind, error, code, failure, decision.reason)

    def _taken_over(self) -> None:
        """End the launch: going on would take the run away from the other one again."""
        error = f"another launch of this run goes on from its snapshots: generation {self._journal.generation + 1}"
        self._fail("taken_over", error, errors.ANSWER_IS_NO)

    def _figures(self) -> dict[str, Any]:
        return {"step": self._journal.state["step"], "seconds": round(time.monotonic() - self._started, 3)}

    def _fail(
        self, kind: str, error: str, code: int, failure: Failure | None = None, why: str | None = None
    ) -> None:
        rank, exit_code = (None, None) if failure is None else (failure.rank, failure.exit_code)
        fields = {"class": kind, "error": error, "why": why, "rank": rank, "exit_code": exit_code}
        fields |= self._figures()
        self.verdict = Verdict("failed", code, events.RUN_FAILED, fields)
