"""kill -9 of the writer at every named point of a save: older snapshots stay, nothing half there is ever read."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.read import verify
from elasticflow.system import fault_injection
from tests.snapshots.conftest import Bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.store.catalog import Catalog
    from tests.forked import ForkedPrograms

KEEP, SIZE = 2, 20_000
DYING_WORKERS = Path(__file__).with_name("programs") / "dying_workers.py"
IN_A_SAVING_WORKER = [name for name in fault_injection.POINTS if name.startswith("snapshot.")]
IN_THE_WRITER = [
    name
    for name in fault_injection.POINTS
    if name.split(".")[0] not in ("training", "snapshot", "restore", "tier")
]


def save(
    bench: Bench, generation: int, steps: list[int], environment: pytest.MonkeyPatch, fault: str = ""
) -> int:
    """Have a writer of its own take snapshots of two ranks; return its exit code, or 0 if it outlived them."""
    environment.setenv(fault_injection.VARIABLE, fault)
    writer = bench.writer(keep_last=KEEP)
    bench.catalog.claim_generation({})
    try:
        clients = [bench.connect(writer, rank, 2, generation=generation) for rank in range(2)]
        for step, (rank, client) in itertools.product(steps, enumerate(clients)):
            bench.share(client, step, rank=rank, generation=generation, size=SIZE)
        for client in clients:
            client.flush(300)
    except SnapshotError:
        return writer.process.wait(300)
    return 0


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory, real_processes: None) -> Path:
    """A run whose first generation took three snapshots and kept two."""
    bench = Bench(str(tmp_path_factory.mktemp("history") / "run"))
    with pytest.MonkeyPatch.context() as environment:
        assert 0 == save(bench, 1, [1, 2, 3], environment)
    bench.close()
    return bench.catalog.storage.local_path()


def whole(catalog: Catalog) -> list[Manifest]:
    """Return the committed snapshots, newest first, each byte of them and of what they hold looked at."""
    assert {} == catalog.damaged()
    found = catalog.committed()
    for manifest in found:
        assert [] == verify.verify(catalog, manifest)
        assert {"position": {"step": manifest.step}, "state": {}} == verify.read_state(catalog, manifest)
        assert {"a0", "b0", "a1", "b1"} == set(manifest.tensors)
        for rank in range(2):
            place = manifest.tensors[f"a{rank}"]
            data = catalog.storage.read(f"{catalog.folder(manifest.name)}/{place.file}")
            staged = data[place.offset : place.offset + place.nbytes]
            assert Bench.content(manifest.step, rank, SIZE)[: SIZE // 2] == staged
    return found


def leftovers(catalog: Catalog) -> list[str]:
    """Return every file that belongs to no committed snapshot."""
    own = {f"{m.name}/{file}" for m in catalog.committed() for file in (*m.files, "MANIFEST.json")}
    folders = catalog.storage.list(catalog.folder())
    found = {
        f"{folder}/{file}" for folder in folders for file in catalog.storage.list(catalog.folder(folder))
    }
    return sorted(found - own)


@pytest.mark.parametrize("arrival", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("point", IN_THE_WRITER)
def test_writer_killed(
    bench_at: Callable[[str], Bench],
    history: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    arrival: int,
) -> None:
    """The newest that was committed is whole, as are all that retention keeps; the next generation clears the rest."""
    bench = bench_at(str(shutil.copytree(history, tmp_path / "run")))
    bench.prefix = ""
    code = save(bench, 2, [4, 5, 6], monkeypatch, f"{point}=kill@{arrival}")
    assert -signal.SIGKILL == code, f"{point} was not reached {arrival} times"

    steps = [manifest.step for manifest in whole(bench.catalog)]
    assert steps[0] in (3, 4, 5, 6)
    assert list(range(steps[0], steps[0] - KEEP, -1)) == steps[:KEEP]  # never a gap: what is kept is there

    assert 0 == save(bench, 3, [7], monkeypatch)
    assert [7, steps[0]] == [manifest.step for manifest in whole(bench.catalog)]
    assert [] == leftovers(bench.catalog)


@pytest.mark.integration
@pytest.mark.parametrize(
    "point",
    [
        "shares.mid_write",
        pytest.param("shares.after_write", marks=pytest.mark.nightly),
        "commit.before_manifest",
        "commit.committed",
        pytest.param("retention.between", marks=pytest.mark.nightly),
    ],
)
def test_writer_killed_at_an_object_store(
    bench_at: Callable[[str], Bench],
    history: Path,
    s3_bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
) -> None:
    """Where nothing can be renamed, too: without its manifest no key is a snapshot, and the next generation clears it."""
    bench = bench_at(f"s3://{s3_bucket}/runs")
    bench.prefix = ""
    storage = bench.catalog.storage
    for file in (path for path in history.rglob("*") if path.is_file()):
        storage.write(str(file.relative_to(history)), [file.read_bytes()])
    assert [3, 2] == [manifest.step for manifest in whole(bench.catalog)]
    assert -signal.SIGKILL == save(bench, 2, [4, 5], monkeypatch, f"{point}=kill@1")
    steps = [manifest.step for manifest in whole(bench.catalog)]
    assert (steps[0] == 4) == point.startswith(("commit.committed", "retention"))
    assert list(range(steps[0], steps[0] - KEEP, -1)) == steps[:KEEP]

    assert 0 == save(bench, 3, [7], monkeypatch)
    assert [7, steps[0]] == [manifest.step for manifest in whole(bench.catalog)]
    assert [] == leftovers(bench.catalog)


@pytest.mark.e2e
def test_worker_killed(bench: Bench, forked: ForkedPrograms) -> None:
    """Each rank at each point of staging: a snapshot whose shares were all handed over is kept, no other is there."""
    address = bench.writer(keep_last=KEEP).address
    arguments = (address, bench.uri, *IN_A_SAVING_WORKER)
    program = forked.start(DYING_WORKERS, *arguments, environment=os.environ)
    assert 0 == program.wait(300), program.stderr.read_text()
    expected = [
        [point, rank, 2 if point == "snapshot.after_stage" else 1]
        for point in IN_A_SAVING_WORKER
        for rank in range(2)
    ]
    assert expected == [json.loads(line) for line in program.stdout.read_text().splitlines()]
    assert [] == leftovers(bench.catalog)
