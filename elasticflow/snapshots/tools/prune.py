"""Retention by hand: the snapshots that go, the bytes that frees, and the removal itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow import run_folder
from elasticflow.snapshots.format import policy
from elasticflow.snapshots.format.manifest import FILE_NAME, Manifest
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.publish import Publisher, bare_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from elasticflow.protocol.snapshot_settings import Keep
    from elasticflow.snapshots.store.catalog import Catalog

    Watch = Callable[[Manifest], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True)
class Leftover:
    """A folder that a writer left unfinished, or that was removed or swept by half."""

    folder: str
    size: int


@dataclass(frozen=True)
class Pruning:
    """Snapshots to remove, and snapshots to keep.

    Attributes:
        going: Snapshots that no rule keeps, the newest first: one that borrows goes before what it borrows from.
        staying: Reasons of each of the others to stay.
        damaged: Snapshots newer than the newest whole one, with what is wrong; they are left alone.
        leftovers: Folders of no snapshot.
    """

    going: tuple[Manifest, ...]
    staying: dict[str, set[str]]
    damaged: dict[str, list[str]]
    leftovers: tuple[Leftover, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each folder that goes."""
        return {each.name: each.size for each in self.going} | {e.folder: e.size for e in self.leftovers}

    @property
    def size(self) -> int:
        """Bytes that are freed."""
        return sum(self.sizes.values())


def plan(catalog: Catalog, rules: Keep, *, dead: int, watch: Watch) -> Pruning:
    """Return the snapshots that the rules let go. Nothing is removed.

    The newest snapshot is read and verified, and on damage the one before it, until one is whole: the rules
    count from there, so that what stays can be restored.

    Args:
        dead: No writer of this generation or an older one lives any more.
        watch: Called before a snapshot is verified; returns what is told the bytes read so far.

    Raises:
        OSError: the storage failed.
        SnapshotError: the same.
        OtherVersionError: a snapshot is another version's, and may borrow files from any other one.
    """
    snapshots, damaged = list(catalog.of_this_version()), {}
    for snapshot in snapshots:
        with watch(snapshot) as progress:
            problems = verify.verify(catalog, snapshot, progress)
        if not problems:
            break
        damaged[snapshot.name] = problems
    good = [snapshot for snapshot in snapshots if snapshot.name not in damaged]
    staying = policy.reasons(good, rules, pinned=catalog.pinned())
    # Files that a damaged snapshot borrows may be whole.
    needed = {owner for snapshot in snapshots if snapshot.name in damaged for owner in snapshot.borrowed_from}
    for name in needed & {snapshot.name for snapshot in good}:
        staying.setdefault(name, set()).add("borrowed")
    going = tuple(snapshot for snapshot in good if snapshot.name not in staying)
    return Pruning(going, staying, damaged, tuple(_leftovers(catalog, dead)))


def carry_out(catalog: Catalog, pruning: Pruning) -> Iterator[str]:
    """Remove the snapshots and folders that go, each snapshot's manifest first; yield each name once it is gone.

    One that was pinned since the plan was made stays.

    Raises:
        OSError: the storage failed; what was not yielded is still there, whole or not at all.
    """
    for snapshot in pruning.going:
        if not catalog.is_pinned(snapshot.name):
            catalog.remove_snapshot(snapshot.name)
            yield snapshot.name
    for leftover in pruning.leftovers:
        Publisher(catalog).clear(leftover.folder)
        yield leftover.folder


def _leftovers(catalog: Catalog, dead: int) -> Iterator[Leftover]:
    storage = catalog.storage
    for folder in storage.list(catalog.folder()):
        name = bare_name(folder)
        match = run_folder.SNAPSHOT_NAME.fullmatch(name)
        if match is None or int(match["generation"]) > dead:
            continue
        place = f"{catalog.folder()}/{folder}"
        files = storage.list(place)
        if folder != name or FILE_NAME not in files:
            yield Leftover(folder, sum(storage.size(f"{place}/{file}") for file in files))
