"""Identity of this process, read from its environment variables, for each way to start it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticflow.protocol import worker_environment
from elasticflow.protocol.handshake import TOKEN
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping

BY_HAND = "by-hand"

StartedBy = Literal["launcher", "torchrun", "python"]


@dataclass(frozen=True)
class Identity:
    """One worker's place in the run.

    Attributes:
        started_by: `launcher` (an elasticflow agent), `torchrun`, or `python` (`python train.py`, one process).
        generation: Number of the worker group; None if it is not known before it is claimed.
        writer: Address of the node's snapshot writer, if one runs.
        failed_at: Monotonic time of the failure after which this generation was formed.
        heartbeat_fd: File descriptor of the shared memory with the node's heartbeats.
        address: Address at which other machines reach this machine; None: the local address of the connection to the
            launch's keys.
        numa: torch's affinity mode, by which to bind this process to the cores near its GPU; None: do not bind it, or
            torchrun has bound it already.
        device: Device type that this process has to train on, or "auto"; None: its environment does not say.
        shares_device: All workers of the machine share device 0: for tests.
        torchrun_folder: The folder that torchrun made for this start of the node's workers: no other start's workers are told it;
            `.` if it made none, or something else started this process.
        is_own_task: Slurm started this process as a task of its own, not an agent that it started.
    """

    started_by: StartedBy
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node: str
    run_id: str
    run_folder: RunFolder
    generation: int | None
    writer: str | None
    failed_at: float | None
    heartbeat_fd: int | None
    rendezvous: StoreAddress
    numa: str | None
    address: str | None = None
    device: str | None = None
    shares_device: bool = False
    torchrun_folder: str = "."
    is_own_task: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str], folder: Path) -> Identity:
        """Return the identity stated by *environ*; *folder* contains the entry point."""
        started_by: StartedBy = "python"
        if worker_environment.GENERATION in environ:
            started_by = "launcher"
        elif "RANK" in environ and "WORLD_SIZE" in environ:
            started_by = "torchrun"

        def number(name: str, otherwise: int) -> int:
            return otherwise if started_by == "python" else int(environ.get(name, otherwise))

        generation = environ.get(worker_environment.GENERATION)
        failed_at = environ.get(worker_environment.FAILED_AT)
        heartbeat_fd = environ.get(worker_environment.HEARTBEAT_FD)
        return cls(
            started_by=started_by,
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", 0),
            world_size=number("WORLD_SIZE", 1),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node=environ.get(worker_environment.NODE) or environ.get("GROUP_RANK", "0"),
            run_id=environ.get(worker_environment.RUN_ID) or BY_HAND,
            run_folder=RunFolder((folder / environ.get(worker_environment.RUN_FOLDER, "")).absolute()),
            generation=int(generation) if generation else None,
            writer=environ.get(worker_environment.WRITER) or None,
            failed_at=float(failed_at) if failed_at else None,
            heartbeat_fd=int(heartbeat_fd) if heartbeat_fd else None,
            rendezvous=_rendezvous(environ),
            numa=environ.get(worker_environment.NUMA) or None,
            address=environ.get(worker_environment.ADDRESS) or None,
            device=environ.get(worker_environment.DEVICE) or None,
            shares_device=environ.get(worker_environment.SHARE_DEVICE) == "1",
            # FOLDER/LOCAL_RANK/error.json
            torchrun_folder=str(Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent),
            is_own_task=started_by == "torchrun"
            and "TORCHELASTIC_RUN_ID" not in environ
            and environ.get("SLURM_LOCALID") == environ.get("LOCAL_RANK"),
        )


def _rendezvous(environ: Mapping[str, str]) -> StoreAddress:
    if url := environ.get(worker_environment.RENDEZVOUS):
        return StoreAddress.parse(url, environ.get(TOKEN, ""))
    return StoreAddress(environ.get("MASTER_ADDR", "localhost"), int(environ.get("MASTER_PORT", "0")))
