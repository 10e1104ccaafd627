"""torch's ways to save and load a training state; see snapshot.py."""

# ruff: noqa: D102  # what a method does stands once, in `Way`

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from tests.measured.benchmarks.snapshot_ways import Way

if TYPE_CHECKING:
    from pathlib import Path

    from tests.measured.benchmarks.snapshot_state import Trained


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

    def before_load(self) -> None:
        self._trained.optimizer.state.clear()

    def load(self) -> None:
        content = torch.load(self._folder / "state.pt", map_location="cpu", weights_only=True)
        self._trained.model.load_state_dict(content["model"])
        self._trained.optimizer.load_state_dict(content["optimizer"])

    def folder(self) -> Path:
        return self._folder


class Checkpoint(Way):
    """`torch.distributed.checkpoint.save` and `load`, both ranks writing, as torch's documentation has them used."""

    name = "dcp.save"

    def __init__(self, trained: Trained, folder: Path) -> None:
        self._trained, self._folder = trained, folder
        self._content: dict[str, Any] = {}
        self._last: Path | None = None
        self._step = 0

    def before_save(self) -> None:
        self._content = self._live()

    def save(self, step: int) -> None:
        self._step = step
        self._write(self._content, self._folder / str(step))

    def before_load(self) -> None:
        self._trained.optimizer.state.clear()

    def load(self) -> None:
        content = self._live()  # gives the optimizer moments to load into
        load(content, checkpoint_id=self.folder())
        model, optimizer = content["model"], content["optimizer"]
        set_state_dict(
            self._trained.model, self._trained.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )

    def settle(self) -> None:
        if self._last is not None and dist.get_rank() == 0:
            shutil.rmtree(self._last)
        self._last = self.folder()

    def folder(self) -> Path:
        return self._folder / str(self._step)

    def _live(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._trained.model, self._trained.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _write(self, content: dict[str, Any], folder: Path) -> None:
        save(content, checkpoint_id=folder)


class InPlace(Checkpoint):
    """The bare call of `load`, into moments that are there: less than any new process can do."""

    name = "dcp.load alone"

    def __init__(self, saved: Checkpoint) -> None:
        super().__init__(saved._trained, saved._folder)
        self._saved = saved

    def before_load(self) -> None:
        self._content = self._live()

    def load(self) -> None:
        load(self._content, checkpoint_id=self.folder())

    def folder(self) -> Path:
        return self._saved.folder()


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
