"""A node's cache is filled before its workers start and saved once they train; no failure of that matters to them."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.launcher.compiler_cache import transfer
from elasticflow.launcher.compiler_cache.keeper import VARIABLES, CompilerCacheKeeper
from elasticflow.protocol.worker_environment import COMPILER_CACHE
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.client.writer_process import WriterStart

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.events import EventRecord

pytestmark = pytest.mark.usefixtures("real_processes")


class Node:
    """A node of a run in a folder, with its keeper; workers are played."""

    def __init__(self, project: Path, name: str = "n0") -> None:
        self.keeper = CompilerCacheKeeper(
            RunFolder.of(project, "job", "run"), name, WriterStart(str(project / "store"), "run"), {}
        )
        assert self.keeper.folder is not None
        self.name, self.folder = name, self.keeper.folder
        self.told: list[EventRecord] = []
        self._now = 100.0

    def start(self, *, is_first: bool = True) -> None:
        """Begin as an agent does, and the next generation with it."""
        self.keeper.start_loading()
        self.keeper.begin(is_first=is_first)

    def compile(self, name: str = "ab/cab.so") -> None:
        """Have the workers make a library."""
        (self.folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder.path / name).write_bytes(b"\x7fELF" + name.encode())

    def train(self, *phases: str, until_told: bool = True) -> None:
        """Look while the workers are in *phases*."""
        deadline = time.monotonic() + 60
        told = len(self.told)
        while time.monotonic() < deadline:
            self._now += 10.0
            self.told += self.keeper.look(self._now, phases or ("step", "data"))
            if (until_told and len(self.told) > told) or (not until_told and not self.keeper.pids()):
                return
            time.sleep(0.02)

    @property
    def names(self) -> list[str]:
        """The files of the folder."""
        return sorted(self.folder.files())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Return a node whose workers have compiled and train."""
    found = Node(tmp_path)
    found.start()
    found.compile()
    found.train()
    yield found
    found.keeper.finish()


def _moved(told: EventRecord) -> tuple[str, int]:
    assert told["event"] == events.COMPILER_CACHE
    assert told["bytes"] > 0
    return told["action"], told["files"]


def test_a_cache_is_saved_once_and_loaded_by_a_new_node(node: Node, tmp_path: Path) -> None:
    """Before its workers start; afterwards there is nothing to save."""
    assert [("saved", 1)] == [_moved(told) for told in node.told]
    node.train(until_told=False)
    assert 1 == len(node.told)

    new = Node(tmp_path, "n1")
    new.start(is_first=False)
    assert node.names == new.names
    new.train()
    assert [("loaded", 1)] == [_moved(told) for told in new.told]
    new.train(until_told=False)
    assert 1 == len(new.told)


def test_what_is_compiled_later_is_saved_by_the_node_of_rank_0(node: Node, tmp_path: Path) -> None:
    """Others save only where there is nothing of their kind; each seals what it has."""
    other = Node(tmp_path, "n1")
    other.start(is_first=False)
    other.train()
    other.compile("cd/new.so")
    other.train("compile", until_told=False)
    other.train(until_told=False)
    assert [("loaded", 1)] == [_moved(told) for told in other.told]
    assert not other.folder.has_news()

    node.compile("cd/new.so")
    node.train("compile", until_told=False)
    assert 1 == len(node.told)
    node.train()
    assert [("saved", 1), ("saved", 2)] == [_moved(told) for told in node.told]


def test_a_killed_generation_leaves_nothing_half_written(node: Node) -> None:
    """What was sealed before stays."""
    node.compile("cd/half.so")
    node.keeper.begin(is_first=True)
    assert ["ab/cab.so"] == node.names


def _damage(store: Path) -> None:
    next(store.glob("compiler/*.zip")).write_bytes(b"damaged")


def _break(store: Path) -> None:
    next(store.glob("compiler/*.json")).write_text("{")


@pytest.mark.parametrize("harm", [_damage, _break])
def test_a_damaged_cache_is_one_warning_and_replaced(node: Node, tmp_path: Path, harm: object) -> None:
    """The node compiles, and saves that."""
    harm(tmp_path / "store")  # type: ignore[operator]
    new = Node(tmp_path, "n1")
    new.start(is_first=False)  # rank 0 may be on another kind of machine
    assert [] == new.names
    new.compile()
    new.train()
    new.train()
    failed, saved = new.told
    assert failed["event"] == events.COMPILER_CACHE_FAILED
    assert ("n1", "load") == (failed["node"], failed["action"])
    assert ("saved", 1) == _moved(saved)
    assert node.names == new.names


def test_a_store_that_takes_nothing_is_one_warning(tmp_path: Path) -> None:
    """The next launch tries again."""
    (tmp_path / "store").touch()
    node = Node(tmp_path)
    node.start()
    node.compile()
    node.train()
    node.train()
    node.train("compile", until_told=False)
    node.train(until_told=False)
    assert ["load", "save"] == [
        told["action"] for told in node.told if told["event"] == events.COMPILER_CACHE_FAILED
    ]
    assert node.folder.sealed() is not None
    assert node.folder.has_news()
    (tmp_path / "store").unlink()
    again = Node(tmp_path)
    again.start()
    again.train()
    assert [("saved", 1)] == [_moved(told) for told in again.told]


def test_a_large_cache_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is told once, for good."""
    monkeypatch.setattr(transfer, "MOST_BYTES", 3)
    node = Node(tmp_path)
    node.compile()
    asked = transfer.Transfer("save", 1, str(node.folder.path), "kind", {}, str(tmp_path / "store"), "", {})
    monkeypatch.setattr("os.nice", lambda _: 0)
    with pytest.raises(transfer.BadArchiveError, match="at most 0 MB are put beside the snapshots"):
        transfer.save(asked)
    assert not node.folder.has_news()


def test_a_large_cache_that_is_being_written_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at again; else what is half there would count as whole."""
    monkeypatch.setattr(transfer, "MOST_BYTES", 3)
    node = Node(tmp_path)
    node.compile()

    def is_being_written(_: object) -> bool:
        (node.folder.path / "ab/cab.so").touch()
        return False

    monkeypatch.setattr(type(node.folder), "is_being_written", is_being_written)
    monkeypatch.setattr("os.nice", lambda _: 0)
    asked = transfer.Transfer("save", 1, str(node.folder.path), "kind", {}, str(tmp_path / "store"), "", {})
    assert transfer.save(asked).outcome == "busy"
    assert node.folder.sealed() is None


def test_variables_have_torch_use_the_folder_unless_somebody_else_has(tmp_path: Path) -> None:
    """A user's own choice stays, and nothing is saved then."""
    run, writer = RunFolder.of(tmp_path, "job", "run"), WriterStart(str(tmp_path), "run")
    keeper = CompilerCacheKeeper(run, "n0", writer, {})
    assert keeper.folder is not None
    path = str(keeper.folder.path)
    assert {VARIABLES[0]: path, VARIABLES[1]: f"{path}/triton", COMPILER_CACHE: path} == keeper.variables()
    for name in VARIABLES:
        chosen = CompilerCacheKeeper(run, "n0", writer, {name: "/cache"})
        assert ({COMPILER_CACHE: ""}, []) == (chosen.variables(), chosen.finish())


def test_the_folder_that_torch_itself_has_named_is_nobodys_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch sets the variable when it compiles; a run that is started from that process inherits it."""
    cache_dir_utils = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # put back afterwards
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache_dir_utils.cache_dir()
    assert str(tmp_path) in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    run = RunFolder.of(tmp_path, "job", "run")
    keeper = CompilerCacheKeeper(run, "n0", WriterStart(str(tmp_path), "run"), os.environ)
    assert keeper.folder is not None


def test_a_folder_that_cannot_be_used_is_one_warning(tmp_path: Path) -> None:
    """Torch keeps its cache where it does by itself."""
    run = RunFolder.of(tmp_path / "my project", "job", "run")
    keeper = CompilerCacheKeeper(run, "n0", WriterStart(str(tmp_path), "run"), {})
    assert {COMPILER_CACHE: ""} == keeper.variables()
    keeper.start_loading()
    keeper.begin(is_first=True)
    (told,) = keeper.look(1.0, ["step"])
    assert told["event"] == events.COMPILER_CACHE_FAILED
    assert ("keep", True) == (told["action"], "with ' ' in its path" in told["reason"])
    assert [] == keeper.finish()
