"""What the same bits at every world size cost, and what it takes to find a place in the order of samples.

    python tests/measured/benchmarks/trajectory.py [--blocks 60] [--json FILE]

* **exact**: steps per second of `exact.ExactStep` against DistributedDataParallel, on one MLP and one set of batches,
  in one torchrun group of two processes and in short blocks by turns, so that a burst of other work meets all of them.
  With as many virtual shards as workers, and with four times as many; the plain loop takes its part of a batch in one
  forward.
* **batch**: the same for `ddp.DDPStep`, which the plain loop is written by hand for.
* **seek**: time and memory to find sample 10^9 / 2 of an epoch of 10^9, beside what torch's samplers do for 10^7, and
  torchdata's StatefulDataLoader, where it is installed, resuming in the middle of 10^6.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

BATCH = 256
FEATURES = 256
SIZES = {"2M": 832, "20M": 2992}  # width of three hidden layers
LEAST = {
    ("2M", "batch"): 0.95, ("2M", "exact 2"): 0.95, ("2M", "exact 8"): 0.7,
    ("20M", "batch"): 0.95, ("20M", "exact 2"): 0.85, ("20M", "exact 8"): 0.55,
}  # fmt: skip
WAYS = ("ddp", "batch", "exact 2", "exact 8")  # by hand, and ours; how many virtual shards
MOST_SEEK_S = 1e-3


class Loop:
    """Steps of one way of training, on batches that lie in memory.

    Args:
        width: Of the MLP.
        way: One of WAYS.
    """

    def __init__(self, me: Any, width: int, way: str) -> None:
        import torch
        from torch import nn
        from torch.nn.functional import cross_entropy
        from torch.nn.parallel import DistributedDataParallel

        from elasticflow.runtime.training.ddp import DDPStep
        from elasticflow.runtime.training.exact import ExactStep

        torch.manual_seed(0)
        sizes = [FEATURES, width, width, width, 10]
        layers: list[nn.Module] = []
        for inner, outer in itertools.pairwise(sizes):
            layers += [nn.Linear(inner, outer), nn.GELU()]
        self.model = nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(BATCH, FEATURES)
        self.targets = torch.randint(0, 10, (BATCH,))
        self._me, self._way, self._step = me, way, 0
        self._shards = int(way.removeprefix("exact ")) if way.startswith("exact") else None
        self._loss = cross_entropy
        options: dict[str, Any] = {"precision": "fp32", "on_nonfinite": "stop"}
        self._group: Any
        if way == "ddp":
            self._group = DistributedDataParallel(self.model)
        elif self._shards is None:
            self._group = DDPStep(me, self.model, self._step_of, ddp={}, **options)
        else:
            self._group = ExactStep(me, self.model, self._step_of, virtual_shards=self._shards, **options)

    def _step_of(self, model: Any, batch: Any) -> Any:
        return self._loss(model(batch[0]), batch[1])

    def block(self, steps: int) -> float:
        """Do so many steps and return their seconds; every rank."""
        import torch
        import torch.distributed as dist

        torch.use_deterministic_algorithms(mode=self._shards is not None)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self._plain() if self._way == "ddp" else self._ours()
            self.optimizer.step()
        dist.barrier()
        return time.perf_counter() - began

    def _plain(self) -> None:
        low = self._me.rank * BATCH // 2
        part = slice(low, low + BATCH // 2)
        self._loss(self._group(self.inputs[part]), self.targets[part]).backward()  # type: ignore[no-untyped-call]

    def _ours(self) -> None:
        from elasticflow.runtime.data.index_loader import Batch
        from elasticflow.runtime.data.step_plan import rank_pieces, shard_pieces
        from elasticflow.runtime.process.position import Position

        self._step += 1
        if self._shards is None:
            pieces = rank_pieces(BATCH, BATCH, None, 2, self._me.rank)
        else:
            from elasticflow.runtime.process.shard_layout import ShardLayout

            pieces = shard_pieces(BATCH, BATCH, self._shards, ShardLayout(2, self._me.rank))

        def read() -> Iterator[tuple[Any, int]]:
            for _, low, high in pieces:
                yield (self.inputs[low:high], self.targets[low:high]), high - low

        end = Position(self._step, 0, 0, 0, is_epoch_end=False)
        self._group.forward_backward(Batch(BATCH, end, [1] * len(pieces), read()))


def work(folder: Path, blocks: int, sizes: dict[str, int]) -> None:
    """Measure as one worker; rank 0 leaves result.json."""
    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.runtime import worker

    me = worker.join(
        "trajectory", "0" * 16, folder, SnapshotSettings(uri=None, every=("1 h",)), seed=1, threads=1
    )
    found: dict[str, dict[str, float]] = {}
    for name, width in sizes.items():
        ways = {way: Loop(me, width, way) for way in WAYS}
        steps = max(2, 20 * 832**2 // width**2)
        for loop in ways.values():
            loop.block(5)
        rows = []
        for number in range(blocks):
            order = list(ways) if number % 2 == 0 else list(ways)[::-1]
            rows.append({way: ways[way].block(steps) for way in order})
        found[name] = {
            "parameters": sum(p.numel() for p in ways["ddp"].model.parameters()),
            "ddp steps/s": round(steps / statistics.median(row["ddp"] for row in rows), 1),
            **{way: round(statistics.median(row["ddp"] / row[way] for row in rows), 3) for way in WAYS[1:]},
        }
    if me.rank == 0:
        (folder / "result.json").write_text(json.dumps(found))
    me.barrier()
    os._exit(0)


def seconds_and_bytes(call: Callable[[], object]) -> tuple[float, int]:
    """Return the best time of five calls, and the peak memory of one."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return min(times), peak


def seek() -> dict[str, Any]:
    """Return what finding a batch in the middle of an epoch costs."""
    import numpy as np
    import torch

    from elasticflow.runtime.data.index_schedule import IndexSchedule

    schedule = IndexSchedule(10**9, BATCH, epochs=2, seed=1)
    places = np.arange(5 * 10**8, 5 * 10**8 + BATCH)
    ours_s, ours_bytes = seconds_and_bytes(lambda: schedule.indices(places))
    theirs_s, theirs_bytes = seconds_and_bytes(lambda: torch.randperm(10**7).tolist()[:BATCH])
    return {
        "ours, 10^9 samples": {"ms": round(ours_s * 1e3, 3), "kB": ours_bytes // 1000},
        "randperm, 10^7 samples": {"ms": round(theirs_s * 1e3, 1), "kB": theirs_bytes // 1000},
        "StatefulDataLoader, 10^6 samples": stateful_loader(),
    }


class Numbers:
    """A map-style dataset that costs next to nothing."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> int:
        return index


def stateful_loader() -> dict[str, Any]:
    """Return what it costs torchdata's loader to continue in the middle of a shuffled epoch."""
    try:
        torchdata: Any = importlib.import_module("torchdata.stateful_dataloader")
    except ImportError:
        return {"skipped": "torchdata is not installed"}

    def make() -> Any:
        return torchdata.StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, collate_fn=list)

    loader = make()
    for number, _ in enumerate(loader, 1):
        if number == len(Numbers()) // BATCH // 2:
            break
    state = loader.state_dict()

    def go_on() -> None:
        loader = make()
        loader.load_state_dict(state)
        next(iter(loader))

    seconds, peak = seconds_and_bytes(go_on)
    return {"ms": round(seconds * 1e3, 1), "kB": peak // 1000}


def main() -> int:
    """Print what was measured; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=60, help="blocks of each way, of some 0.6 s")
    parser.add_argument("--only", choices=SIZES, help="this model alone")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {options.only: SIZES[options.only]} if options.only else SIZES
    if options.work:
        work(options.work, options.blocks, sizes)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        argv += [f"--blocks={options.blocks}", f"--work={folder}"]
        argv += [f"--only={options.only}"] if options.only else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTICFLOW_RUN_FOLDER": folder}
        subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=1200)
        steps = json.loads((Path(folder) / "result.json").read_text())
    figures = {"steps": steps, "seek": seek()}
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    missed = [
        f"{name}, {way}" for (name, way), least in LEAST.items() if name in sizes and steps[name][way] < least
    ]
    if figures["seek"]["ours, 10^9 samples"]["ms"] >= MOST_SEEK_S * 1e3:
        missed.append("seek")
    print(f"targets: {'met' if not missed else 'MISSED: ' + '; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
