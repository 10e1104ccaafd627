"""The writer process of a node: `python -m elasticflow.snapshots.writer.main`.

It owns the staging memory, hashes and writes shares, commits snapshots, and loads them for ranks that go on. TERM and INT
are ignored, since they go to whole process groups while the last snapshot is still being written; it leaves at once when
its standard input ends, and after what it has been handed when a line comes there.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticflow import fault_injection
from elasticflow.snapshots.client import channel as wire
from elasticflow.snapshots.format.writer_config import WriterStart
from elasticflow.snapshots.memory.buffers import Buffer, BufferPool, LimitError
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.writer.committer import Committer
from elasticflow.snapshots.writer.load_service import LoadService
from elasticflow.snapshots.writer.memory_service import MemoryTierService
from elasticflow.snapshots.writer.pending import PendingSnapshot, PendingSnapshots
from elasticflow.snapshots.writer.reports import ThrottledTroubles
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from elasticflow.snapshots.writer.threads import or_die, thread
from elasticflow.storage.storage import Storage
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable

_WRITING_THREADS = 2
_HEAR_OUT_S = 5.0
_NICENESS = 5  # training goes first; while a worker waits for us, it does not compete


@dataclass(eq=False)
class _Worker:
    """A connected rank."""

    channel: wire.Channel
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    generation: int = 0
    buffers: dict[int, Buffer] = field(default_factory=dict)
    busy: bool = False

    def send(self, message: wire.Message, descriptors: tuple[int, ...] = ()) -> None:
        try:
            self.channel.send(message, descriptors)
        except OSError:
            return  # it is gone; its own thread sees that too


class Writer:
    """Serves the workers of one node; every method with a worker runs in that worker's thread."""

    def __init__(self, start: WriterStart) -> None:
        self._limits = start.limits
        self._workers: set[_Worker] = set()
        tell = partial(self._report, listeners=self._workers, to_parent=True)
        catalog = Catalog(
            Storage(start.uri, start.config.options, on_trouble=ThrottledTroubles(tell)), start.prefix
        )
        self._writing = ShardWriter(start, catalog)
        self._loader = LoadService(catalog)
        self._pool = BufferPool(start.config.staging_limit)
        self._pending_snapshots = PendingSnapshots()
        self._memory_tier = MemoryTierService(
            self._pool, self._pending_snapshots, self._submit, catalog.quarantine
        )
        self._threads = ThreadPoolExecutor(_WRITING_THREADS, thread_name_prefix="shares")
        self._committer = Committer(start, catalog, self._pending_snapshots, self._report)
        self._out: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: no more
        self._committing = thread(self._committer.run)
        self._printing = thread(self._print)

    def start(self) -> None:
        """Listen, and say where on standard output."""
        server, address = wire.listen()
        for each in (self._printing, self._committing, thread(self._accept, server)):
            each.start()
        self._out.put({"event": "ready", "address": address})

    def finish(self) -> None:
        """Bring to an end all that workers have handed over, and end the process; none of them stages any more."""
        self._hear_out(math.inf)
        self._memory_tier.finish()
        self._pending_snapshots.end_all()
        self._committing.join()
        self._out.put(None)
        self._printing.join()
        os._exit(0)

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            if wire.is_own_user(connection):
                worker = _Worker(wire.Channel(connection))
                thread(self._serve, worker).start()
            else:
                connection.close()

    def _serve(self, worker: _Worker) -> None:
        try:
            if not self._greet(worker):
                return
            while True:
                worker.channel.wait()
                worker.busy = True  # before anything is read: see _is_idle
                message = worker.channel.receive()
                if message is None:
                    return
                if "reserve" in message:
                    self._reserve(worker, message["reserve"])
                elif "stage" in message:
                    self._stage(worker, message["stage"])
                elif not self._loader.handle(worker, message):
                    self._memory_tier.handle(worker, message)
                worker.busy = False
        finally:
            self._memory_tier.leave(worker)
            self._loader.leave(worker)
            self._workers.discard(worker)
            for buffer in worker.buffers.values():
                self._pool.disown(buffer)
            worker.channel.close()

    def _greet(self, worker: _Worker) -> bool:
        message = worker.channel.receive()
        if message is None or "hello" not in message:
            return False
        fault_injection.reach("writer.hello")
        hello = message["hello"]
        worker.rank, worker.world_size = hello["rank"], hello["world_size"]
        worker.local_world_size, worker.generation = hello["local_world_size"], hello["generation"]
        is_alone = worker.local_world_size == worker.world_size
        self._hear_out(worker.generation)
        if not self._pending_snapshots.greet(worker.generation, is_alone=is_alone):
            worker.send(
                {
                    "refused": f"generation {worker.generation} is over, {self._pending_snapshots.newest} is here"
                }
            )
            return False
        self._memory_tier.greet(is_alone=is_alone)
        fault_injection.reach("writer.before_settle")
        self._pending_snapshots.settle(worker.generation, self._limits.settle_s)
        self._workers.add(worker)
        worker.send({"welcome": True})
        return True

    def _hear_out(self, generation: float) -> None:
        """Return when all that workers of older generations sent has been read: they may have died right after."""
        deadline = time.monotonic() + _HEAR_OUT_S
        older = [worker for worker in tuple(self._workers) if worker.generation < generation]
        while time.monotonic() < deadline and not all(self._is_idle(worker) for worker in older):
            time.sleep(0.001)

    def _is_idle(self, worker: _Worker) -> bool:
        """Whether nothing *worker* sent is unread or being handled; the order of the two looks matters."""
        try:
            is_unread = worker in self._workers and worker.channel.wait(0)
        except (OSError, ValueError):  # closed in this moment
            is_unread = False
        return not is_unread and (not worker.busy or worker not in self._workers)

    def _reserve(self, worker: _Worker, nbytes: int) -> None:
        fault_injection.reach("writer.reserve")
        for buffer in worker.buffers.values():
            self._pool.disown(buffer)
        worker.buffers = {}
        try:
            found, short = self._pool.take_up_to(2, nbytes, least=1, workers=worker.local_world_size)
        except LimitError as error:
            worker.send({"over_limit": str(error)})
            return
        except OSError as error:
            worker.send({"no_memory": str(error)})
            return
        worker.buffers = {buffer.number: buffer for buffer in found}
        size = min(buffer.size for buffer in found)
        message = {"buffers": [b.number for b in found], "size": size, "single": short}
        worker.send(message, tuple(b.descriptor for b in found))

    def _stage(self, worker: _Worker, message: dict[str, Any]) -> None:
        """Take a share over; its bytes are written by a thread of the pool."""
        buffer = worker.buffers.get(message["buffer"])
        if buffer is not None:
            buffer.busy = True
        share = PendingSnapshot(
            message["name"], message["step"], worker.generation, worker.world_size, worker.local_world_size
        )
        pending = self._pending_snapshots.add(share, worker.rank, message["record"], worker)
        fault_injection.reach("writer.received")
        self._submit(worker.rank, pending, message, buffer)

    def _submit(
        self, rank: int, pending: PendingSnapshot, message: dict[str, Any], buffer: Buffer | None
    ) -> None:
        self._threads.submit(or_die, self._write, rank, pending, message, buffer)

    def _write(
        self, rank: int, pending: PendingSnapshot, message: dict[str, Any], buffer: Buffer | None
    ) -> None:
        error, files = None, []
        try:
            if pending.error is None:
                memory = memoryview(buffer.view if buffer is not None else b"")
                files = self._writing.write(pending, rank, message, memory)
        except Exception as caught:  # noqa: BLE001  # whatever the store raises is the snapshot's reason
            error = f"{type(caught).__name__}: {caught}"
        if buffer is not None and self._pool.written(buffer):
            pending.listeners[rank].send({"released": buffer.number})
        self._pending_snapshots.finish(pending, rank, files, error)

    def _report(self, report: dict[str, Any], listeners: Iterable[_Worker], *, to_parent: bool) -> None:
        self._memory_tier.note(report)
        if to_parent:
            self._out.put(report)
        for worker in tuple(listeners):
            worker.send({"report": report})

    def _print(self) -> None:
        """Write reports to standard output; a thread of its own, since the parent may be slow to read."""
        while (report := self._out.get()) is not None:
            line = json.dumps(report).encode() + b"\n"
            while line:
                line = line[os.write(1, line) :]


def main() -> None:
    """Read the configuration, serve, and leave when standard input ends."""
    fault_injection.arm(os.environ)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    start = WriterStart.from_json(json.loads(line))
    if start.parent is not None:
        die_with_parent(start.parent)
    os.nice(_NICENESS)
    writer = Writer(start)
    writer.start()
    while os.read(0, 1 << 12):  # one line, FINISH, may come before the end
        thread(writer.finish).start()
    os._exit(0)


if __name__ == "__main__":
    main()
