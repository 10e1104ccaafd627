"""Has nodes with run folders of their own send their logs, when a command asks for them and when the launch ends."""

from __future__ import annotations

import base64
import contextlib
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from elasticflow.launcher.rendezvous import requests
from elasticflow.protocol.messages import FilePiece, FilesSent, FilesWanted, NodeReady
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.launcher.supervisor.agent_channel import AgentChannel
    from elasticflow.protocol.messages import Message
    from elasticflow.run_folder import RunFolder

_LOOK_S = 0.25
_POLL_S = 0.01
# Seconds that nodes have to answer; those that are slower continue sending, and are not waited for.
PATIENCE_S = 8.0


class RemoteFiles:
    """Asks nodes for files, and writes what they send into the run folder *folder*; a file that fails costs itself alone."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        # Nodes with run folders of their own, and their hosts.
        self._hosts: dict[str, str] = {}
        self._next_look = -math.inf
        self._number = 0
        self._awaited: set[str] = set()
        self._deadline = -math.inf
        self._requests: list[Path] = []
        # Files that nodes have sent in earlier launches, and how much of those of this one is there.
        self._copies: set[str] | None = None
        self._taken: dict[str, int] = {}

    def hear(self, message: NodeReady | FilePiece | FilesSent) -> None:
        """Take in that a node is ready, a piece of a file, or that a node has sent all."""
        match message:
            case NodeReady():
                self._note_ready(message)
            case FilePiece():
                # A copy that cannot be written is missing; the run is not ended for it.
                with contextlib.suppress(OSError):
                    self._write(message, base64.b64decode(message.data))
            case FilesSent():
                if message.number == self._number:
                    self._awaited.discard(message.node)
            case _:
                assert_never(message)

    def _note_ready(self, ready: NodeReady) -> None:
        """Take in whether a node has a run folder of its own; what it was asked before, it does not know."""
        self._hosts.pop(ready.node, None)
        self._awaited.discard(ready.node)
        if ready.has_own_folder:
            self._hosts[ready.node] = ready.host

    def turn(self, channel: AgentChannel, now: float) -> None:
        """Ask nodes for what a command wants, a few times a second at most; end requests that were answered."""
        if self._requests and not self.are_awaited(channel, now):
            for path in self._requests:
                path.unlink(missing_ok=True)
            self._requests = []
        if now < self._next_look or self._requests:
            return
        self._next_look = now + _LOOK_S
        wanted = requests.requests_in(self._folder)
        if (first := next(iter(wanted.values()), None)) is not None:
            self.ask(channel, first, now)
            self._requests = [path for path, request in wanted.items() if request == first]

    def ask(self, channel: AgentChannel, wanted: FilesWanted, now: float) -> None:
        """Ask all nodes with run folders of their own for files."""
        self._awaited = self._hosts.keys() & channel.nodes
        self._deadline = now + PATIENCE_S
        if self._awaited:
            self._number += 1
            channel.want_files(replace(wanted, number=self._number))

    def are_awaited(self, channel: AgentChannel, now: float) -> bool:
        """Return whether a node that is there has not answered yet, and has time to."""
        return now <= self._deadline and not self._awaited.isdisjoint(channel.nodes)

    def gather_last(
        self,
        channel: AgentChannel,
        generation: int,
        hear: Callable[[Message], None],
        is_cut_short: Callable[[], bool],
    ) -> None:
        """Have nodes send logs of *generation*, and what hooks logged, before they exit; *hear* takes in all messages."""
        self.ask(channel, FilesWanted(generation, logged=True), time.monotonic())
        while self.are_awaited(channel, time.monotonic()) and not is_cut_short():
            for message in channel.take():
                hear(message)
            time.sleep(_POLL_S)

    def _write(self, piece: FilePiece, data: bytes) -> None:
        if not requests.may_be_sent(piece.path):
            return
        path = self._folder.path / piece.path
        if self._copies is None:
            self._copies = requests.copies_in(self._folder)
        if piece.path not in self._copies:
            if path.exists():
                return
            self._copies.add(piece.path)
            requests.note_copies(self._folder, self._copies)
            path.parent.mkdir(parents=True, exist_ok=True)
        there = self._taken.get(piece.path)
        if requests.is_image(piece.path):
            atomic_files.replace(path, (data,), sync=False)
        elif there is None or piece.is_anew:
            # Written in one act: a reader sees the old file or the new one.
            atomic_files.replace(path, (self._gap(piece, 0), data), sync=False)
        elif piece.offset + len(data) > there:
            with path.open("ab") as file:
                file.write(self._gap(piece, there) + data[max(0, there - piece.offset) :])
        self._taken[piece.path] = max(piece.offset + len(data), 0 if piece.is_anew else there or 0)

    def _gap(self, piece: FilePiece, there: int) -> bytes:
        """Return the line that tells of what is not here between *there* and the piece; empty: nothing is missing."""
        missing = piece.offset - there
        if missing <= 0:
            return b""
        host = self._hosts.get(piece.node, piece.node)
        begin = "\n" if there else ""
        return f"{begin}({missing:,} bytes are left out here: they are in this file on {host})\n".encode()
