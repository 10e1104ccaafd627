"""When standbys are made, and when not."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.launcher.agent import standby_keeper
from elasticflow.launcher.agent.standby_keeper import StandbyKeeper
from elasticflow.launcher.fork_server.protocol import Ready, StandbyEnded, StandbyReady
from elasticflow.protocol.messages import report
from elasticflow.protocol.run_files import Preparation, read_preparation, write_preparation

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.events import EventRecord


@dataclass
class Server:
    """A fork server that notes what it is asked for."""

    ready: Ready
    standbys: dict[int, StandbyReady] = field(default_factory=dict)
    ended_standbys: list[StandbyEnded] = field(default_factory=list)
    asked: list[tuple[int, Preparation]] = field(default_factory=list)

    def wait_ready(self) -> Ready:
        """Return what was given."""
        return self.ready

    def prepare(
        self,
        local_rank: int,
        workers: int,
        preparation: Preparation,
        heartbeats: int,
    ) -> None:
        """Note the request."""
        self.asked.append((local_rank, preparation))

    def ready_now(self, memory: int = 10**6, without_device: str = "") -> None:
        """All that were asked for are ready, the last one perhaps without its device."""
        for local_rank, _ in self.asked:
            reason = without_device if local_rank == self.asked[-1][0] else ""
            self.standbys[local_rank] = StandbyReady(local_rank, 100 + local_rank, 1.5, memory, reason)


@dataclass
class Node:
    """A keeper with two workers, and what is around it."""

    server: Server
    folder: Path
    warm: str = "auto"
    phases: list[str] = field(default_factory=lambda: ["step", "data"])
    posted: list[Any] = field(default_factory=list)
    now: float = 10.0

    def __post_init__(self) -> None:
        heartbeats = SimpleNamespace(
            fd=7, progress=lambda: [SimpleNamespace(phase=phase) for phase in self.phases]
        )
        self.keeper = StandbyKeeper(
            self.warm,  # type: ignore[arg-type]
            self.server,  # type: ignore[arg-type]
            heartbeats,  # type: ignore[arg-type]
            2,
            self.folder / "imports.json",
            "n0",
            self.posted.append,
        )
        self.keeper.begin()

    def look(self) -> None:
        """Let a second pass, and look."""
        self.now += 1.0
        self.keeper.look(self.now)

    @property
    def ranks_asked(self) -> list[int]:
        """Local ranks for which a standby was asked for."""
        return [rank for rank, _ in self.server.asked]


APART = Ready((), shares_imports=False)
SHARED = Ready((), shares_imports=True)
GPU = Ready((), shares_imports=True, has_gpu=True)


def _ready(without_device: str = "") -> EventRecord:
    """Return what is reported of two standbys."""
    return report(
        events.STANDBYS_READY,
        node="n0",
        pids=(100, 101),
        seconds=1.5,
        memory=2 * 10**6,
        without_device=without_device,
    )


@pytest.mark.parametrize(
    ("warm", "ready", "expected"),
    [
        ("auto", SHARED, []),
        ("auto", APART, [0, 1]),
        ("auto", GPU, [0, 1]),
        ("fork", APART, []),
        ("fork", GPU, []),
        ("standby", SHARED, [0, 1]),
        ("off", APART, []),
    ],
)
def test_who_gets_standbys(tmp_path: Path, warm: str, ready: Ready, expected: list[int]) -> None:
    """`auto`: where a fork would leave imports or the accelerator to the worker."""
    node = Node(Server(ready), tmp_path, warm)
    node.look()
    assert expected == node.ranks_asked


@pytest.mark.parametrize("phase", ["start", "build", "restore", "compile", "snapshot", "leave"])
def test_none_is_begun_before_the_first_step_nor_during_a_snapshot(tmp_path: Path, phase: str) -> None:
    """The workers have the machine to themselves then."""
    node = Node(Server(APART), tmp_path, phases=["step", phase])
    node.look()
    assert [] == node.ranks_asked
    node.phases = ["step", "step"]
    node.look()
    assert [0, 1] == node.ranks_asked


def test_each_is_asked_for_once_and_all_are_told_once(tmp_path: Path) -> None:
    """With what the last workers had imported; a new generation gets new ones."""
    write_preparation(tmp_path / "imports.json", {}, "cuda")
    node = Node(Server(APART), tmp_path)
    for _ in range(3):
        node.look()
    assert [(rank, read_preparation(tmp_path / "imports.json")) for rank in (0, 1)] == node.server.asked
    assert "json" in node.server.asked[0][1].modules
    node.server.ready_now()
    node.look()
    node.look()
    assert [_ready()] == node.posted

    node.server.standbys.clear()
    node.keeper.begin()
    node.look()
    assert [0, 1, 0, 1] == node.ranks_asked


def test_one_that_dies_is_replaced_until_it_is_hopeless(tmp_path: Path) -> None:
    """Three deaths in one generation: workers are restarted without from then on, and the reason is told."""
    node = Node(Server(APART), tmp_path)
    for _ in range(2):
        node.keeper.begin()
        node.server.asked.clear()
        node.look()
        for deaths in (1, 2):
            node.server.ended_standbys.append(StandbyEnded(1, -signal.SIGKILL))
            node.look()
            assert [0, 1] + [1] * deaths == node.ranks_asked
    assert [] == node.posted
    node.server.ended_standbys.append(StandbyEnded(1, -signal.SIGKILL))
    node.look()
    assert [
        report(
            events.STANDBYS_OFF,
            node="n0",
            reason="3 ended before they were needed, the last killed by SIGKILL",
        )
    ] == node.posted
    node.keeper.begin()
    node.look()
    assert 4 == len(node.ranks_asked)


def test_without_memory_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at before any is made: standbys must not be what a run dies of."""
    monkeypatch.setattr(standby_keeper, "available", lambda: 1_500_000_000)
    node = Node(Server(APART), tmp_path)
    node.look()
    node.look()
    assert [] == node.ranks_asked
    reason = "they may take 1000 MB, and 1500 MB of memory are free"
    assert [report(events.STANDBYS_OFF, node="n0", reason=reason)] == node.posted


def test_damaged_record_of_imports_is_none(tmp_path: Path) -> None:
    """Standbys do less beforehand then; nothing fails. A record without variables says nothing about them."""
    path = tmp_path / "imports.json"
    assert Preparation([]) == read_preparation(path)
    for content in (b"", b"[1]", b'{"modules": 3}', b'{"modules": [1]}', b"\xff"):
        path.write_bytes(content)
        assert Preparation([]) == read_preparation(path)
    for variables in (b"", b', "variables": 3', b', "variables": {"CUBLAS_A": 3}'):
        path.write_bytes(b'{"modules": ["a"]' + variables + b"}")
        assert Preparation(["a"]) == read_preparation(path)


def test_variables_and_device_of_the_last_workers_are_recorded(tmp_path: Path) -> None:
    """They decide what a standby may begin ahead of its worker."""
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    write_preparation(tmp_path / "imports.json", variables, "cuda")
    preparation = read_preparation(tmp_path / "imports.json")
    assert (variables, "cuda") == (preparation.variables, preparation.device)


def test_a_standby_without_its_device_is_a_standby_and_told_of_once(tmp_path: Path) -> None:
    """A GPU may allow one process; what the standby has imported saves time all the same."""
    node = Node(Server(GPU), tmp_path)
    node.look()
    node.server.ready_now(without_device="900 MiB of its memory are free")
    node.look()
    node.look()
    expected = _ready("900 MiB of its memory are free")
    assert [expected] == node.posted
