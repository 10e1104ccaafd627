"""Which nodes count as lost, when they are silent and when it is the store that cannot be reached."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from elasticflow.launcher.rendezvous.store_keys import INVITATION, OUTBOX_COUNT, beat_key, message_key
from elasticflow.launcher.supervisor import agent_channel
from elasticflow.launcher.supervisor.agent_channel import AgentChannel
from elasticflow.protocol.messages import MESSAGES, NodeReady

if TYPE_CHECKING:
    from elasticflow.protocol.control_store import ControlStore


class _Store:
    """A store with one node's messages; each answer to what has to be asked takes a while.

    Attributes:
        now: Of the clock.
        answer_s: How long an answer takes.
    """

    def __init__(self) -> None:
        self.now, self.answer_s = 1000.0, 0.0
        ready = MESSAGES.encode(NodeReady("b", "b", 1))
        self.values = {OUTBOX_COUNT: b"1", message_key(1, 1): ready.encode(), beat_key(1): b"0"}

    def check(self, keys: list[str]) -> bool:
        if keys == [INVITATION]:
            self.now += self.answer_s
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def changed(self, _: str) -> None:
        """Any key may have been given a value."""

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@pytest.fixture(name="store")
def _store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    store = _Store()
    monkeypatch.setattr(agent_channel, "time", SimpleNamespace(monotonic=lambda: store.now))
    return store


def _seconds_until_lost(store: _Store, channel: AgentChannel) -> float:
    began = store.now
    while not channel.silent_nodes():
        store.now += 0.05
        assert store.now < began + 60
    return store.now - began


def test_node_that_is_silent_is_lost(store: _Store) -> None:
    """While the store answers."""
    channel = AgentChannel(cast("ControlStore", store))
    channel.take()
    assert 2.5 < _seconds_until_lost(store, channel) < 3.5


def test_node_that_cannot_be_heard_is_not(store: _Store) -> None:
    """The store was away as long: nodes have as long again to be heard once it is back, and then are silent."""
    channel = AgentChannel(cast("ControlStore", store))
    channel.take()
    store.answer_s = 5.0
    while store.answer_s:
        assert not channel.silent_nodes()
        store.now += 0.05
        if store.now > 1000 + 2.5 + 5.0:
            store.answer_s = 0.0
    assert 5.0 + 2.5 + 2.5 - 0.5 < _seconds_until_lost(store, channel) < 5.0 + 2.5 + 2.5 + 1.0
