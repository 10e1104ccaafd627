"""How a generation ended and what follows, another one or the verdict; how a launch ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import errors, events
from elasticflow.launcher.restarts.generations import Cause, Generation
from elasticflow.launcher.supervisor.drains import TOO_LATE

if TYPE_CHECKING:
    from elasticflow.events import Event
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.failures import Failure
    from elasticflow.launcher.restarts.restarts import Restarts
    from elasticflow.launcher.supervisor.drains import Drains
    from elasticflow.launcher.supervisor.formation import Formation
    from elasticflow.launcher.supervisor.nodes import Nodes


@dataclass(frozen=True)
class Verdict:
    """How the launch ended: status in state.json, exit code, last event and its fields."""

    status: str
    exit_code: int
    event: Event
    fields: dict[str, Any]


class Verdicts:
    """Makes verdicts, with the step that the run has reached."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def finished(self, stopped: str | None) -> Verdict:
        """Training reached its end, or the job's own code ended it, for the reason *stopped*."""
        fields = {**self._figures(), "restarts": self._journal.state["restarts"], "stopped": stopped}
        return Verdict("finished", errors.FINISHED, events.RUN_FINISHED, fields)

    def interrupted(self, reason: str, code: int) -> Verdict:
        """Training did not reach its end; the same command goes on."""
        return Verdict("interrupted", code, events.RUN_INTERRUPTED, {"reason": reason, **self._figures()})

    def failed(
        self, kind: str, error: str, code: int, failure: Failure | None = None, why: str | None = None
    ) -> Verdict:
        """It failed with class *kind*; *why* says why it is not tried again."""
        rank, exit_code = (None, None) if failure is None else (failure.rank, failure.exit_code)
        fields = {"class": kind, "error": error, "why": why, "rank": rank, "exit_code": exit_code}
        return Verdict("failed", code, events.RUN_FAILED, fields | self._figures())

    def _figures(self) -> dict[str, Any]:
        return {"step": self._journal.state["step"]}


class GenerationEnds:
    """Tells how a generation ended, charges it, and plans the next one or gives the verdict."""

    def __init__(
        self,
        journal: Journal,
        restarts: Restarts,
        nodes: Nodes,
        formation: Formation,
        drains: Drains,
        verdicts: Verdicts,
    ) -> None:
        self._journal, self._restarts, self._nodes = journal, restarts, nodes
        self._formation, self._drains, self._verdicts = formation, drains, verdicts

    def of(self, generation: Generation) -> Verdict | None:
        """Return the verdict that the end of *generation* leads to; None if another one is planned."""
        return self._failed(generation) if generation.is_stopping else self._left(generation)

    def restart_or_fail(
        self,
        generation: Generation | None,
        kind: str,
        error: str,
        failure: Failure | None = None,
        failed_at: float | None = None,
        unready_ends: tuple[str, ...] = (),
    ) -> Verdict | None:
        """Charge a failure; plan another generation, or return the verdict.

        Args:
            generation: What failed; None if none could be formed.
            kind: A class of `failure_classes.CLASSES`.
            error: In one line.
            failure: The worker that failed first, if it was one.
            failed_at: When, in unix time; None: now.
            unready_ends: How the agents of a node ended before they were ready.
        """
        decision = self._restarts.decide(
            generation or Generation(0), kind, error, time.time(), failure, unready_ends
        )
        if decision.restart:
            self._formation.plan(kind, time.monotonic() + decision.delay_s, failed_at or time.time())
            return None
        code = errors.BUDGET_SPENT if decision.spent else errors.ANSWER_IS_NO
        return self._verdicts.failed(kind, error, code, failure, decision.reason)

    def taken_over(self) -> Verdict:
        """Return the verdict on a launch whose run is another's now: going on would take it away from that one again."""
        error = f"another launch of this run goes on from its snapshots: generation {self._journal.generation + 1}"
        return self._verdicts.failed("taken_over", error, errors.ANSWER_IS_NO)

    def _failed(self, generation: Generation) -> Verdict | None:
        drain = self._drains.take()
        cause = generation.cause()
        if cause is None:  # killed by us, and nothing else was wrong
            assert drain is not None, "a failed group has a cause"
            cause = Cause("", drain.kind, TOO_LATE)
        if cause.failure is not None:
            self._journal.event(events.WORKER_FAILED, **cause.failure.fields())
        self._tell_end(cause.kind, cause.error)
        if drain is not None and drain.ends:
            who = "the agent died" if cause.failure is None else "a worker failed"
            return self._verdicts.interrupted(f"{who} while draining: {cause.error}", errors.INTERRUPTED)
        if cause.failure is not None and self._nodes.blame(cause.node):
            self._journal.event(events.NODE_EXCLUDED, node=cause.node, reason=cause.error)
        return self.restart_or_fail(generation, cause.kind, cause.error, cause.failure, generation.failed_at)

    def _left(self, generation: Generation) -> Verdict | None:
        """All workers left with code 0: the end of training, or a drain."""
        drain = self._drains.take()
        if generation.is_finished:
            stopped = generation.stopped
            reason = "training reached its end" if stopped is None else f"training was stopped by {stopped}"
            self._tell_end("finished", reason)
            return self._verdicts.finished(stopped)
        kind = "drained" if drain is None else drain.kind
        self._tell_end(kind, "all workers left after the same step")
        if drain is None:  # somebody asked the workers, not us: the job goes on
            # Leaving without a single step, again and again, would go on for ever if it were free.
            kind = "crash" if generation.step is None else "drained"
            return self.restart_or_fail(generation, kind, "the workers left before training reached its end")
        self._drains.completed(drain)
        if drain.ends:
            return self._verdicts.interrupted(drain.reason, errors.INTERRUPTED)
        self._formation.plan(kind, time.monotonic())
        return None

    def _tell_end(self, kind: str, reason: str) -> None:
        step = self._journal.state["step"]
        self._journal.event(events.GENERATION_ENDED, **{"class": kind}, reason=reason, step=step)
        self._journal.update(at_once=True, workers=[])
