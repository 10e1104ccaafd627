"""Requests for traces: taken one after another, given up with the generation, refused where they cannot be met."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.supervisor.profiles import Profiles
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.messages import ProfileRequest, PublishedProfile
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

WORKERS = [{"rank": rank, "pid": 10 + rank, "node": "n0"} for rank in range(2)]


class Launch:
    """A launch whose supervisor turns when the test says so."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.records: list[dict[str, Any]] = []
        self.journal = Journal(folder, 1, self.records.append)
        self.profiles = Profiles(folder, self.journal)
        self.published: list[tuple[int, int]] = []
        self.now = 0.0

    def train(self, generation: int) -> None:
        """Have *generation* train."""
        self.journal.generation = generation
        self.journal.update(workers=WORKERS)

    def ask(self, number: int, *ranks: int) -> None:
        """Put a request into the run folder."""
        path = self.folder.profile_request(number)
        path.parent.mkdir(parents=True)
        path.write_text(to_json(ProfileRequest(3, ranks)))

    def turn(self) -> None:
        """Let a second pass."""
        self.now += 1.0
        self.profiles.turn(self.now, self._publish)

    def answer(self, number: int, rank: int) -> None:
        """Have a rank write its trace."""
        self.profiles.heard([{"event": "profile.finished", "profile": number, "rank": rank}])

    def told(self) -> list[tuple[Any, ...]]:
        """Return the events about traces."""
        return [
            (record["event"].removeprefix("profile."), record["profile"], record.get("rank"))
            for record in self.records
            if record["event"].startswith("profile.")
        ]

    def _publish(self, request: PublishedProfile, generation: int) -> None:
        self.published.append((request.number, generation))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run's folder."""
    path = tmp_path / "runs" / "job" / "run"
    path.mkdir(parents=True)
    return RunFolder(path)


def test_one_after_another_once_workers_train(folder: RunFolder) -> None:
    """Those of an earlier launch are left alone; the next one waits until all ranks have answered."""
    before = Launch(folder)
    before.ask(1, 0)
    launch = Launch(folder)
    launch.ask(2, 0, 1)
    launch.ask(3, 1)
    launch.turn()
    assert [] == launch.published
    launch.train(4)
    launch.turn()
    launch.answer(2, 1)
    launch.turn()
    assert [(2, 4)] == launch.published
    launch.answer(2, 0)
    launch.turn()
    launch.turn()

    assert [(2, 4), (3, 4)] == launch.published
    assert [("requested", 2, None), ("requested", 3, None)] == launch.told()


def test_the_end_of_its_generation_ends_a_request(folder: RunFolder) -> None:
    """Of the ranks that have not answered; the next request goes to the next generation."""
    launch = Launch(folder)
    launch.train(1)
    launch.ask(1, 0, 1)
    launch.turn()
    launch.answer(1, 0)
    launch.ask(2, 0)
    launch.train(2)
    launch.turn()
    assert [("requested", 1, None), ("failed", 1, 1), ("requested", 2, None)] == launch.told()
    assert [(1, 1), (2, 2)] == launch.published
    launch.profiles.give_up("the launch ended")
    launch.profiles.give_up("the launch ended")
    assert ("failed", 2, 0) == launch.told()[-1]
    assert 4 == len(launch.told())


def test_ranks_that_are_not_there_are_told(folder: RunFolder) -> None:
    """The others are asked."""
    launch = Launch(folder)
    launch.train(1)
    launch.ask(1, 1, 5)
    launch.turn()
    assert [("requested", 1, None), ("failed", 1, 5)] == launch.told()
    launch.ask(2, 7)
    launch.answer(1, 1)
    launch.turn()
    assert [(1, 1)] == launch.published
    assert ("failed", 2, 7) == launch.told()[-1]


def test_a_withdrawn_request_is_none_and_a_wrong_one_is_told(folder: RunFolder) -> None:
    """Neither holds up the next one."""
    launch = Launch(folder)
    launch.train(1)
    folder.profile_request(1).parent.mkdir(parents=True)
    launch.ask(2, 0)
    folder.profile_request(2).write_text("{")
    launch.ask(3, 0)
    launch.turn()
    launch.turn()
    assert [("failed", 2, None), ("requested", 3, None)] == launch.told()
