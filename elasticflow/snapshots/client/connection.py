"""A worker's connection to its node's writer: the greeting, and messages with their handlers."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.client import channel as channels
from elasticflow.snapshots.client.messages import Hello, Refused

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from elasticflow.snapshots.client.channel import Channel
    from elasticflow.snapshots.client.messages import ToWorker, ToWriter

Answer = TypeVar("Answer")

_LOOK_S = 1.0
# A store may be slow; a writer that sends nothing for longer than this hangs.
_LONGEST_WRITE_S = 3600.0


class WriterConnection:
    """One rank's connection to its node's writer; used from one thread.

    Attributes:
        handlers: Called with a message, by its type; a message without a handler is ignored.
        waiting: Called every second while `receive_one` waits, for an hour at most.
    """

    def __init__(self, channel: Channel[ToWriter, ToWorker]) -> None:
        self._channel = channel
        self.handlers: dict[type[ToWorker], Callable[[Any], None]] = {}
        self.waiting: Callable[[], None] = lambda: None

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        rank: int,
        world_size: int,
        local_world_size: int,
        generation: int,
        timeout_s: float = 60.0,
    ) -> Self:
        """Return this rank's connection. Every rank.

        The writer answers once every snapshot of an earlier generation is committed or given up, so that
        `Catalog.newest()` is final after this call.

        Raises:
            SnapshotError: there is no writer, it did not answer in time, or it serves a later generation already.
        """
        try:
            channel = channels.connect(address, timeout_s)
            channel.send(Hello(rank, world_size, local_world_size, generation))
            answer = channel.receive(timeout_s)
        except TimeoutError:
            raise SnapshotError(f"the snapshot writer did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise SnapshotError(f"the snapshot writer cannot be reached: {error}") from None
        if answer is None or isinstance(answer, Refused):
            channel.close()
            raise SnapshotError(
                f"the snapshot writer refused: {'it ended' if answer is None else answer.reason}"
            )
        return cls(channel)

    @property
    def descriptors(self) -> deque[int]:
        """Descriptors that came with messages, oldest first; whoever takes a descriptor closes it."""
        return self._channel.descriptors

    def fileno(self) -> int:
        """Return the connection's descriptor, for select."""
        return self._channel.fileno()

    def close(self) -> None:
        """Leave."""
        self._channel.close()

    def send(self, message: ToWriter) -> None:
        """Send a message to the writer.

        Raises:
            SnapshotError: the writer died.
        """
        try:
            self._channel.send(message)
        except OSError as error:
            raise SnapshotError(f"the snapshot writer died: {error}") from None

    def receive_waiting(self) -> None:
        """Handle all messages that have arrived; never waits.

        Raises:
            SnapshotError: the writer died.
        """
        while True:
            try:
                message = self._channel.receive(0)
            except TimeoutError:
                return
            self._handle(message)

    def ask(
        self, request: ToWriter, *answers: type[Answer], complaint: str, limit_s: float | None = None
    ) -> Answer:
        """Send *request*; return the first message of the classes *answers*. Those before it are handled.

        Raises:
            SnapshotError: the writer died, or did not answer within *limit_s*; the text has *complaint*.
        """
        self.send(request)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not isinstance(message := self.receive_one(deadline, complaint), answers):
            pass
        return message

    def receive_one(self, deadline: float | None, complaint: str) -> ToWorker:
        """Wait for a message and handle it; return it.

        Args:
            deadline: Of `time.monotonic`; None waits for ever.
            complaint: What did not happen, if no message comes.

        Raises:
            SnapshotError: the writer died, or no message came in time.
        """
        began = time.monotonic()
        while True:
            left = math.inf if deadline is None else deadline - time.monotonic()
            try:
                return self._handle(self._channel.receive(min(max(left, 1e-3), _LOOK_S)))
            except TimeoutError:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise SnapshotError(f"snapshot writer: {complaint} in time") from None
                if now < began + _LONGEST_WRITE_S:
                    self.waiting()

    def _handle(self, message: ToWorker | None) -> ToWorker:
        if message is None:
            raise SnapshotError("the snapshot writer died")
        handler = self.handlers.get(type(message))
        if handler is not None:
            handler(message)
        return message
