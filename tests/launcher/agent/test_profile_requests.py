"""The agent passes requests for traces on to the ranks of its node that are meant, once each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from elasticflow.launcher.agent.profile_requests import ProfileRequests
from elasticflow.launcher.rendezvous.store_keys import request_key
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.messages import ProfileRequest, PublishedProfile
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path


class Keys(dict[str, bytes]):
    """A store that is asked for one key at a time."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all are there."""
        return all(key in self for key in keys)


class Slots:
    """What was written into the slots of local ranks."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def request_profile(self, local_rank: int, number: int) -> None:
        """Note it."""
        self.written.append((local_rank, number))


def test_ranks_of_this_node_hear_of_each_request_once(tmp_path: Path) -> None:
    """Local ranks of those that are meant; the request is written where the supervisor has another run folder."""
    keys, slots, folder = Keys(), Slots(), RunFolder(tmp_path / "run")
    requests = ProfileRequests(cast("Any", keys), folder, slots.request_profile)
    ranks = {0: 2, 1: 3}
    requests.look(1.0, 1, ranks)
    request = ProfileRequest(5, ranks=(0, 3))
    keys[request_key("profile", 1)] = to_json(PublishedProfile(4, request)).encode()
    requests.look(1.1, 1, ranks)
    assert [] == slots.written  # it looked just now
    requests.look(2.0, 1, ranks)
    requests.look(3.0, 1, ranks)
    assert [(1, 4)] == slots.written
    assert to_json(request) == folder.profile_request(4).read_text()

    requests.look(4.0, 2, ranks)  # another generation was asked for nothing
    keys[request_key("profile", 2)] = to_json(PublishedProfile(5, ProfileRequest(1, ranks=(2, 3)))).encode()
    requests.look(5.0, 2, ranks)
    assert [(1, 4), (0, 5), (1, 5)] == slots.written
