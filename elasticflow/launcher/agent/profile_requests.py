"""Requests for traces, passed on from the supervisor to the workers of this node."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from elasticflow.launcher.rendezvous.store_keys import requested_profile
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.protocol.messages import PublishedProfile
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.run_folder import RunFolder

_LOOK_S = 0.25


class ProfileRequests:
    """Looks a few times a second whether the supervisor has asked for traces.

    Args:
        request: Has a local rank answer the request of a number.
    """

    def __init__(self, store: ControlStore, folder: RunFolder, request: Callable[[int, int], None]) -> None:
        self._store, self._folder, self._request = store, folder, request
        self._looked = 0.0
        self._passed_on = 0

    def look(self, now: float, generation: int, ranks: Mapping[int, int]) -> None:
        """Pass on a new request to those *ranks*, by local rank, that are meant; *now* is monotonic."""
        if now < self._looked + _LOOK_S:
            return
        self._looked = now
        if (text := requested_profile(self._store, generation)) is None:
            return
        published = from_json(PublishedProfile, json.loads(text))
        if published.number == self._passed_on:
            return
        self._passed_on = published.number
        path = self._folder.profile_request(published.number)
        if not path.exists():  # the supervisor has another run folder
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.replace(path, [to_json(published.request).encode()], sync=False)
        for local_rank, rank in ranks.items():
            if rank in published.request.ranks:
                self._request(local_rank, published.number)
