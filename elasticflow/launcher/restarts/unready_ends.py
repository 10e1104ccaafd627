"""Agents that end before they are ready: which of them cannot do better; pure."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.launcher.agent.agent_process import AgentEnd

# So often in a row, in the same way: once may be the machine, twice a coincidence.
_MOST = 3
_NUMBER = re.compile(r"\d+")


class UnreadyEnds:
    """How each node's agents ended since one was ready.

    Agents that were killed from outside, or whose helpers were, say nothing about the next: those are the budget's.
    """

    def __init__(self) -> None:
        self._causes: defaultdict[str, list[str]] = defaultdict(list)

    def note(self, node: str, end: AgentEnd) -> None:
        """Take in that an agent of *node* ended before it was ready."""
        self._causes[node].append(_NUMBER.sub("#", end.cause) if end.is_its_own_doing else "")

    def forget(self, node: str) -> None:
        """Take in that an agent of *node* is ready."""
        self._causes.pop(node, None)

    def would_come_again(self, node: str) -> bool:
        """Return whether its last agents all ended in the same way, which was their own doing."""
        last = self._causes[node][-_MOST:]
        return len(last) == _MOST and last[0] != "" and len(set(last)) == 1
