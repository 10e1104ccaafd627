"""The supervisor's side of the launch's store: hears agents, publishes rounds. Keys: `keys.py`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from elasticflow.launcher.rendezvous.rounds import Round
from elasticflow.launcher.rendezvous.store_keys import (
    EXIT_CODE,
    FEEDS,
    INVITATION,
    NOTICED,
    ROUNDS,
    beat_key,
    feed_key,
    gone_key,
    request_key,
    round_key,
)

if TYPE_CHECKING:
    from elasticflow.launcher.rendezvous.invitation import Invitation
    from elasticflow.protocol.control_store import ControlStore

# An agent tells that it lives ten times in this; a loaded machine may keep it from doing so for a while.
SILENT_S = 2.5
_LOOK_S = 0.25
_NOTICE_POLL_S = 0.02


class AgentChannel:
    """Hears and directs the agents of a launch through *store*."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self._taken: list[int] = []  # messages taken so far, by feed
        self._feeds: dict[str, int] = {}  # the feed of each node that has joined
        self._beats: dict[str, tuple[bytes, float]] = {}  # what each node said last, and when it was new
        self._looked = 0.0
        self._count = 0

    def take(self) -> list[dict[str, Any]]:
        """Return the messages that agents have sent since the last call, and forget them."""
        messages = []
        if self._store.check([FEEDS]):
            self._taken += [0] * (int(self._store.get(FEEDS)) - len(self._taken))
        for index in range(len(self._taken)):
            while self._store.check([key := feed_key(index + 1, self._taken[index] + 1)]):
                message = json.loads(self._store.get(key))
                if message.get("type") == "node":
                    self._feeds[message["node"]] = index + 1
                    self._beats.pop(message["node"], None)
                messages.append(message)
                self._store.delete_key(key)
                self._taken[index] += 1
        return messages

    def silent(self) -> list[str]:
        """Return the nodes that have given no sign of life for `SILENT_S`; looks a few times a second."""
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return []
        # A pause of this process, of a laptop that slept for instance, is no silence of theirs.
        paused, self._looked = now - self._looked > SILENT_S / 2, now
        found = []
        for node, feed in self._feeds.items():
            key = beat_key(feed)
            beat = self._store.get(key) if self._store.check([key]) else b""
            last = self._beats.get(node)
            if last is None or beat != last[0] or paused:
                self._beats[node] = (beat, now)
            elif now - last[1] >= SILENT_S:
                found.append(node)
        return found

    def form(self, generation: int, nodes: tuple[tuple[str, int], ...], failed_at: float | None) -> None:
        """Have *nodes*, each with its number of workers, form *generation*."""
        self._publish(Round(generation=generation, nodes=nodes, failed_at=failed_at))

    def invite(self, invitation: Invitation) -> None:
        """Tell other machines what they need to take part."""
        self._store.set(INVITATION, invitation.to_json())

    def stop(self, exit_code: int = 0) -> None:
        """Have every agent leave, and machines that joined with *exit_code*."""
        self._store.set(EXIT_CODE, str(exit_code))
        self._publish(Round(stop=True))

    def await_notice(self, nodes: set[str], patience_s: float) -> None:
        """Return once all machines but *nodes* have read the exit code, or after *patience_s*: the store goes then."""
        deadline = time.monotonic() + patience_s
        others = len(self._feeds.keys() - nodes)
        while self._store.add(NOTICED, 0) < others and time.monotonic() < deadline:
            time.sleep(_NOTICE_POLL_S)

    def request(self, what: str, generation: int) -> None:
        """Ask the workers of *generation* to `drain`, or have them killed (`stop`)."""
        self._store.set(request_key(what, generation), "1")

    def release(self, node: str) -> None:
        """Have the agent of *node* leave; it is not listened for any more."""
        feed = self._feeds.pop(node, None)
        self._beats.pop(node, None)
        if feed is not None:
            self._store.set(gone_key(feed), "1")

    def _publish(self, round_: Round) -> None:
        self._count += 1
        self._store.set(round_key(self._count), json.dumps(asdict(round_)))
        self._store.set(ROUNDS, str(self._count))
