"""The standby workers of a node, from its events."""

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
    """A node's last report of its standbys.

    Attributes:
        pids: Process ids of the standbys; empty if there are none.
        seconds: Time that the slowest took to get ready, at low priority.
        memory: Sum of the bytes of their private memory.
        reason: Reason that the node no longer makes standbys.
        without_device: Reason that one of them has not opened its worker's GPU; empty if there is none.
    """

    node: str
    pids: tuple[int, ...] = ()
    seconds: float = 0.0
    memory: int = 0
    reason: str | None = None
    without_device: str = ""

    @classmethod
    def of(cls, event: Record) -> NodeStandbys:
        """Return the report in a `standbys.ready` or `standbys.off` record."""
        pids = event.get("pids")
        return cls(
            text_of(event, "node") or "",
            tuple(pid for pid in pids if isinstance(pid, int)) if isinstance(pids, list) else (),
            float_of(event, "seconds") or 0.0,
            int_of(event, "memory"),
            text_of(event, "reason"),
            text_of(event, "without_device") or "",
        )

    @property
    def memory_of_one(self) -> int:
        """Bytes of a standby's private memory, on average."""
        return self.memory // max(1, len(self.pids))


def in_words(nodes: Sequence[NodeStandbys]) -> str:
    """Return `2 ready, 33 MB`, and the reasons of nodes without standbys, or with standbys that have not opened their GPUs."""
    ready = [pid for node in nodes for pid in node.pids]
    parts = [f"none on {node.node}: {node.reason}" for node in nodes if node.reason is not None]
    parts += [
        f"a GPU is not opened on {node.node}: {node.without_device}" for node in nodes if node.without_device
    ]
    if ready:
        pids = ", ".join(map(str, ready[:8])) + (" ..." if len(ready) > 8 else "")
        memory = size(sum(node.memory for node in nodes))
        parts.insert(0, f"{len(ready)} ready (pid {pids}), {memory}")
    return "; ".join(parts)
