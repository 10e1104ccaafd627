"""Writers that should be dead, launches that know nothing of each other, clocks that lie."""

from __future__ import annotations

import contextlib
import signal
import stat
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow.snapshots.read import verify
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.snapshots.conftest import Bench

ANOTHER_CLOCK = """\
    #!{python}
    # A writer whose wall clock is {shift} seconds off.
    import os, runpy, sys, time
    real = time.time
    time.time = lambda: real() + {shift}
    sys.path.insert(0, os.getcwd())
    runpy.run_module("elasticflow.snapshots.writer.main", run_name="__main__")
"""
YEAR_S = 365 * 86400


def generations_of(bench: Bench) -> list[tuple[int, int]]:
    """Return generation and step of what is committed, newest first, having verified every byte."""
    catalog = bench.catalog
    assert {} == catalog.damaged()
    for found in catalog.committed():
        assert [] == verify.verify(catalog, found)
    return [(found.generation, found.step) for found in catalog.committed()]


@contextlib.contextmanager
def halted(
    bench: Bench, point: str, cue: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], str]]:
    """Yield when the writer of generation 1 has committed step 2 and stands still at *point* of a snapshot of step 9.

    What is yielded lets it continue, and returns what its worker is told of that snapshot.
    """
    monkeypatch.setenv(fault_injection.VARIABLE, f"{point}=stop@2 cue={cue}")
    cue.touch()
    writer = bench.writer(keep_last=2)
    monkeypatch.delenv(fault_injection.VARIABLE)
    bench.catalog.claim_generation({})
    zombie = bench.connect(writer)
    bench.share(zombie, 2)
    zombie.flush(20)
    bench.share(zombie, 9)
    while cue.exists():
        time.sleep(0.005)

    def go_on() -> str:
        writer.process.send_signal(signal.SIGCONT)
        (report,) = [r for r in bench.flushed(zombie, 20) if r.event != "snapshot.removed"]
        return report.event

    try:
        yield go_on
    finally:
        writer.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("point", ["commit.settled", "commit.before_fence"])
def test_zombie_halted_before_the_fence_commits_nothing(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Another host's launch continued meanwhile: the older generation's snapshot is given up and leaves nothing."""
    with halted(bench, point, tmp_path / "cue", monkeypatch) as go_on:
        bench.catalog.claim_generation({})
        successor = bench.connect(bench.writer(keep_last=2), generation=2)
        bench.share(successor, 3, generation=2)
        successor.flush(20)
        assert "snapshot.failed" == go_on()
    assert [(2, 3), (1, 2)] == generations_of(bench)
    assert 2 == len(bench.catalog.storage.list("snapshots"))


@pytest.mark.parametrize("point", ["commit.before_manifest", "commit.before_rename"])
def test_zombie_halted_behind_the_fence_changes_no_history(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """No store can look and commit in one act: what comes out of that window is never the newest, and soon goes."""
    with halted(bench, point, tmp_path / "cue", monkeypatch) as go_on:
        bench.catalog.claim_generation({})
        successor = bench.connect(bench.writer(keep_last=2), generation=2)
        for step in (3, 4):
            bench.share(successor, step, generation=2, parent=bench.name_of(2))
        successor.flush(20)
        go_on()
    assert [(2, 4), (2, 3)] == generations_of(bench)[:2]
    bench.share(successor, 5, generation=2)
    successor.flush(20)
    assert [(2, 5), (2, 4)] == generations_of(bench)
    assert 2 == len(bench.catalog.storage.list("snapshots"))


def test_two_hosts_at_one_run(bench: Bench) -> None:
    """Both save as fast as they can: from the moment the second claimed, the first commits nothing, and loses nothing."""
    hosts = [bench.writer(keep_last=100, limits={"fence_grace_s": 0.01}) for _ in range(2)]
    bench.catalog.claim_generation({"host": "a"})
    first = bench.connect(hosts[0], timeout_s=100)
    told: list[tuple[str, int]] = []

    def train() -> None:
        for step in range(1, 41):
            bench.share(first, step, size=40_000)
        told.extend(bench.outcomes(first.flush(30)))

    trainer = threading.Thread(target=train)
    trainer.start()
    while bench.catalog.newest() is None:
        time.sleep(0.001)
    assert 2 == bench.catalog.claim_generation({"host": "b"})
    second = bench.connect(hosts[1], generation=2)
    start = bench.catalog.newest()
    assert start is not None
    for step in range(start.step + 1, start.step + 6):
        bench.share(second, step, generation=2, parent=start.name)
    second.flush(30)
    trainer.join()

    kinds = [kind for kind, _ in sorted(told, key=lambda outcome: outcome[1])]
    committed = kinds.count("snapshot.committed")
    assert ["snapshot.committed"] * committed + ["snapshot.failed"] * (40 - committed) == kinds
    expected = [(2, step) for step in range(start.step + 5, start.step, -1)]
    expected += [(1, step) for step in range(committed, 0, -1)]
    assert expected == generations_of(bench)
    assert committed - start.step in (0, 1)  # at most the one that was behind the fence already


@pytest.mark.parametrize("shift", [-YEAR_S, YEAR_S])
def test_clock_that_jumps_between_snapshots(bench: Bench, tmp_path: Path, shift: int) -> None:
    """A year back or a year ahead in one generation, right again in the next: order and retention are those of steps."""
    program = tmp_path / "python-of-another-year"
    program.write_text(textwrap.dedent(ANOTHER_CLOCK).format(python=sys.executable, shift=shift))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for generation, python in ((1, sys.executable), (2, str(program)), (3, sys.executable)):
        client = bench.connect(bench.writer(python, keep_last=3), generation=generation)
        for step in (2 * generation, 2 * generation + 1):
            bench.share(client, step, generation=generation)
        client.flush(20)
        newest = bench.catalog.newest()
        assert newest is not None
        assert (generation, 2 * generation + 1) == (newest.generation, newest.step)
        is_another_year = abs(newest.created - time.time()) > YEAR_S / 2
        assert is_another_year == (generation == 2)
    assert [(3, 7), (3, 6), (2, 5)] == generations_of(bench)
    assert 3 == len(bench.catalog.storage.list("snapshots"))
