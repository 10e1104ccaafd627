"""The standby workers of a node, as its events tell of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import size
from elasticflow.system.records import float_of, int_of, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.system.records import Record


@dataclass(frozen=True)
class NodeStandbys:
    """What one node said last of its standbys.

    Attributes:
        node: Its id inside the launch.
        pids: Their processes; empty if there are none.
        seconds: How long the slowest took to get ready, at low priority.
        memory: Bytes that they hold for themselves, in sum.
        reason: Why the node makes none any more.
    """

    node: str
    pids: tuple[int, ...] = ()
    seconds: float = 0.0
    memory: int = 0
    reason: str | None = None

    @classmethod
    def of(cls, event: Record) -> NodeStandbys:
        """Return what a `standbys.ready` or `standbys.off` record says."""
        pids = event.get("pids")
        return cls(
            text_of(event, "node") or "",
            tuple(pid for pid in pids if isinstance(pid, int)) if isinstance(pids, list) else (),
            float_of(event, "seconds") or 0.0,
            int_of(event, "memory"),
            text_of(event, "reason"),
        )

    @property
    def memory_of_one(self) -> int:
        """Bytes that one of them holds for itself, on average."""
        return self.memory // max(1, len(self.pids))


def in_words(nodes: Sequence[NodeStandbys]) -> str:
    """Return `2 ready, 33 MB`, and why a node has none."""
    ready = [pid for node in nodes for pid in node.pids]
    parts = [f"none on {node.node}: {node.reason}" for node in nodes if node.reason is not None]
    if ready:
        pids = ", ".join(map(str, ready[:8])) + (" ..." if len(ready) > 8 else "")
        memory = size(sum(node.memory for node in nodes))
        parts.insert(0, f"{len(ready)} ready (pid {pids}), {memory}")
    return "; ".join(parts)


def cost_in_words(memory: float, seconds: float) -> str:
    """Return what one standby takes: `16 MB and 5.1 s to get ready`."""
    return f"{size(memory)} and {seconds:.1f} s to get ready"
