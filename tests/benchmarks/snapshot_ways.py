"""Ways to save and load one and the same training state, behind one interface; see snapshot.py."""

# ruff: noqa: D102  # what a method does stands once, in `Way`

from __future__ import annotations

import mmap
import os
import shutil
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from elasticflow.runtime import order, snapshot
from elasticflow.runtime.state import State

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.runtime.member import Worker
    from elasticflow.snapshots.manifest import Manifest
    from tests.benchmarks.snapshot_state import Trained

_POLL_S = 0.002


class Way:
    """One way; every method is called by every rank, and `save` and `load` are what is timed."""

    name: ClassVar[str]

    def save(self, step: int) -> None:
        """Return when training may go on and change its tensors."""

    def wait(self) -> None:
        """Return when what was saved is on the disk."""

    def forget(self) -> None:
        """Bring the optimizer into the state of a new process before `load`: without moments, where `load` makes them."""

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
    """`Snapshots.stage` and `restore`, as the generated train.py calls them."""

    name = "elasticflow"

    def __init__(self, me: Worker, trained: Trained, policy: snapshot.Policy) -> None:
        schedule = order.Schedule(1 << 20, 64, steps=1 << 30, tail="spill", seed=1)
        state = State(model=trained.model, optimizer=trained.optimizer)
        self._me, self._trained, self._step = me, trained, 0
        self._catalog = policy.catalog(me.run_folder, me.run_id)
        self._snapshots = snapshot.Snapshots(me, state, schedule, None, policy)
        self._snapshots.restore()

    def save(self, step: int) -> None:
        self._step = step
        self._snapshots.stage(order.Position(step, 64 * step, 0, 64 * step, is_epoch_end=False))

    def wait(self) -> None:
        if self._me.rank == 0:
            while (newest := self._catalog.newest()) is None or newest.step != self._step:
                time.sleep(_POLL_S)

    def forget(self) -> None:
        self._trained.optimizer.state.clear()

    def load(self) -> None:
        self._snapshots.restore()

    def settle(self) -> None:
        self._snapshots.due(order.Position(1, 64, 0, 64, is_epoch_end=False))  # hears what became of it

    def folder(self) -> Path:
        return self._me.run_folder.path / self._catalog.folder(self._manifest().name)

    def nbytes(self) -> int:
        """Return the bytes this rank staged of the last snapshot."""
        mine = f"-{self._me.rank:05d}-of-"
        return sum(entry.size for name, entry in self._manifest().files.items() if mine in name)

    def _manifest(self) -> Manifest:
        newest = self._catalog.newest()
        assert newest is not None
        return newest


class TorchSave(Way):
    """`torch.save` by rank 0 with fsync, the others waiting."""

    name = "torch.save"

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained, self._folder = trained, folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, step: int) -> None:
        if dist.get_rank() == 0:
            with (self._folder / "state.pt").open("wb") as file:
                torch.save(self._trained.state_dict(), file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def forget(self) -> None:
        self._trained.optimizer.state.clear()

    def load(self) -> None:
        content = torch.load(self._folder / "state.pt", map_location="cpu", weights_only=True)
        self._trained.model.load_state_dict(content["model"])
        self._trained.optimizer.load_state_dict(content["optimizer"])

    def folder(self) -> Path:
        return self._folder


class Checkpoint(Way):
    """`torch.distributed.checkpoint.save`, both ranks writing."""

    name = "dcp.save"

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained, self._folder = trained, folder
        self._last: Path | None = None
        self._step = 0

    def save(self, step: int) -> None:
        self._step = step
        self._write(self._trained.state_dict(), self._folder / str(step))

    def load(self) -> None:
        content = self._trained.state_dict()  # in place, where the tensors are: as little as can be done
        load(content, checkpoint_id=self.folder())

    def settle(self) -> None:
        if self._last is not None and dist.get_rank() == 0:
            shutil.rmtree(self._last)
        self._last = self.folder()

    def folder(self) -> Path:
        return self._folder / str(self._step)

    def _write(self, content: dict[str, Any], folder: Path) -> None:
        save(content, checkpoint_id=folder)


class AsyncThread(Checkpoint):
    """`async_save` with the thread that is its default."""

    name = "dcp.async_save, thread"
    _future: Future[Any]

    def wait(self) -> None:
        self._future.result()

    def _write(self, content: dict[str, Any], folder: Path) -> None:
        found = async_save(content, checkpoint_id=folder)
        assert isinstance(found, Future)
        self._future = found


class AsyncProcess(AsyncThread):
    """`async_save` with a process that is handed shared memory, reused from one save to the next."""

    name = "dcp.async_save, process"

    def __init__(self, trained: Trained, folder: Path) -> None:
        super().__init__(trained, folder)
        # Pinned memory and copies that do not block are for CUDA and refused without it.
        options = StagingOptions(
            use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)

    def _write(self, content: dict[str, Any], folder: Path) -> None:
        found = async_save(
            content,
            checkpoint_id=folder,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        assert isinstance(found, Future)
        self._future = found

    def close(self) -> None:
        from multiprocessing import active_children

        for child in active_children():
            child.kill()
