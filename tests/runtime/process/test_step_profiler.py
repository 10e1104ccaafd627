"""A rank traces its next steps when it is asked to; what goes wrong with that is told, and training continues."""

from __future__ import annotations

import json
import mmap
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow import events
from elasticflow.observe.profile_trace import read_trace
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.messages import ProfileRequest
from elasticflow.protocol.worker_environment import HEARTBEAT, HELD, PROFILE
from elasticflow.run_folder import RunFolder
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process.step_log import Heartbeat
from elasticflow.runtime.process.step_profiler import StepProfiler
from elasticflow.system.shared_memory import memory_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEPS = 2


class Rank:
    """Rank 1 of a run, which trains in this process; the test is its agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.fd = memory_file("heartbeats")
        os.ftruncate(self.fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(self.fd, mmap.PAGESIZE)
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.went_on = 0
        self.heartbeat = Heartbeat(self.fd, 0)
        self.profiler = StepProfiler(self.heartbeat, self.folder, 1, "cpu", self._event, self._go_on)
        self.step = 0

    def ask(self, number: int, request: ProfileRequest | None) -> None:
        """Pass a request on; None: its file is gone."""
        if request is not None:
            path = self.folder.profile_request(number)
            path.parent.mkdir(parents=True)
            path.write_text(to_json(request))
        PROFILE.pack_into(self._memory, HEARTBEAT.size + HELD.size, number)

    def train(self, steps: int) -> None:
        """Train so many steps."""
        for _ in range(steps):
            with mark("forward"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            self.step += 1
            self.profiler.after_step(self.step)

    def names(self) -> list[str]:
        """Return the events so far."""
        return [name for name, _ in self.told]

    def _event(self, event: str, **fields: Any) -> None:
        self.told.append((event, fields))

    def _go_on(self) -> None:
        self.went_on += 1


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    """Yield a rank."""
    rank = Rank(tmp_path)
    yield rank
    rank.profiler.finish()
    os.close(rank.fd)


def test_asked_it_traces_the_next_steps_once(rank: Rank) -> None:
    """One warms up; then as many as were asked for, each with its parts; and no more, until it is asked again."""
    rank.train(2)
    rank.ask(1, ProfileRequest(STEPS, ranks=(1,)))
    rank.train(10)

    assert [events.PROFILE_STARTED, events.PROFILE_FINISHED] == rank.names()
    ended = rank.told[-1][1]
    # Asked after step 2, it hears of it at the end of step 3; step 4 warms up.
    assert (1, 5, 6) == (ended["profile"], ended["first_step"], ended["last_step"])
    trace = read_trace(rank.folder.trace(1, 1))
    assert STEPS == len(trace.steps_us)
    assert {"forward", "other"} == trace.parts.keys()
    [calls] = [each.calls for each in trace.operators if each.name == "aten::matmul"]
    assert (STEPS, 1) == (calls, rank.went_on)
    assert [1] == list(rank.folder.traces(1))
    assert ["rank1.json.gz", "request.json"] == sorted(
        path.name for path in (rank.folder.profiles / "1").iterdir()
    )

    rank.ask(2, ProfileRequest(1, ranks=(1,), shapes=True, memory=True, stacks=True))
    rank.train(3)
    assert events.PROFILE_FINISHED == rank.names()[-1]
    assert "[[8, 8], [8, 8]" in " ".join(
        each.shapes for each in read_trace(rank.folder.trace(2, 1)).operators
    )


def test_the_end_of_training_ends_a_trace_with_what_it_has(rank: Rank) -> None:
    """Some steps are better than none; a trace that only warmed up is none."""
    rank.ask(1, ProfileRequest(100, ranks=(1,)))
    rank.train(4)
    rank.profiler.finish()
    assert (3, 4) == (rank.told[-1][1]["first_step"], rank.told[-1][1]["last_step"])
    assert 2 <= len(read_trace(rank.folder.trace(1, 1)).steps_us) <= 3

    rank.ask(2, ProfileRequest(100, ranks=(1,)))
    rank.train(1)
    rank.profiler.finish()
    rank.profiler.finish()
    assert [events.PROFILE_STARTED, events.PROFILE_FAILED] == rank.names()[2:]
    assert {} == rank.folder.traces(2)


def test_what_goes_wrong_is_told_and_training_goes_on(rank: Rank) -> None:
    """A request that is gone, one that is none, a folder that cannot be written: told once each."""
    rank.ask(1, None)
    rank.train(3)
    (rank.folder.profiles / "2").mkdir(parents=True)
    rank.folder.profile_request(2).write_text(json.dumps({"steps": "many"}))
    rank.ask(2, None)
    rank.train(3)
    rank.ask(3, ProfileRequest(1, ranks=(1,)))
    rank.train(1)
    rank.folder.profile_request(3).unlink()
    (rank.folder.profiles / "3").rmdir()
    (rank.folder.profiles / "3").touch()
    rank.train(3)

    assert [events.PROFILE_FAILED] * 2 + [events.PROFILE_STARTED, events.PROFILE_FAILED] == rank.names()
    assert [1, 2, 3, 3] == [fields["profile"] for _, fields in rank.told]
    assert "FileNotFoundError" in rank.told[0][1]["reason"]
    assert "ProfileRequest.steps" in rank.told[1][1]["reason"]

    rank.ask(4, ProfileRequest(1, ranks=(1,)))
    rank.train(3)
    assert events.PROFILE_FINISHED == rank.names()[-1]
