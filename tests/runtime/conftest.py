"""Worker groups as real processes, without an agent: each rank is told its place as torchrun tells it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import _random as random_of_dtensor

from elasticflow.run_folder import RunFolder
from elasticflow.runtime.process import stopping
from elasticflow.runtime.process.context import Moments
from elasticflow.runtime.process.random_streams import Generators
from elasticflow.runtime.process.shard_layout import ShardLayout
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.runtime.process.votes import Vote
from elasticflow.runtime.snapshot import restore
from elasticflow.snapshots.read import load
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.forked import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.events import Event
    from tests.forked import ForkedPrograms, Program

PROGRAM = Path(__file__).parent / "programs" / "train_small.py"
LIMIT_S = 300.0  # a guard alone


@dataclass(frozen=True)
class Ended:
    """A worker group that ended: exit code, standard error and standard output by rank."""

    codes: list[int]
    errors: list[str]
    outputs: list[str]


class Group:
    """Starts worker groups of one run and reads what they left.

    Attributes:
        environment: What workers are told besides their place.
    """

    def __init__(self, folder: Path, forked: ForkedPrograms, program: Path = PROGRAM) -> None:
        self.folder = RunFolder(folder)
        self._forked = forked
        self._program = program
        self.environment: dict[str, str] = {}
        self._ranks: list[Program] = []

    def run(self, world_size: int, *arguments: str, ends: bool = True) -> Ended:
        """Run a group to its end; with ends=False, the ranks left after the first death are killed."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = [self._start(rank, world_size, port, arguments) for rank in range(world_size)]
        deadline = time.monotonic() + LIMIT_S
        while any(rank.poll() is None for rank in self._ranks):
            if time.monotonic() > deadline or (
                not ends and any(rank.poll() not in (None, 0) for rank in self._ranks)
            ):
                time.sleep(0.5)
                self.kill()
                break
            time.sleep(0.02)
        codes = [rank.wait(60) for rank in self._ranks]
        errors = [rank.stderr.read_text() for rank in self._ranks]
        sys.stdout.writelines(errors)  # pytest shows it when the test fails
        return Ended(codes, errors, [rank.stdout.read_text() for rank in self._ranks])

    def kill(self) -> None:
        """End what this group started."""
        for rank in self._ranks:
            rank.kill()

    def lines(self, event: str, generation: int = 1, rank: int = 0) -> list[dict[str, Any]]:
        """Return the lines of that event in a rank's log."""
        log = self.folder.rank_log(generation, rank)
        records = [json.loads(line) for line in log.read_text().splitlines()]
        return [record for record in records if record["event"] == event]

    @property
    def catalog(self) -> Catalog:
        """The run's snapshots."""
        return Catalog(Storage(str(self.folder.path)))

    def newest(self) -> restore.SnapshotContent:
        """Return the newest snapshot, verified."""
        manifest = self.catalog.newest()
        assert manifest is not None
        return restore.SnapshotContent.of(load.load(self.catalog, manifest.name))

    def _start(self, rank: int, world_size: int, port: int, arguments: tuple[str, ...]) -> Program:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "ELASTICFLOW_RUN_FOLDER": str(self.folder.path),
            "ELASTICFLOW_RUN_ID": "test",
            **self.environment,
        }
        return self._forked.start(self._program, *arguments, environment=environment)


@pytest.fixture
def groups(tmp_path: Path, forked: ForkedPrograms) -> Iterator[Any]:
    """Return what makes a group whose run lies in a folder of that name."""
    made: list[Group] = []

    def make(name: str, program: str = PROGRAM.name) -> Group:
        made.append(Group(tmp_path / name, forked, PROGRAM.with_name(program)))
        return made[-1]

    yield make
    for group in made:
        group.kill()


@pytest.fixture
def alone() -> Iterator[Any]:
    """Be the only rank of a group; yield the group. What refuses draws is gone afterwards."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()
    place: Any = random_of_dtensor
    place._rng_tracker = None


class StandIn(SimpleNamespace):
    """A stand-in for a worker that has a whole model."""

    @property
    def layout(self) -> ShardLayout:
        """The place of its rank among the ranks."""
        is_offloaded = self.sharding is not None and self.sharding.offload is not None
        return ShardLayout(self.world_size, self.rank, is_offloaded=is_offloaded)


@pytest.fixture
def me() -> Any:
    """Return a stand-in for the worker of a plain process; `events` holds what it logged, `told` what it told the console."""
    events: list[dict[str, Any]] = []

    def event(event: Event, **fields: Any) -> None:
        level = {} if event.level == "info" else {"level": event.level}
        events.append({"event": event, **level, **fields})

    def event_once(event_: Event, **fields: Any) -> None:
        if (event_, fields.get("name")) not in stand_in.logged_once:
            stand_in.logged_once.add((event_, fields.get("name")))
            event(event_, **fields)

    def agree_to_stop() -> None:
        stand_in.stopped = stopping.decide(stand_in.gather_text(stopping.ballot(vote)))

    noted: dict[str, Any] = {}
    told: list[str] = []

    def note_step(count: float, scalars: dict[str, float]) -> None:
        noted.update(count=count, scalars=scalars)

    nothing = SimpleNamespace(
        beat=lambda: None, phase=lambda _: "step", go_on=lambda: None, flush=lambda: None,
        note_step=note_step, note_grad_norm=lambda norm: noted.update(grad_norm=norm), noted=noted,
    )  # fmt: skip
    generators = Generators(11, torch.device("cpu"))
    generators.rest()
    vote = Vote()
    vote.when("random", generators.look)
    stand_in = StandIn(
        rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"), wanted_device="auto", seed=11, vote=vote, scalar_names=[],
        started_at=None, events=events, logged_once=set(),
        event=event, event_once=event_once, gather_text=lambda text: [text], reseed=lambda: None, barrier=lambda: None,
        all_true=lambda mine: mine, should_leave=False,
        phase=lambda _: None, heartbeat=nothing, progress=nothing,
        generators=generators, stoppable=stopping.Stoppable(vote), stopped=None, agree_to_stop=agree_to_stop,
        leave_if_asked=lambda: None, leaves_untrained=False, share_request=lambda: None,
        moments=Moments(), listen=lambda: None, tell=told.append, told=told, generation=1, dataset=None, is_exact=False,
        sharding=None,
    )  # fmt: skip
    return stand_in
