"""Writers on short limits, and a run's places, for the tests of snapshots."""

from __future__ import annotations

import contextlib
import resource
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.run_folder import snapshot_name
from elasticflow.snapshots.client.messages import SnapshotReport
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.client.writer_process import Limits, WriterProcess, WriterStart, start_writer
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.command_line import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

LIMITS = {"fence_grace_s": 0.5, "settle_s": 10.0, "shares_s": 20.0}


@dataclass
class Bench:
    """One run at one URI, with as many nodes' writers as a test starts."""

    uri: str
    prefix: str = ""
    writers: list[WriterProcess] = field(default_factory=list)
    clients: list[StagingClient] = field(default_factory=list)

    @property
    def catalog(self) -> Catalog:
        """A catalog that has seen nothing yet."""
        return Catalog(Storage(self.uri), self.prefix)

    def writer(self, python: str = sys.executable, **config: Any) -> WriterProcess:
        """Start a node's writer."""
        limits = {**LIMITS, **config.pop("limits", {})}
        if isinstance(limit := config.get("staging_limit"), int):
            config["staging_limit"] = f"{limit} B"
        settings = SnapshotSettings.from_json(config)
        with forks():
            start = WriterStart(self.uri, "run", settings, self.prefix, Limits(**limits))
            self.writers.append(start_writer(start, python))
        return self.writers[-1]

    def connect(self, writer: WriterProcess, rank: int = 0, world: int = 1, **options: Any) -> StagingClient:
        """Connect a rank; all ranks on one node, generation 1, unless *options* say otherwise."""
        options = {"local_world_size": world, "generation": 1, "timeout_s": 100.0, **options}
        self.clients.append(StagingClient.connect(writer.address, rank=rank, world_size=world, **options))
        return self.clients[-1]

    @staticmethod
    def name_of(step: int, generation: int = 1) -> str:
        """The name of the snapshot at *step*."""
        return snapshot_name(step, generation, f"{step:08x}")

    @staticmethod
    def share(
        client: StagingClient,
        step: int,
        *,
        rank: int = 0,
        generation: int = 1,
        size: int = 1000,
        refusal: str | None = None,
        **about: Any,
    ) -> str:
        """Stage a share whose bytes tell step and rank; rank 0 gives the record with it."""
        name = Bench.name_of(step, generation)
        buffer = client.buffer(size, timeout_s=100)
        buffer[:] = Bench.content(step, rank, size)
        entries = [
            TensorEntry(f"a{rank}", "U8", (size // 2,), 0, size // 2),
            TensorEntry(f"b{rank}", "F32", (size // 8,), size // 2, size // 2),
        ]
        facts = ManifestFacts(trigger="steps", samples=step * 10, **about)
        record = SnapshotRecord({"position": {"step": step}, "state": {}}, facts)
        given = record if rank == 0 else None
        client.stage(name=name, step=step, tensors=entries, nbytes=size, record=given, refusal=refusal)
        return name

    @staticmethod
    def content(step: int, rank: int, size: int = 1000) -> bytes:
        """What `share` stages."""
        return bytes((step * 7 + rank * 31 + i) % 256 for i in range(256)) * (size // 256) + b"." * (
            size % 256
        )

    @staticmethod
    def outcomes(reports: Iterable[Any]) -> list[tuple[str, int]]:
        """Event and step of each report, as a client has it or as an event, without retention's."""
        records = [report if isinstance(report, dict) else vars(report) for report in reports]
        return [
            (record["event"], record["step"])
            for record in records
            if record.get("event") in {"snapshot.committed", "snapshot.failed"}
        ]

    @staticmethod
    def flushed(client: StagingClient, timeout_s: float) -> list[SnapshotReport]:
        """What *client* is told until all that it staged has an outcome: of snapshots only."""
        reports = client.flush(timeout_s)
        of_snapshots = [report for report in reports if isinstance(report, SnapshotReport)]
        assert of_snapshots == reports
        return of_snapshots

    @staticmethod
    @contextlib.contextmanager
    def small_files(writer: WriterProcess, size: int) -> Iterator[None]:
        """Have the writer fail, as on a full disk, to write files of more than *size* bytes."""
        pid, (soft, hard) = writer.process.pid, resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
        yield
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    def close(self) -> None:
        """End all that was started."""
        for client in self.clients:
            with contextlib.suppress(OSError):
                client.close()
        for writer in self.writers:
            writer.close()


@pytest.fixture
def bench(tmp_path: Path, real_processes: None) -> Iterator[Bench]:
    """A run at a local folder."""
    made = Bench(str(tmp_path / "run"))
    yield made
    made.close()


@pytest.fixture
def bench_at(real_processes: None) -> Iterator[Callable[[str], Bench]]:
    """Make a bench at any URI."""
    made: list[Bench] = []

    def make(uri: str) -> Bench:
        made.append(Bench(uri, prefix="run/"))
        return made[-1]

    yield make
    for bench in made:
        bench.close()
