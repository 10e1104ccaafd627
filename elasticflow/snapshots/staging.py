"""The worker's side of a snapshot: fill a staging buffer, hand it over, train on (floor 1, no torch)."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import faults
from elasticflow.errors import SnapshotError
from elasticflow.snapshots import buffers, wire
from elasticflow.snapshots.process import WriterProcess, start_writer

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

__all__ = ["StagingClient", "TensorEntry", "WriterProcess", "start_writer"]

Report = dict[str, Any]
_TIDY_LIMIT_S = 5.0


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a staging buffer: key, safetensors dtype ("F32"), shape, offset and bytes in the buffer.

    A frozen one takes no gradient: if its file is the same as before, it is not written again.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    frozen: bool = False


@dataclass(eq=False)
class _Mapped:
    size: int
    memory: mmap.mmap
    state: str = "free"  # free -> filling (the worker's) -> writing (the writer's) -> free


class StagingClient:
    """One rank's connection to its node's writer; used from one thread.

    Two buffers per rank: while one is being written, the other can be filled; when both are being written,
    `buffer` waits, so a slow store delays the next snapshot and never grows memory.
    """

    def __init__(self, channel: wire.Channel) -> None:
        self._channel = channel
        self._mapped: dict[int, _Mapped] = {}
        self._reserved = 0
        self._reports: list[Report] = []
        self._open: set[str] = set()  # names staged here without an outcome
        self._untidied: set[str] = set()  # names staged here whose retention is not through

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        rank: int,
        world_size: int,
        local_world_size: int,
        generation: int,
        timeout_s: float = 60.0,
    ) -> StagingClient:
        """Return this rank's client. Every rank.

        The writer answers once it has committed or given up what an earlier generation left with it, so that
        `Catalog.newest()` read afterwards is final.

        Raises:
            SnapshotError: no writer there, no answer in time, or a later generation is here already.
        """
        try:
            channel = wire.connect(address, timeout_s)
            hello = {"rank": rank, "world_size": world_size, "local_world_size": local_world_size}
            channel.send({"hello": {**hello, "generation": generation}})
            answer = channel.receive(timeout_s)
        except TimeoutError:
            raise SnapshotError(f"the snapshot writer did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise SnapshotError(f"the snapshot writer cannot be reached: {error}") from None
        if answer is None or "refused" in answer:
            channel.close()
            raise SnapshotError(f"the snapshot writer refused: {(answer or {}).get('refused', 'it ended')}")
        return cls(channel)

    def reserve(self, nbytes: int) -> None:
        """Ask for two buffers of *nbytes* and return at once: they are made ready while the worker goes on.

        Not between `buffer` and `stage`: larger buffers take the place of the old ones.
        """
        if nbytes > self._reserved:
            self._reserved = nbytes
            self._send({"reserve": nbytes})

    def buffer(self, nbytes: int, timeout_s: float | None = None) -> memoryview:
        """Return a free staging buffer of *nbytes*; waits while both are being written.

        Raises:
            SnapshotError: the writer died, has no memory, or freed no buffer within *timeout_s*.
        """
        self.reserve(nbytes)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._receive_waiting()
            for mapped in sorted(self._mapped.values(), key=lambda m: m.state != "filling"):
                if mapped.state != "writing" and mapped.size >= nbytes:
                    mapped.state = "filling"
                    return memoryview(mapped.memory)[:nbytes]
            self._receive_one(deadline, "no staging buffer became free")

    def stage(
        self,
        *,
        name: str,
        step: int,
        tensors: Sequence[TensorEntry],
        nbytes: int,
        record: dict[str, Any] | None = None,
    ) -> None:
        """Hand the buffer last given by `buffer` to the writer and return at once.

        Args:
            name: The snapshot's folder name, the same on every rank, never used before.
            step: Finished steps.
            tensors: This rank's share; may be empty.
            nbytes: Bytes of the buffer in use.
            record: Rank 0's: `{"state": content of state.json, "manifest": {trigger, parent, metric, epoch, samples,
                aliases, memory_formats, fingerprints, versions}}`; None on other ranks.

        Raises:
            SnapshotError: the writer died.
        """
        number = next((n for n, mapped in self._mapped.items() if mapped.state == "filling"), None)
        assert number is not None or not nbytes, "stage() without buffer()"
        if number is not None:
            self._mapped[number].state = "writing"
        if record is not None and (metric := record["manifest"].get("metric")) is not None:
            # As text: JSON has no infinities.
            record = {**record, "manifest": {**record["manifest"], "metric": str(float(metric))}}
        share = {
            "name": name,
            "step": step,
            "tensors": [asdict(entry) for entry in tensors],
            "record": record,
        }
        self._open.add(name)
        self._untidied.add(name)
        self._send({"stage": {**share, "buffer": number, "nbytes": nbytes}})
        faults.reach("snapshot.after_stage")

    def reports(self) -> list[Report]:
        """Return what became of snapshots staged here since the last call; does not wait."""
        self._receive_waiting()
        reports, self._reports = self._reports, []
        return reports

    def flush(self, timeout_s: float) -> list[Report]:
        """Wait until everything staged here is committed or failed; return the reports not yet fetched.

        Retention after the last commit is waited for as well, but not for long, and never for an error.

        Raises:
            SnapshotError: the writer died, or an outcome is missing after *timeout_s*.
        """
        deadline = time.monotonic() + timeout_s
        while self._open:
            self._receive_one(deadline, f"no outcome of {', '.join(sorted(self._open))}")
        with contextlib.suppress(SnapshotError):
            deadline = min(deadline, time.monotonic() + _TIDY_LIMIT_S)
            while self._untidied:
                self._receive_one(deadline, "retention was not through")
        return self.reports()

    def fileno(self) -> int:
        """Return the connection's descriptor, for select."""
        return self._channel.fileno()

    def close(self) -> None:
        """Leave; shares already staged are still written."""
        self._channel.close()

    def _send(self, message: wire.Message) -> None:
        try:
            self._channel.send(message)
        except OSError as error:
            raise SnapshotError(f"the snapshot writer died: {error}") from None

    def _receive_waiting(self) -> None:
        while True:
            try:
                message = self._channel.receive(0)
            except TimeoutError:
                return
            self._handle(message)

    def _receive_one(self, deadline: float | None, complaint: str) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        try:
            self._handle(self._channel.receive(None if left is None else max(left, 1e-3)))
        except TimeoutError:
            raise SnapshotError(f"snapshot writer: {complaint} in time") from None

    def _handle(self, message: wire.Message | None) -> None:
        if message is None:
            raise SnapshotError("the snapshot writer died")
        if "buffers" in message:
            self._map(message)
        elif "released" in message:
            mapped = self._mapped.get(message["released"])
            if mapped is not None:
                mapped.state = "free"
        elif "tidied" in message:
            self._untidied.discard(message["tidied"])
        elif "report" in message:
            report: Report = message["report"]
            if report["event"] != "snapshot.removed":
                self._open.discard(report["name"])
            self._reports.append(report)
        elif "no_memory" in message:
            raise SnapshotError(f"no memory to stage {self._reserved} bytes twice: {message['no_memory']}")

    def _map(self, message: wire.Message) -> None:
        self._mapped.clear()  # the writer keeps what is still being written
        for number in message["buffers"]:
            descriptor = self._channel.descriptors.popleft()
            try:
                self._mapped[number] = _Mapped(
                    message["size"], buffers.map_memory(descriptor, message["size"])
                )
            finally:
                os.close(descriptor)
