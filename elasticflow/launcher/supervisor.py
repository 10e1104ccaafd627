"""The head of a launch: forms generations, charges the budget, gives the verdict (floor 3).

One thread, one loop. All that happens arrives as a message of an agent, as the agent's death, as a
signal, or with time; each has one method. The files of the run are written by this process alone.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from elasticflow import environment, errors, events
from elasticflow.launcher.agent_process import AgentConfig, AgentProcess
from elasticflow.launcher.budget import Budget
from elasticflow.launcher.failures import Failure, first_failure
from elasticflow.launcher.generation import Generation
from elasticflow.launcher.intake import Intake
from elasticflow.launcher.journal import Journal
from elasticflow.launcher.metrics import Metrics

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.compiler.plan import LaunchPlan
    from elasticflow.launcher.rendezvous import Head
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.catalog import Catalog

_POLL_S = 0.01
_LEAVE_S = 10.0
NODE = "n0"


@dataclass(frozen=True)
class Launch:
    """One start of a run; its launch folder is written, its run is locked by the caller.

    Attributes:
        plan: What was written to plan.json.
        folder: The run folder.
        number: Number of the launch, from 1.
        project_root: Where the job's own code is found.
        catalog: The run's snapshots and generations.
        writer: Configuration of the snapshot writer.
        listener: Listening socket of the store.
        is_resumed: The run existed before this launch.
        is_edited: train.py was edited by hand.
    """

    plan: LaunchPlan
    folder: RunFolder
    number: int
    project_root: Path
    catalog: Catalog
    writer: dict[str, Any]
    listener: socket.socket
    is_resumed: bool = False
    is_edited: bool = False

    def agent(self) -> AgentProcess:
        """Return this machine's agent, not yet started."""
        plan = self.plan
        config = AgentConfig(
            launch_folder=str(self.folder.launch(self.number)),
            run_folder=str(self.folder.path),
            node=NODE,
            store_host="127.0.0.1",
            store_port=self.listener.getsockname()[1],
            path=[str(self.project_root / part) for part in plan.module_path],
            modules=list(plan.modules),
            start_method=plan.start_method,
            hang_timeout_s=plan.restarts.hang_timeout_s,
            writer=self.writer,
        )
        variables = {**plan.environment, environment.RUN_ID: self.folder.run_id}
        return AgentProcess(config, variables, self.folder.agent_log)


@dataclass(frozen=True)
class Verdict:
    """How the launch ended: status in state.json, exit code, last event and its fields."""

    status: str
    exit_code: int
    event: str
    fields: dict[str, Any]


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


class Supervisor:
    """Runs one launch to its verdict."""

    def __init__(self, launch: Launch, show: Callable[[dict[str, Any]], None]) -> None:
        self._launch = launch
        self._restarts = launch.plan.restarts
        self._started = time.monotonic()
        self._journal = Journal(launch.folder, launch.number, show)
        self._metrics = Metrics(launch.folder)
        self._intake = Intake(self._journal, self._metrics)
        self._budget = Budget(launch.plan.restarts, launch.folder.ledger)
        self._agent = launch.agent()
        self._signals: list[int] = []
        self._nproc = 0  # workers of the node; 0 until its agent is ready
        self._generation: Generation | None = None
        self._next: _Next | None = _Next(0.0, "resume" if launch.is_resumed else "start")
        self._drain: _Drain | None = None
        self._verdict: Verdict | None = None

    def run(self) -> int:
        """Return the exit code once the launch has ended; nothing of its process tree lives afterwards."""
        previous = {number: signal.signal(number, self._note_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            self._announce()
            self._agent.start()  # its processes import for seconds, beside the import of torch here
            from elasticflow.launcher.rendezvous import Head

            head = Head(self._launch.listener)
            while self._verdict is None:
                self._turn(head)
                time.sleep(_POLL_S)
            return self._close(head, self._verdict)
        finally:
            self._agent.end()
            self._metrics.close()
            self._journal.close()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _announce(self) -> None:
        launch = self._launch
        self._journal.event(
            events.RUN_STARTED,
            launch=launch.number,
            resumed=launch.is_resumed,
            pid=os.getpid(),
            torch=version("torch"),
            uri=launch.plan.snapshots.uri or str(launch.folder.path),
        )
        if launch.is_edited:
            self._journal.event(events.ENTRY_POINT_EDITED, path=str(launch.folder.launch(launch.number) / "train.py"))
        self._journal.write_state()

    # --- the loop ---------------------------------------------------------------------------------------

    def _turn(self, head: Head) -> None:
        self._hear(head)
        self._look_at_signals(head)
        self._look_at_agent()
        self._look_at_clock(head)

    def _hear(self, head: Head) -> None:
        for message in head.take():
            match message["type"]:
                case "node":
                    self._node_joined(message)
                case "workers":
                    self._journal.update(at_once=True, workers=message["workers"])
                case "lines":
                    self._intake.lines(message["lines"], self._generation)
                case "writer":
                    self._intake.reports(message["reports"])
                case "hang":
                    number = 0 if self._generation is None else self._generation.number
                    stacks = self._launch.folder.rank_log(number, message["rank"], "stderr")
                    self._intake.hang(message, self._generation, str(stacks))
                case "ended":
                    self._group_ended(message)

    def _note_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _look_at_signals(self, head: Head) -> None:
        if len(self._signals) > 1:
            self._interrupt("a second signal", errors.KILLED_BY_USER)
        elif self._signals and self._drain is None:
            reason = signal.Signals(self._signals[0]).name
            now = time.monotonic()
            self._drain = _Drain(reason, now, now + self._restarts.grace_s)
            self._journal.event(events.DRAIN_REQUESTED, reason=reason, grace_s=self._restarts.grace_s)
            if self._generation is None:
                self._interrupt(reason)
            else:
                head.request("drain", self._generation.number)

    def _look_at_agent(self) -> None:
        """Start a dead agent again; its workers have died with it."""
        code = self._agent.exit_code()
        if code is None or self._verdict is not None:
            return
        error = f"the agent ended with code {code}"
        self._journal.event(events.NODE_LOST, node=NODE, reason=error)
        was_ready, self._nproc = self._nproc > 0, 0
        generation = self._end_generation("agent_lost", error)
        if self._drain is not None:
            self._interrupt("the agent died while draining")
        elif not was_ready and generation is None:
            self._fail("crash", f"{error} before it was ready:\n{self._agent.last_words()}", errors.ANSWER_IS_NO)
        else:
            self._restart_or_fail(generation, "agent_lost", error)
            if self._verdict is None:
                self._journal.event(events.AGENT_RESTARTED, exit_code=code)
                self._agent.start()

    def _look_at_clock(self, head: Head) -> None:
        now = time.monotonic()
        if self._next is not None and self._nproc and now >= self._next.at and self._verdict is None:
            coming, self._next = self._next, None
            self._form(head, coming)
        if self._drain is not None and now >= self._drain.deadline:
            self._interrupt("the grace ended before the workers left")

    # --- generations ------------------------------------------------------------------------------------

    def _node_joined(self, message: dict[str, Any]) -> None:
        self._nproc = message["nproc"]
        self._journal.event(events.NODE_JOINED, node=message["node"], host=message["host"], nproc=message["nproc"])
        for refused in message["refused"]:
            self._journal.event(events.PRELOAD_REFUSED, **refused)

    def _form(self, head: Head, coming: _Next) -> None:
        """Claim the next generation number at the snapshot URI and have the workers started."""
        launch = self._launch
        claim = {"run_id": launch.folder.run_id, "launch": launch.number, "reason": coming.reason, "nodes": [NODE]}
        number = launch.catalog.claim_generation(claim)
        self._generation = Generation(number)
        self._journal.generation = number
        self._journal.event(events.GENERATION_STARTED, world_size=self._nproc, nodes=1, reason=coming.reason)
        self._journal.update(at_once=True, generation=number, workers=[])
        head.form(number, (NODE,), coming.failed_at)

    def _group_ended(self, message: dict[str, Any]) -> None:
        generation = self._generation
        if generation is None or generation.number != message["generation"]:
            return
        if not message["failed"]:
            self._group_left(generation)
            return
        failure = first_failure(generation.reports(message["node"], message["workers"]))
        assert failure is not None, "a failed group has a failed worker"
        self._journal.event(events.WORKER_FAILED, **failure.fields())
        self._end_generation(failure.failure_class, failure.error)
        if self._drain is not None:
            self._interrupt(f"a worker failed while draining: {failure.error}")
            return
        failed_at = min(worker["at"] for worker in message["workers"])
        self._restart_or_fail(generation, failure.failure_class, failure.error, failure, failed_at)

    def _group_left(self, generation: Generation) -> None:
        """All workers left with code 0: the end of training, or a drain."""
        if generation.is_finished:
            self._end_generation("finished", "training reached its end")
            self._verdict = Verdict("finished", errors.FINISHED, events.RUN_FINISHED, self._figures("restarts"))
            return
        self._end_generation("drained", "all workers left after the same step")
        if self._drain is None:  # somebody asked the workers, not us: the job goes on
            # Leaving without a single step, again and again, would go on for ever if it were free.
            kind = "crash" if generation.step is None else "drained"
            self._restart_or_fail(generation, kind, "the workers left before training reached its end")
            return
        seconds = round(time.monotonic() - self._drain.asked, 3)
        self._journal.event(events.DRAIN_COMPLETED, step=self._journal.state["step"], seconds=seconds)
        self._interrupt(self._drain.reason)

    def _end_generation(self, kind: str, reason: str) -> Generation | None:
        """Return the generation that ran, which now does not."""
        generation, self._generation = self._generation, None
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
        """Charge the budget, then go on with another generation or give the verdict."""
        budget = self._restarts.budget
        decision = self._budget.charge(
            kind,
            step=None if generation is None else generation.step,
            epoch=None if generation is None else generation.epoch,
            fingerprint=f"{kind}: {error}" if failure is None else failure.fingerprint,
            generation=0 if generation is None else generation.number,
        )
        if decision.refilled:
            self._journal.event(events.BUDGET_REFILLED, budget=budget)
        if decision.charged:
            self._journal.event(events.BUDGET_CHARGED, **{"class": kind}, left=decision.left)
        if decision.spent:
            self._journal.event(events.BUDGET_SPENT, **{"class": kind}, budget=budget)
        if decision.restart:
            self._journal.update(at_once=True, restarts=self._journal.state["restarts"] + 1)
            self._next = _Next(time.monotonic() + decision.delay_s, kind, failed_at or time.time())
        else:
            code = errors.BUDGET_SPENT if decision.spent else errors.ANSWER_IS_NO
            self._fail(kind, error, code, failure, decision.reason)

    # --- the verdict ------------------------------------------------------------------------------------

    def _figures(self, *more: str) -> dict[str, Any]:
        seconds = round(time.monotonic() - self._started, 3)
        return {"step": self._journal.state["step"], "seconds": seconds} | {k: self._journal.state[k] for k in more}

    def _fail(self, kind: str, error: str, code: int, failure: Failure | None = None, why: str | None = None) -> None:
        worker = {"rank": None, "exit_code": None}
        if failure is not None:
            worker = {"rank": failure.rank, "exit_code": failure.exit_code}
        fields = {"class": kind, "error": error, "why": why, **worker, **self._figures()}
        self._verdict = Verdict("failed", code, events.RUN_FAILED, fields)

    def _interrupt(self, reason: str, code: int = errors.INTERRUPTED) -> None:
        if self._verdict is None or code == errors.KILLED_BY_USER:
            self._verdict = Verdict("interrupted", code, events.RUN_INTERRUPTED, {"reason": reason, **self._figures()})

    def _close(self, head: Head, verdict: Verdict) -> int:
        """End the agent, take in what it still has to say, and write the verdict."""
        head.stop()
        is_idle = self._generation is None and self._nproc > 0
        self._agent.end(_LEAVE_S if is_idle else 0.0)
        self._generation = None
        for message in head.take():
            if message["type"] == "lines":
                self._intake.lines(message["lines"], None)
            elif message["type"] == "writer":
                self._intake.reports(message["reports"])
        figures = {"exit_code": verdict.exit_code, "event": verdict.event, **verdict.fields}
        self._journal.update(status=verdict.status, workers=[], verdict=figures)
        self._journal.event(verdict.event, **verdict.fields)
        return verdict.exit_code
