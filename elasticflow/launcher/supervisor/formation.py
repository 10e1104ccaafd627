"""Which generation is formed when, of whom, and under which number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from elasticflow import events
from elasticflow.launcher.restarts.generations import Generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.supervisor.nodes import Nodes
    from elasticflow.protocol.messages import GenerationRequest


class Agents(Protocol):
    """The agents, as far as they can be asked for something."""

    def form(self, generation: int, nodes: tuple[tuple[str, int], ...], failed_at: float | None) -> None:
        """Have *nodes*, each with its number of workers, form *generation*."""

    def request(self, what: GenerationRequest, generation: int) -> None:
        """Ask *what* of the workers of *generation*."""

    def release(self, node: str) -> None:
        """Let *node* go."""


class TakenOver(Exception):  # noqa: N818  # nothing failed
    """Another launch of the run has claimed the generation after ours."""


@dataclass(frozen=True)
class _Next:
    """The generation to be formed as soon as it is time and its nodes are there."""

    at: float
    reason: str
    failed_at: float | None = None


class Formation:
    """Forms the generations of a launch; begins with one for the reason *first*.

    Args:
        journal: Where it is told.
        nodes: The nodes.
        agents: Their agents.
        claim: Takes a reason, the last number it gave and the nodes; returns the next number, or None if another
            launch of the run has one after the last.
        first: Why the first generation is formed.
    """

    def __init__(
        self,
        journal: Journal,
        nodes: Nodes,
        agents: Agents,
        claim: Callable[[str, int, tuple[str, ...]], int | None],
        first: str,
    ) -> None:
        self._journal, self._nodes, self._agents, self._claim = journal, nodes, agents, claim
        self._next: _Next | None = _Next(0.0, first)
        self._is_waiting = False

    def plan(self, reason: str, at: float, failed_at: float | None = None) -> None:
        """Have a generation formed from *at* on, in answer to a failure at the unix time *failed_at*, if any.

        One that is planned already is put off, and keeps its reason.
        """
        before = self._next
        self._next = (
            _Next(at, reason, failed_at) if before is None else replace(before, at=max(at, before.at))
        )

    def form(self, now: float) -> Generation | None:
        """Return the planned generation if it is time and its nodes are there; its workers are being started then.

        Raises:
            TakenOver: another launch of the run has gone on.
            OSError: no number can be claimed; the plan is dropped.
        """
        coming = self._next
        if coming is None or now < coming.at:
            return None
        chosen = self._nodes.chosen(now, is_first=self._journal.generation == 0)
        if not chosen:
            self._say_who_is_awaited()
            return None
        self._next, self._is_waiting = None, False
        names = tuple(node.name for node in chosen)
        number = self._claim(coming.reason, self._journal.generation, names)
        if number is None:
            raise TakenOver
        self._journal.generation = number
        world_size = sum(node.nproc for node in chosen)
        self._journal.event(
            events.GENERATION_STARTED, world_size=world_size, nodes=len(chosen), reason=coming.reason
        )
        self._journal.update(at_once=True, generation=number, workers=[])
        self._agents.form(number, tuple((node.name, node.nproc) for node in chosen), coming.failed_at)
        return Generation(number, names)

    def _say_who_is_awaited(self) -> None:
        present, least = len(self._nodes), self._nodes.least
        if 0 < present < least and not self._is_waiting:
            self._is_waiting = True
            self._journal.event(events.NODE_AWAITED, present=present, least=least)
