"""A rank that is connected to its node's writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.snapshots.client.channel import Channel
    from elasticflow.snapshots.client.messages import Hello, ToWorker, ToWriter
    from elasticflow.snapshots.memory.buffers import Buffer


@dataclass(eq=False)
class ConnectedRank:
    """One rank, as the writer sees it.

    Attributes:
        channel: Its connection.
        hello: How it greeted.
        buffers: Staging buffers that it may write into, by number.
        is_busy: A message of it is being handled.
    """

    channel: Channel[ToWriter]
    hello: Hello
    buffers: dict[int, Buffer] = field(default_factory=dict)
    is_busy: bool = False

    @property
    def rank(self) -> int:
        """Its number."""
        return self.hello.rank

    @property
    def generation(self) -> int:
        """The generation it belongs to."""
        return self.hello.generation

    def send(self, message: ToWorker, descriptors: tuple[int, ...] = ()) -> None:
        """Send it a message; nothing happens if it is gone: its own thread sees that too."""
        try:
            self.channel.send(message, descriptors)
        except OSError:
            return
