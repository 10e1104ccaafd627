"""Fetches logs that are on other hosts, and lists logs that are not available."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.rendezvous.requests import copies_in, put_request
from elasticflow.observe.history import GONE, RunHistory
from elasticflow.observe.records import parse
from elasticflow.observe.status import settled_state
from elasticflow.observe.worker_logs import generations
from elasticflow.protocol.messages import FilesWanted
from elasticflow.system.json_lines import lines_of

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.observe.history import Node
    from elasticflow.run_folder import RunFolder

# Seconds that the run has to answer: more than its nodes have.
_PATIENCE_S = 10.0
_POLL_S = 0.02
# Parts of the lines of events.jsonl about nodes and groups.
_TELLING = tuple(
    f'"{name}"'.encode()
    for name in (events.RUN_STARTED, events.GENERATION_STARTED, events.NODE_JOINED, *GONE)
)
# Names that supervisors give to the nodes of their own machine.
_OWN_NODE = re.compile(r"n\d+")


@dataclass(frozen=True)
class Elsewhere:
    """Workers whose logs are not in this run folder, or only in part.

    Attributes:
        is_gone: True if the node is lost or has left, and cannot be asked.
        is_partly_here: True if the logs that the node sent before it was lost are here.
    """

    generation: int
    ranks: tuple[int, ...]
    node: str
    host: str
    is_gone: bool
    is_partly_here: bool = False

    def sentence(self, folder: RunFolder) -> str:
        """Return a sentence for a person."""
        ranks = ", ".join(map(str, self.ranks))
        whose = f"rank {ranks}" if len(self.ranks) == 1 else f"ranks {ranks}"
        if self.is_partly_here:
            return (
                f"logs of {whose} of generation {self.generation} may lack their end: they are what host {self.host} "
                f"(node {self.node}) had sent before it was lost"
            )
        why = "which is gone" if self.is_gone else "which did not send them"
        there = f"runs/{folder.job}/{folder.run_id}/logs/g{self.generation:04d}"
        return (
            f"logs of {whose} of generation {self.generation} are not to be had: they are on host {self.host} "
            f"(node {self.node}), {why}; there they lie in {there} of the project"
        )


def fetch(folder: RunFolder, generation: int | None = None, *, logged: bool = False) -> str | None:
    """Have the other hosts of a running run send their logs into *folder*; return the reason if that fails, else None.

    Args:
        folder: The run folder on the leading machine.
        generation: Generation of the logs; None: the newest.
        logged: True: fetch the logs of hooks, too.
    """
    if (path := ask(folder, generation, logged=logged)) is None:
        return None
    deadline = time.monotonic() + _PATIENCE_S
    while path.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            return f"the run did not say within {_PATIENCE_S:g} s what its other hosts have logged"
        time.sleep(_POLL_S)
    return None


def ask(folder: RunFolder, generation: int | None = None, *, logged: bool = False) -> Path | None:
    """Do as `fetch` without waiting; return a file that is removed once the answer is there, or None if no host is asked."""
    members = _members(folder)
    can_answer = any(_is_other(node) and not _is_gone(node) for nodes in members.values() for node in nodes)
    if not can_answer:
        return None
    return put_request(folder, FilesWanted(generation or max(members), logged))


def missing(folder: RunFolder, generation: int | None = None) -> list[Elsewhere]:
    """Return the workers of a generation, by default the newest, whose logs are not here."""
    members = _members(folder)
    number = generation or max([*members, *generations(folder)], default=0)
    logs, copies = folder.generation_logs(number), copies_in(folder)
    first, found = 0, []
    for node in members.get(number, ()):
        ranks = range(first, first + node.nproc)
        first += node.nproc
        # A worker of this machine that has not begun has no log yet, either.
        if not _is_other(node):
            continue
        absent = tuple(rank for rank in ranks if not any(logs.glob(f"rank{rank}.*")))
        here = [(rank, path) for rank in ranks for path in logs.glob(f"rank{rank}.*")]
        sent = {rank for rank, path in here if path.relative_to(folder.path).as_posix() in copies}
        where = node.name, node.host or "?", _is_gone(node)
        if absent:
            found.append(Elsewhere(number, absent, *where))
        if node.gone == "lost" and sent:
            found.append(Elsewhere(number, tuple(sorted(sent)), *where, is_partly_here=True))
    return found


def _members(folder: RunFolder) -> dict[int, tuple[Node, ...]]:
    """Return the nodes of each generation, in rank order."""
    # Only these lines are parsed: a run of weeks has many others, and one that is followed is asked every second.
    lines = (line for line in lines_of(folder.events) if any(mark in line for mark in _TELLING))
    history = RunHistory.of(record for line in lines if (record := parse(line)) is not None)
    if settled_state(folder)[1] != "running":
        for node in history.nodes.values():
            node.leave()
    groups = history.generations.values()
    return {group.number: group.members for group in groups if group.began_s is not None}


def _is_other(node: Node) -> bool:
    """Return True if a node is on another machine than the supervisor."""
    return _OWN_NODE.fullmatch(node.name) is None


def _is_gone(node: Node) -> bool:
    """Return True if a node cannot be asked; an excluded node can."""
    return node.gone in {"lost", "left"}
