"""Callbacks at the moments of a worker's life."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.runtime.process.position import Position


@dataclass
class Moments:
    """Callbacks by moment; each list is called in its order.

    Attributes:
        beginning: A run begins without a snapshot to restore (`begin`).
        first_step: The first step of this generation is done.
        evaluation: An evaluation is finished, with its position and metrics; every rank.
        snapshot: A snapshot is about to be taken, with its position and name; every rank.
        leave: The worker is about to exit, and its process group is still alive.
        finish: Training has ended at a position; after `leave`.
    """

    beginning: list[Callable[[], None]] = field(default_factory=list)
    first_step: list[Callable[[], None]] = field(default_factory=list)
    evaluation: list[Callable[[Position, Mapping[str, Any]], None]] = field(default_factory=list)
    snapshot: list[Callable[[Position, str], None]] = field(default_factory=list)
    leave: list[Callable[[], None]] = field(default_factory=list)
    finish: list[Callable[[Position], None]] = field(default_factory=list)

    def begin(self) -> None:
        """Run the actions of `beginning`, once: before loader processes read the data, else after the first step.

        A forked loader process shares the positions of open files with its parent, so the two must not read at once.
        """
        actions, self.beginning = self.beginning, []
        for action in actions:
            action()
