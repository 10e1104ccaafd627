"""One process of a group that saves and loads in several ways and measures it; see snapshot.py, which starts it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil  # the path comes first

from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.runtime import worker
from elasticflow.runtime.data import index_schedule
from tests.measured.benchmarks import snapshot_ways as ways
from tests.measured.benchmarks import snapshot_ways_torch as theirs
from tests.measured.benchmarks.snapshot_state import build

NEVER = ("1000000000 steps",)
LOADED = (ways.Ours, theirs.TorchSave, theirs.Checkpoint)  # kinds whose loads are measured
_WATCH_S = 0.01
_WARM_UP = (
    3  # rounds until the cache of files grows no more: memory never used before is slow in virtual machines
)


class Group:
    """This process as a rank of a group that has something to save."""

    def __init__(self, folder: Path, parameters: int) -> None:
        self.policy = SnapshotSettings(uri=None, every=("1 step",), keep=Keep(last=1))
        self.me = worker.join("snapshot", "0" * 16, folder, self.policy, seed=1, threads=1)
        self.trained = build(parameters)
        self.folder = folder
        self.step = 0

    def ours(self, **limits: Any) -> ways.Ours:
        """Return our way."""
        return ways.Ours(self.me, self.trained, replace(self.policy, **limits))

    def theirs(self) -> list[ways.Way]:
        """Return torch's ways."""
        kinds = (theirs.TorchSave, theirs.Checkpoint, theirs.AsyncThread, theirs.AsyncProcess)
        return [kind(self.trained, self.folder / f"way{number}") for number, kind in enumerate(kinds)]

    def save(self, way: ways.Way) -> list[float]:
        """Save in one way, come to rest, and return stall and seconds to durable of the slowest rank."""
        self.step += 1
        way.before_save()
        self.me.barrier()
        began = time.perf_counter()
        way.save(self.step)
        stall = time.perf_counter() - began
        way.wait()
        durable = time.perf_counter() - began
        self.me.barrier()
        way.settle()
        self.rest()
        return [self.slowest(stall), self.slowest(durable)]

    def load(self, way: ways.Way, *, cold: bool) -> float:
        """Return the seconds that the slowest rank takes to load."""
        way.before_load()
        if cold and self.me.rank == 0:
            drop_from_cache(way.folder())
        self.rest()
        began = time.perf_counter()
        way.load()
        return self.slowest(time.perf_counter() - began)

    def rest(self) -> None:
        """Return when the disk is at rest: what one way left in the cache is not another's to write."""
        if self.me.rank == 0:
            os.sync()
        self.me.barrier()

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' values."""
        return max(map(float, self.me.gather_text(repr(seconds))))


def drop_from_cache(folder: Path | None) -> None:
    """Have the files read from the disk next time."""
    assert folder is not None
    os.sync()
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def times(group: Group, rounds: int, *, alone: bool) -> dict[str, Any]:
    """Measure stall, time to durable and loads of all ways in turn, or (*alone*) ours and the plain copy only."""
    ours = group.ours()
    group.save(ours)
    nbytes = ours.nbytes()
    all_ways: list[ways.Way] = [ways.Copy(nbytes), ours, *([] if alone else group.theirs())]
    saves = in_turn(all_ways, rounds, group.save)
    loads = [] if alone else in_turn_loads(group, all_ways, rounds)
    for way in all_ways:
        way.close()
    return {
        "bytes": [int(text) for text in group.me.gather_text(str(nbytes))],
        "saves": saves,
        "loads": loads,
    }


def loads(group: Group, rounds: int) -> dict[str, Any]:
    """Measure loads alone, of what each way saved once."""
    saved: list[ways.Way] = [group.ours(), *(way for way in group.theirs() if type(way) in LOADED)]
    for way in saved:
        group.save(way)
    return {"loads": in_turn_loads(group, saved, rounds)}


def in_turn_loads(group: Group, saved: list[ways.Way], rounds: int) -> list[dict[str, list[float]]]:
    """Return what loading took, warm and cold, with those of *saved* that load, and the bare call of `dcp.load`."""
    loading = [way for way in saved if type(way) in LOADED]
    loading += [theirs.InPlace(way) for way in saved if type(way) is theirs.Checkpoint]
    return in_turn(loading, rounds, lambda way: [group.load(way, cold=cold) for cold in (False, True)])


def in_turn(
    all_ways: list[ways.Way], rounds: int, measure: Callable[[ways.Way], list[float]]
) -> list[dict[str, list[float]]]:
    """Return what each way measured in each round; another begins each time, and the first rounds are warm-up."""
    rows = []
    warm_up = min(rounds, _WARM_UP)
    for number in range(warm_up + rounds):
        turn = [all_ways[(number + place) % len(all_ways)] for place in range(len(all_ways))]
        rows.append({way.name: measure(way) for way in turn})
    return rows[warm_up:]


def memory(group: Group, which: str) -> dict[str, Any]:
    """Return the bytes that each way takes at most while saving, and while loading."""
    found = {}
    state = group.trained.nbytes
    one_buffer = {"staging_limit": f"{state * 11 // 10} B"} if which == "single" else {}
    for way in group.theirs() if which == "theirs" else [group.ours(**one_buffer)]:

        def save(way: ways.Way = way) -> None:
            for _ in range(2):
                group.step += 1
                way.before_save()
                way.save(group.step)
                if which == "theirs":  # two at once are not safe there
                    way.wait()
            way.wait()
            group.me.barrier()
            way.settle()

        def load(way: ways.Way = way) -> None:
            way.before_load()
            way.load()
            group.me.barrier()

        found[way.name] = [most_above(group, act) for act in (save, load)]
        way.close()
    return found


def most_above(group: Group, act: Callable[[], None]) -> int:
    """Return the most bytes that the group's processes have while *act* runs, above those before; 0 on other ranks."""
    group.me.barrier()
    if group.me.rank != 0:
        act()
        return 0
    before, most, is_over = memory_of_group(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(_WATCH_S):
            most = max(most, memory_of_group())

    watcher = threading.Thread(target=watch)
    watcher.start()
    act()
    is_over.set()
    watcher.join()
    return most - before


def memory_of_group() -> int:
    """Return the bytes of all processes below torchrun, memory that several share counted once."""
    total = 0
    for process in psutil.Process(os.getppid()).children(recursive=True):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text("ascii").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def main() -> None:
    """Measure what is asked for; rank 0 leaves result.json in the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument(
        "--what", choices=["times", "loads", "alone", "double", "single", "theirs"], required=True
    )
    options = parser.parse_args()
    group = Group(options.folder, options.parameters)
    if options.what in ("times", "alone"):
        result = times(group, options.rounds, alone=options.what == "alone")
    elif options.what == "loads":
        result = loads(group, options.rounds)
    else:
        result = memory(group, options.what)
    if group.me.rank == 0:
        result["state"] = group.trained.nbytes
        (options.folder / "result.json").write_text(json.dumps(result))
    schedule = index_schedule.IndexSchedule(1 << 20, 64, steps=1 << 30, tail="spill", seed=1)
    worker.leave(group.me, schedule.start, schedule)


if __name__ == "__main__":
    main()
