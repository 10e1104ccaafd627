"""The writer process of a node: `python -m elasticflow.snapshots.writer.main`.

The writer owns the shared memory, hashes and writes shards, commits snapshots, and loads them for the ranks. It ignores
TERM, INT and HUP, which go to whole process groups while the last snapshot is still being written. Its parent writes to its
standard input: first the configuration, then `load` (read the newest snapshot, for which workers will ask) or `finish` (end once
every staged snapshot is committed or given up). At the end of standard input the writer ends at once.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, assert_never

from elasticflow.errors import SnapshotError, StorageError
from elasticflow.protocol.json_codec import from_json
from elasticflow.snapshots.client import channel as channels
from elasticflow.snapshots.client.channel import Channel
from elasticflow.snapshots.client.messages import (
    TO_WORKER,
    TO_WRITER,
    Describe,
    GiveBack,
    GiveUp,
    Hello,
    Invalidate,
    Load,
    NoSlots,
    Recall,
    Receive,
    Refused,
    Released,
    Report,
    RequestPersist,
    Reserve,
    Slots,
    Stage,
    Unload,
    Welcome,
    as_event,
)
from elasticflow.snapshots.client.writer_process import WriterStart
from elasticflow.snapshots.memory import BufferPool, LimitError, digest_of
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.writer.committer import Committer
from elasticflow.snapshots.writer.connected_rank import ConnectedRank
from elasticflow.snapshots.writer.load_service import LoadService
from elasticflow.snapshots.writer.memory_tier import MemoryTierService
from elasticflow.snapshots.writer.pending import PendingSnapshot, PendingSnapshots, State
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from elasticflow.snapshots.writer.threads import or_die, thread
from elasticflow.storage.storage import Storage
from elasticflow.system import fault_injection
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable

    from elasticflow.events import EventRecord
    from elasticflow.snapshots.client.messages import ToWorker, ToWriter, WriterReport
    from elasticflow.snapshots.format.shard_file import StagedShard
    from elasticflow.snapshots.memory import Buffer
    from elasticflow.storage.storage import Trouble

_WRITING_THREADS = 2
_HEAR_OUT_S = 5.0
# Training goes first. A worker that waits for the writer does not compete with it.
_NICENESS = 5
_TROUBLES_EVERY_S = 10.0


class ThrottledTroubles:
    """Passes on reports of `Storage` about operations that are tried again; used from any thread.

    Args:
        report: Called with the first, and then with at most one every ten seconds.
    """

    def __init__(
        self, report: Callable[[Trouble], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._clock = report, clock
        self._lock = threading.Lock()
        self._reported_at = -math.inf

    def __call__(self, trouble: Trouble) -> None:
        """Report *trouble*, unless one was reported a moment ago."""
        with self._lock:
            now = self._clock()
            if now - self._reported_at < _TROUBLES_EVERY_S:
                return
            self._reported_at = now
        self._report(trouble)


class Writer:
    """Serves the workers of one node; every method with a worker runs in that worker's thread."""

    def __init__(self, start: WriterStart) -> None:
        self._limits = start.limits
        self._workers: set[ConnectedRank] = set()
        report = partial(self._report, listeners=self._workers, to_parent=True)
        storage = Storage(start.uri, start.settings.options, on_trouble=ThrottledTroubles(report))
        catalog = Catalog(storage, start.prefix)
        self._shard_writer = ShardWriter(start, catalog)
        self._catalog = catalog
        self._load_service = LoadService(catalog)
        self._pool = BufferPool(start.settings.staging_bytes)
        self._pending_snapshots = PendingSnapshots()
        self._memory_tier = MemoryTierService(
            self._pool, self._pending_snapshots, self._submit, catalog.quarantine
        )
        self._threads = ThreadPoolExecutor(_WRITING_THREADS, thread_name_prefix="shares")
        self._committer = Committer(start, catalog, self._pending_snapshots, self._report)
        # Lines for standard output; None: the end.
        self._out: queue.SimpleQueue[EventRecord | None] = queue.SimpleQueue()
        self._committing = thread(self._committer.run)
        self._printing = thread(self._print)

    def start(self) -> None:
        """Listen, and write the address to standard output."""
        server, address = channels.listen()
        for started in (self._printing, self._committing, thread(self._accept, server)):
            started.start()
        self._out.put({"event": "ready", "address": address})

    def load_ahead(self) -> None:
        """Read the snapshot from which the next generation will resume; called once no worker is left."""
        if self._memory_tier.is_used:
            return
        generation = self._pending_snapshots.newest
        self._hear_out(math.inf)
        self._pending_snapshots.end_open()
        self._pending_snapshots.await_free()
        # A file that cannot be read fails again where a rank asks for it.
        with suppress(OSError, StorageError, SnapshotError):
            is_free = self._pending_snapshots.newest == generation
            if is_free and (newest := self._catalog.newest()) is not None:
                self._load_service.load_ahead(newest.name)

    def finish(self) -> None:
        """End the process once every staged snapshot is committed or given up; no worker may be staging any more."""
        self._hear_out(math.inf)
        self._pending_snapshots.end_greetings()
        self._memory_tier.finish()
        self._pending_snapshots.end_all()
        self._committing.join()
        self._out.put(None)
        self._printing.join()
        os._exit(0)

    def _accept(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            if channels.is_own_user(connection):
                thread(self._serve, Channel(connection, TO_WORKER, TO_WRITER)).start()
            else:
                connection.close()

    def _serve(self, channel: Channel[ToWorker, ToWriter]) -> None:
        hello = channel.receive()
        if not isinstance(hello, Hello):
            channel.close()
            return
        worker = ConnectedRank(channel, hello)
        try:
            if not self._greet(worker):
                return
            while True:
                channel.wait()
                # Set before anything is read: `_is_idle` relies on it.
                worker.is_busy = True
                message = channel.receive()
                if message is None:
                    return
                self._handle(worker, message)
                worker.is_busy = False
        finally:
            self._memory_tier.leave(worker)
            self._load_service.leave(worker)
            self._workers.discard(worker)
            for buffer in worker.buffers.values():
                self._pool.disown(buffer)
            channel.close()

    def _handle(self, worker: ConnectedRank, message: ToWriter) -> None:
        match message:
            case Hello():
                raise ValueError("a worker greeted twice")
            case Reserve():
                self._reserve(worker, message)
            case Stage():
                self._stage(worker, message)
            case GiveUp():
                self._pending_snapshots.give_up(message.name, message.reason)
            case Load():
                self._load_service.load(worker, message.name, is_whole=message.is_whole)
            case Unload():
                self._load_service.leave(worker)
            case GiveBack() | Describe() | RequestPersist() | Recall() | Receive() | Invalidate():
                self._memory_tier.handle(worker, message)
            case _:
                assert_never(message)

    def _greet(self, worker: ConnectedRank) -> bool:
        fault_injection.reach("writer.hello")
        is_single_node = worker.hello.is_single_node
        self._hear_out(worker.generation)
        if not self._pending_snapshots.greet(worker.generation, is_single_node=is_single_node):
            newest = self._pending_snapshots.newest
            worker.send(Refused(f"generation {worker.generation} is over, {newest} is here"))
            return False
        self._memory_tier.greet()
        self._load_service.greet(worker)
        fault_injection.reach("writer.before_settle")
        self._pending_snapshots.await_older(worker.generation, self._limits.settle_s)
        self._workers.add(worker)
        worker.send(Welcome())
        return True

    def _hear_out(self, generation: float) -> None:
        """Wait until all messages of older generations are handled: their workers may have died after sending them."""
        deadline = time.monotonic() + _HEAR_OUT_S
        older = [worker for worker in tuple(self._workers) if worker.generation < generation]
        while time.monotonic() < deadline and not all(self._is_idle(worker) for worker in older):
            time.sleep(0.001)

    def _is_idle(self, worker: ConnectedRank) -> bool:
        """Return whether no message of *worker* is unread or being handled."""
        # In this order: a worker is busy before its message is read.
        try:
            is_unread = worker in self._workers and worker.channel.wait(0)
        except (OSError, ValueError):
            # The connection was closed in this moment.
            is_unread = False
        return not is_unread and (not worker.is_busy or worker not in self._workers)

    def _reserve(self, worker: ConnectedRank, message: Reserve) -> None:
        """Give *worker* shared memory, or report that the limit or the machine does not allow it."""
        fault_injection.reach("writer.reserve")
        self._load_service.drop_ahead()
        try:
            single = None
            if message.is_more:
                buffers = [self._memory_tier.add(worker)]
            elif message.is_held:
                buffers = self._memory_tier.attach(worker, message.nbytes, is_optional=message.is_optional)
            else:
                self._memory_tier.switch_off(worker)
                buffers, single = self._staging_buffers(worker, message.nbytes)
        except (LimitError, OSError) as error:
            worker.send(NoSlots(isinstance(error, LimitError), str(error), message.is_more))
        else:
            numbers = tuple(buffer.number for buffer in buffers)
            slots = Slots(numbers, tuple(buffer.size for buffer in buffers), single, message.is_more)
            worker.send(slots, tuple(buffer.descriptor for buffer in buffers))

    def _staging_buffers(self, worker: ConnectedRank, nbytes: int) -> tuple[list[Buffer], str | None]:
        """Replace the buffers of *worker* by two new ones, or by a single one; return them, and the reason for a single one."""
        for buffer in worker.buffers.values():
            self._pool.disown(buffer)
        worker.buffers = {}
        buffers, single = self._pool.take_up_to(2, nbytes, least=1, workers=worker.hello.local_world_size)
        worker.buffers = {buffer.number: buffer for buffer in buffers}
        return buffers, single

    def _stage(self, worker: ConnectedRank, message: Stage) -> None:
        """Note a shard that was handed over; a thread of the pool writes its bytes."""
        buffer = None if message.slot is None else worker.buffers.get(message.slot)
        if buffer is not None:
            buffer.is_busy = True
        hello, shard = worker.hello, message.shard
        pending = PendingSnapshot(
            message.name, message.step, hello.generation, hello.world_size, hello.local_world_size
        )
        pending = self._pending_snapshots.add(pending, worker.rank, shard.record, worker)
        if message.refusal is not None:
            self._pending_snapshots.refuse(pending, message.refusal)
        fault_injection.reach("writer.received")
        self._submit(worker.rank, pending, shard, buffer, None)

    def _submit(
        self,
        rank: int,
        pending: PendingSnapshot,
        shard: StagedShard,
        buffer: Buffer | None,
        digest: int | None,
    ) -> None:
        self._threads.submit(or_die, self._write, rank, pending, shard, buffer, digest)

    def _write(
        self,
        rank: int,
        pending: PendingSnapshot,
        shard: StagedShard,
        buffer: Buffer | None,
        digest: int | None,
    ) -> None:
        error, files = None, []
        try:
            if pending.state is not State.ABANDONED:
                memory = memoryview(buffer.memory if buffer is not None else b"")
                _require_unchanged(rank, memory[: shard.nbytes], digest)
                files = self._shard_writer.write(pending, rank, shard, memory)
        except Exception as caught:  # noqa: BLE001  # whatever the store raises is the snapshot's reason
            error = f"{type(caught).__name__}: {caught}"
        if buffer is not None and self._pool.written(buffer):
            pending.listeners[rank].send(Released(buffer.number))
        self._pending_snapshots.finish(pending, rank, files, error)

    def _report(self, report: WriterReport, listeners: Iterable[ConnectedRank], *, to_parent: bool) -> None:
        self._memory_tier.note(report)
        if to_parent:
            self._out.put(as_event(report))
        for worker in tuple(listeners):
            worker.send(Report(report))

    def _print(self) -> None:
        """Write reports to standard output; a thread of its own, since the parent may be slow to read."""
        while (report := self._out.get()) is not None:
            line = json.dumps(report).encode() + b"\n"
            while line:
                line = line[os.write(1, line) :]


def _require_unchanged(rank: int, content: memoryview, digest: int | None) -> None:
    if digest is not None and digest_of(content, content.nbytes) != digest:
        raise SnapshotError(f"the shard of rank {rank} has changed in memory since it was held")


def main() -> None:
    """Read the configuration, serve, and exit when standard input ends."""
    fault_injection.arm(os.environ)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    start = from_json(WriterStart, json.loads(line))
    if start.parent is not None:
        die_with_parent(start.parent)
    os.nice(_NICENESS)
    writer = Writer(start)
    writer.start()
    asked = {b"load": writer.load_ahead, b"finish": writer.finish}
    # Lines are short, and each is written at once.
    while lines := os.read(0, 1 << 12):
        for line in lines.split():
            thread(asked[line]).start()
    os._exit(0)


if __name__ == "__main__":
    main()
