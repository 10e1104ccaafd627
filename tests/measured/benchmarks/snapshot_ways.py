"""Ways to save and load one and the same training state, behind one interface; see snapshot.py."""

# ruff: noqa: D102  # what a method does stands once, in `Way`

from __future__ import annotations

import mmap
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from elasticflow.runtime.data import index_schedule
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.snapshot import snapshots
from elasticflow.runtime.state.state import State
from elasticflow.snapshots.format.manifest import FILE_NAME
from elasticflow.snapshots.store.catalog import Catalog

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.runtime.process.context import Worker
    from elasticflow.snapshots.format.manifest import Manifest
    from tests.measured.benchmarks.snapshot_state import Trained

_POLL_S = 0.002
COMPARE_REPLICAS = "1000 steps"  # the default: also before each snapshot


class Way:
    """One way; every method is called by every rank, and `save`, `wait` and `load` are what is timed."""

    name: ClassVar[str]

    def before_save(self) -> None:
        """Do what a user could do once, before training."""

    def save(self, step: int) -> None:
        """Return when training may continue and change its tensors."""

    def wait(self) -> None:
        """Return when what was saved is on the disk."""

    def before_load(self) -> None:
        """Bring the optimizer into the state of a new process: without moments."""

    def load(self) -> None:
        """Load what was saved last into the live model and optimizer."""

    def settle(self) -> None:
        """Come to rest; remove what is not loaded any more."""

    def folder(self) -> Path | None:
        """Return where the files of the last save lie."""

    def close(self) -> None:
        """Leave nothing running."""


class Copy(Way):
    """As many bytes as this rank stages, copied in one piece into shared memory that is there: what cannot be beaten."""

    name = "copy"

    def __init__(self, nbytes: int) -> None:
        memory = mmap.mmap(-1, nbytes)
        self._target = torch.frombuffer(memory, dtype=torch.uint8)
        self._source = torch.zeros(nbytes, dtype=torch.uint8)
        self.save(0)

    def save(self, step: int) -> None:
        self._target.copy_(self._source)


class Ours(Way):
    """`Snapshots.after_step` and `restore`, as the generated train.py calls them."""

    name = "elasticflow"

    def __init__(self, me: Worker, trained: Trained, policy: SnapshotSettings) -> None:
        schedule = index_schedule.IndexSchedule(1 << 20, 64, steps=1 << 30, tail="spill", seed=1)
        state = State(model=trained.model, optimizer=trained.optimizer)
        self._me, self._trained, self._step = me, trained, 0
        self._catalog = Catalog.of_run(policy, me.run_folder, me.run_id)
        step: Any = SimpleNamespace(is_exact=False, was_skipped=False)
        data = OpenedDataset(None)
        self._snapshots = snapshots.Snapshots(me, state, step, schedule, data, policy, COMPARE_REPLICAS)
        self._snapshots.restore()

    def save(self, step: int) -> None:
        self._step = step
        self._snapshots.after_step(self._position())

    def _position(self) -> Position:
        return Position(self._step, 64 * self._step, 0, 64 * self._step, is_epoch_end=False)

    def wait(self) -> None:
        self._snapshots.after_step(
            self._position()
        )  # as after the next step: all ranks compare, and hand over
        if self._me.rank == 0:
            while not self._is_committed():
                time.sleep(_POLL_S)

    def before_load(self) -> None:
        self._trained.optimizer.state.clear()

    def load(self) -> None:
        self._snapshots.restore()

    def settle(self) -> None:
        self._snapshots.after_step(self._position())  # hears what became of it

    def folder(self) -> Path:
        return self._me.run_folder.path / self._catalog.folder(self._manifest().name)

    def nbytes(self) -> int:
        """Return the bytes this rank staged of the last snapshot."""
        mine = f"-{self._me.rank:05d}-of-"
        return sum(entry.size for name, entry in self._manifest().files.items() if mine in name)

    def _is_committed(self) -> bool:
        storage, folder = self._catalog.storage, self._catalog.folder()  # reading manifests would take a core
        names = [name for name in storage.list(folder) if name.startswith(f"{self._step:012d}-")]
        return any(storage.exists(f"{folder}/{name}/{FILE_NAME}") for name in names)

    def _manifest(self) -> Manifest:
        newest = self._catalog.newest()
        assert newest is not None
        return newest
