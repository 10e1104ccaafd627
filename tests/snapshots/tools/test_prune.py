"""Retention by hand, on snapshots of a real writer that refer to each other's files."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from elasticflow.protocol.snapshot_settings import Keep
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.tools import prune
from tests.snapshots.taking import Training, one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.store.catalog import Catalog
    from tests.snapshots.conftest import Bench


@contextlib.contextmanager
def unwatched(_: Manifest) -> Iterator[Callable[[int], None]]:
    """Watch nothing."""
    yield lambda _: None


@pytest.fixture
def names(bench: Bench) -> list[str]:
    """Names of four snapshots, the oldest first; all but the first borrow the frozen layer from it."""
    client, taken = bench.connect(bench.writer(keep_last=100)), []
    with one_thread():
        training = Training()
        for _ in range(4):
            training.step()
            taken.append(training.take([client]))
    assert bench.catalog.manifest(taken[-1]).borrowed_from == {taken[0]}
    return taken


def run(catalog: Catalog, rules: Keep) -> tuple[prune.Pruning, list[str]]:
    """Prune and return the plan and what was removed."""
    pruning = prune.plan(catalog, rules, dead=1, watch=unwatched)
    return pruning, list(prune.carry_out(catalog, pruning))


def test_a_lender_stays_while_its_borrower_does(bench: Bench, names: list[str]) -> None:
    """What the newest one refers to is never removed, and it can be read afterwards."""
    pruning, removed = run(bench.catalog, Keep(last=1))
    assert [names[2], names[1]] == removed
    assert {names[3]: {"newest", "last"}, names[0]: {"borrowed"}} == pruning.staying
    assert [] == verify.verify(bench.catalog, bench.catalog.manifest(names[3]))


def test_a_lender_of_a_damaged_snapshot_stays(bench: Bench, names: list[str]) -> None:
    """The damaged newest one is left alone, and so is all it needs."""
    path = f"{bench.catalog.folder(names[3])}/state.json"
    bench.catalog.storage.remove(path)
    pruning, removed = run(bench.catalog, Keep(last=1))
    assert ([names[1]], {names[3]: ["state.json: is absent"]}) == (removed, pruning.damaged)
    assert {names[2], names[0]} == set(pruning.staying)


def test_nothing_goes_where_nothing_is_whole(bench: Bench, names: list[str]) -> None:
    """A damaged lender damages all: then nothing is removed."""
    for file in bench.catalog.manifest(names[0]).files:
        if file.startswith("frozen"):
            bench.catalog.storage.remove(f"{bench.catalog.folder(names[0])}/{file}")
    pruning, removed = run(bench.catalog, Keep(last=1))
    assert ([], set(names)) == (removed, set(pruning.damaged))


def test_a_pin_set_after_the_plan_is_respected(bench: Bench, names: list[str]) -> None:
    """Between looking and removing somebody may have said that it stays."""
    pruning = prune.plan(bench.catalog, Keep(last=1), dead=1, watch=unwatched)
    bench.catalog.pin(names[1], "just now")
    assert [names[2]] == list(prune.carry_out(bench.catalog, pruning))


def test_a_half_removed_snapshot_is_swept(bench: Bench, names: list[str]) -> None:
    """A folder without a manifest is no snapshot; its bytes are counted and freed, unless its writer may live."""
    bench.catalog.storage.remove(f"{bench.catalog.folder(names[1])}/MANIFEST.json")
    alive = prune.plan(bench.catalog, Keep(last=9), dead=0, watch=unwatched)
    assert () == alive.leftovers
    pruning, removed = run(bench.catalog, Keep(last=9))
    assert [names[1]] == [each.folder for each in pruning.leftovers] == removed
    assert pruning.size == pruning.leftovers[0].size > 0


def test_a_half_swept_folder_is_listed_and_removed(bench: Bench, names: list[str]) -> None:
    """A sweep that was killed between the rename and the removal leaves a hidden folder, which is counted and freed."""
    folder = bench.catalog.storage.local_path(bench.catalog.folder())
    (folder / names[1]).rename(folder / f".swept-{names[1]}")
    pruning, removed = run(bench.catalog, Keep(last=9))
    assert [f".swept-{names[1]}"] == [each.folder for each in pruning.leftovers] == removed
    assert not (folder / f".swept-{names[1]}").exists()
