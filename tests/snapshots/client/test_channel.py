"""Messages and descriptors over a real socket between a worker and its node's writer."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from elasticflow.snapshots.client.channel import Channel
from elasticflow.snapshots.client.messages import TO_WORKER, TO_WRITER, Held, Recall

if TYPE_CHECKING:
    from pathlib import Path


def test_descriptors_of_a_message_come_with_it_however_many(tmp_path: Path) -> None:
    """The kernel takes 253 at a time; those of the next message are not among them."""
    worker, writer = socket.socketpair(socket.AF_UNIX)
    to_worker, to_writer = Channel(writer, TO_WORKER, TO_WRITER), Channel(worker, TO_WRITER, TO_WORKER)
    with (tmp_path / "first").open("wb") as first, (tmp_path / "second").open("wb") as second:
        to_worker.send(Held(None), (*[first.fileno()] * 299, second.fileno()))
        to_worker.send(Held(None), (first.fileno(),))
        assert Held(None) == to_writer.receive(60)
        received = [to_writer.descriptors.popleft() for _ in range(300)]
        same = [os.path.sameopenfile(descriptor, first.fileno()) for descriptor in received]
        for descriptor in received:
            os.close(descriptor)
        assert [*[True] * 299, False] == same
        assert Held(None) == to_writer.receive(60)
        assert 1 == len(to_writer.descriptors)
    to_writer.send(Recall())
    assert Recall() == to_worker.receive(60)
    for channel in (to_worker, to_writer):
        channel.close()
