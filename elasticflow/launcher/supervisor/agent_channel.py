"""The supervisor's side of the launch's control store: it hears agents and publishes orders.

The agents' side is `launcher/rendezvous/supervisor_channel.py`; the keys are described in `rendezvous/store_keys.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elasticflow.launcher.rendezvous.liveness import Silence
from elasticflow.launcher.rendezvous.store_keys import (
    CANCELLED,
    CHECK_WANTED,
    EXIT_CODE,
    FEED,
    FILES_WANTED,
    INVITATION,
    NOTICED,
    ORDER_COUNT,
    OUTBOX_COUNT,
    beat_key,
    block_of,
    blocks_of,
    message_key,
    order_key,
    outbox_of,
    parts_key,
    release_key,
    request_key,
)
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.messages import (
    MESSAGES,
    ORDERS,
    EndLaunch,
    GenerationFormed,
    NodePart,
    NodeParts,
    NodeReady,
)
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from elasticflow.launcher.rendezvous.invitation import Invitation
    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.protocol.messages import (
        FilesWanted,
        GenerationRequest,
        Message,
        Order,
        PublishedProfile,
    )

# An agent tells that it lives ten times in this; a loaded machine may keep it from doing so for a while.
SILENT_S = 2.5
_LOOK_S = 0.25
_LONGEST_GRACE_S = 10.0
_NOTICE_POLL_S = 0.02


class AgentChannel:
    """Hears and directs the agents of a launch through *store*."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        # Messages taken so far, by outbox.
        self._taken: dict[int, int] = {}
        # The outbox of each node that has joined.
        self._outboxes: dict[str, int] = {}
        self._silences: dict[str, Silence] = {}
        self._looked = 0.0
        self._order_count = 0
        # Number of each order that has formed a generation and of which parts are in the store, with its blocks.
        self._parts: dict[int, int] = {}

    def take(self) -> list[Message]:
        """Return the messages that agents have sent since the last call, and forget them."""
        messages = []
        for outbox in self._outboxes_with_news():
            taken = self._taken.get(outbox, 0)
            while self._store.check([key := message_key(outbox, taken + 1)]):
                message = MESSAGES.decode(self._store.get(key))
                if isinstance(message, NodeReady):
                    self._outboxes[message.node] = outbox
                    self._silences.pop(message.node, None)
                messages.append(message)
                self._store.delete_key(key)
                taken += 1
                self._taken[outbox] = taken
        return messages

    def _outboxes_with_news(self) -> Iterable[int]:
        """Return the outboxes that may hold messages: this is asked a hundred times a second, and most hold none."""
        if (changed := self._store.changed(FEED)) is not None:
            return sorted({outbox_of(key) for key in changed})
        return range(1, 1 + int(self._store.get(OUTBOX_COUNT) if self._store.check([OUTBOX_COUNT]) else 0))

    def silent_nodes(self) -> list[str]:
        """Look for signs of life, a few times a second at most; return the nodes that have given none for `SILENT_S`."""
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return []
        self._looked = now
        silent = []
        for node, outbox in self._outboxes.items():
            key = beat_key(outbox)
            silence = self._silences.setdefault(node, Silence(SILENT_S, now))
            silence.look(self._store.get(key) if self._store.check([key]) else None, now)
            if silence.is_too_long(now):
                silent.append(node)
        return [] if silent and self._store_was_away() else silent

    def _store_was_away(self) -> bool:
        """Return whether the store itself could not be reached for a while, once it can: nodes could not be heard, then.

        They have as long again to be heard: TCP's pauses between two tries grow with the time that an address does not answer.
        """
        began = time.monotonic()
        # No key of which this process has a copy: the store has to answer.
        self._store.check([INVITATION])
        now = time.monotonic()
        if now - began < _LOOK_S:
            return False
        self._silences.clear()
        self._looked = now + min(now - began + SILENT_S, _LONGEST_GRACE_S)
        return True

    def form(self, generation: int, nodes: tuple[tuple[str, int], ...], failed_at: float | None) -> None:
        """Have *nodes*, each with its number of workers, form *generation*."""
        blocks = blocks_of(len(nodes))
        parts: list[dict[str, NodePart]] = [{} for _ in range(blocks)]
        world_size = 0
        for group_rank, (node, nproc) in enumerate(nodes):
            parts[block_of(node, blocks)][node] = NodePart(group_rank, world_size, nproc)
            world_size += nproc
        number = self._order_count + 1
        for block, own in enumerate(parts):
            self._store.set(parts_key(number, block), to_json(NodeParts(own)))
        self._forget_parts()
        self._parts[number] = blocks
        failed_s = None if failed_at is None else time.monotonic() - failed_at
        self._publish(GenerationFormed(generation, len(nodes), world_size, blocks, failed_s))

    def _forget_parts(self) -> None:
        """Remove the parts of generations that are over, but for the last one, which a late agent may be reading of."""
        for number in list(self._parts)[:-1]:
            for block in range(self._parts.pop(number)):
                self._store.delete_key(parts_key(number, block))

    def invite(self, invitation: Invitation) -> None:
        """Tell other machines what they need to take part."""
        self._store.set(INVITATION, to_json(invitation))

    def stop(self, exit_code: int = 0, *, is_cancelled: bool = False) -> None:
        """Have every agent exit, and joined machines exit with *exit_code*; with *is_cancelled* no machine leads the run anew."""
        if is_cancelled:
            self._store.set(CANCELLED, "1")
        self._store.set(EXIT_CODE, str(exit_code))
        self._publish(EndLaunch())

    def await_notice(self, nodes: set[str], patience_s: float) -> None:
        """Return once all machines but *nodes* have read the exit code, or after *patience_s*: the store goes then."""
        others = len(self._outboxes.keys() - nodes)
        for _ in attempts(patience_s, _NOTICE_POLL_S):
            if self._store.add(NOTICED, 0) >= others:
                return

    def request(self, what: GenerationRequest, generation: int) -> None:
        """Send request *what* to the agents about the workers of *generation*."""
        self._store.set(request_key(what, generation), "1")

    def request_profile(self, request: PublishedProfile, generation: int) -> None:
        """Have workers of *generation* trace their next steps; a request that is published later takes its place."""
        self._store.set(request_key("profile", generation), to_json(request))

    def check_devices(self, nodes: Sequence[str], generation: int) -> None:
        """Have the agents of *nodes* check their devices, now that the workers of *generation* are gone."""
        self._store.set(CHECK_WANTED, " ".join((str(generation), *nodes)))

    @property
    def nodes(self) -> set[str]:
        """The nodes that have joined and were not let go."""
        return set(self._outboxes)

    def want_files(self, wanted: FilesWanted) -> None:
        """Have nodes with run folders of their own send files."""
        self._store.set(FILES_WANTED, to_json(wanted))

    def release(self, node: str) -> None:
        """Have the agent of *node* exit, and ignore the node from then on."""
        outbox = self._outboxes.pop(node, None)
        self._silences.pop(node, None)
        if outbox is not None:
            self._store.set(release_key(outbox), "1")

    def _publish(self, order: Order) -> None:
        self._order_count += 1
        self._store.set(order_key(self._order_count), ORDERS.encode(order))
        self._store.set(ORDER_COUNT, str(self._order_count))
