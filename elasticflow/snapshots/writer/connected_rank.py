"""A rank that is connected to its node's writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.snapshots.client.channel import Channel
    from elasticflow.snapshots.client.messages import Hello, ToWorker, ToWriter
    from elasticflow.snapshots.memory import Buffer


@dataclass(eq=False)
class ConnectedRank:
    """A rank, as the writer sees it.

    Attributes:
        buffers: Staging buffers that the rank may write into, by number.
        is_busy: A message of the rank is being handled.
    """

    channel: Channel[ToWorker, ToWriter]
    hello: Hello
    buffers: dict[int, Buffer] = field(default_factory=dict)
    is_busy: bool = False

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.hello.rank

    @property
    def generation(self) -> int:
        """The rank's generation."""
        return self.hello.generation

    def send(self, message: ToWorker, descriptors: tuple[int, ...] = ()) -> None:
        """Send *message*; does nothing if the rank is gone, which its own thread notices."""
        try:
            self.channel.send(message, descriptors)
        except OSError:
            return
