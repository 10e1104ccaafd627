"""Requests for traces: taken from the run folder, told to the agents, and followed until all ranks have answered."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.protocol.json_codec import from_json
from elasticflow.protocol.messages import ProfileRequest, PublishedProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticflow.events import EventRecord
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.run_folder import RunFolder

_LOOK_S = 0.25


class Profiles:
    """The requests for traces of one launch, one after another."""

    def __init__(self, folder: RunFolder, journal: Journal) -> None:
        self._folder, self._journal = folder, journal
        # These files were requests to an earlier launch.
        self._taken = max(folder.profile_numbers(), default=0)
        self._looked = 0.0
        self._generation = 0
        self._number = 0
        # Ranks that have not answered yet.
        self._awaited: set[int] = set()

    def turn(self, now: float, publish: Callable[[PublishedProfile, int], None]) -> None:
        """Publish the next request, once the one before is answered and workers train; a few looks a second by the monotonic *now*."""
        if now < self._looked + _LOOK_S:
            return
        self._looked = now
        if self._awaited and self._generation != self._journal.generation:
            self.give_up("its generation ended")
        if self._awaited or not self._journal.state["workers"]:
            return
        number = next((each for each in self._folder.profile_numbers() if each > self._taken), None)
        if number is not None:
            self._taken = number
            self._take(number, publish)

    def heard(self, lines: Iterable[EventRecord]) -> None:
        """Take in that ranks have answered, if *lines* of workers say so."""
        for line in lines:
            is_answer = line["event"] in (events.PROFILE_FINISHED, events.PROFILE_FAILED)
            if is_answer and line["profile"] == self._number:
                self._awaited.discard(line["rank"])

    def give_up(self, reason: str) -> None:
        """Report the ranks that have not answered, if any: they will not answer any more."""
        for rank in sorted(self._awaited):
            self._journal.event(events.PROFILE_FAILED, profile=self._number, reason=reason, rank=rank)
        self._awaited = set()

    def _take(self, number: int, publish: Callable[[PublishedProfile, int], None]) -> None:
        path = self._folder.profile_request(number)
        try:
            request = from_json(ProfileRequest, json.loads(path.read_bytes()))
        except FileNotFoundError:
            return  # withdrawn
        except ValueError as error:
            self._journal.event(events.PROFILE_FAILED, profile=number, reason=f"{path}: {error}", rank=None)
            return
        here = {worker["rank"] for worker in self._journal.state["workers"]}
        self._number, self._generation = number, self._journal.generation
        self._journal.event(
            events.PROFILE_REQUESTED, profile=number, steps=request.steps, ranks=list(request.ranks)
        )
        self._awaited = set(request.ranks)
        if absent := self._awaited - here:
            self._awaited = absent
            self.give_up(f"the run has {len(here)} workers")
            self._awaited = set(request.ranks) & here
        if self._awaited:
            publish(PublishedProfile(number, request), self._generation)
