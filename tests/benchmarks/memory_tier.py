"""What `memory = "1 step"` costs: steps per second with the memory tier against without, on jobs/mnist.toml's training.

    python tests/benchmarks/memory_tier.py [--blocks 20] [--steps 100] [--width 32] [--json FILE]

One torchrun group of two processes does blocks of the generated train.py's loop without the tier and with it in turn
(A B B A ...), on the same model, data and optimizer; both take a snapshot every 20 steps, as the job says. Reported:
median steps per second of each, and of the pairs' ratios the median and quartiles; what one hold takes on rank 0;
how many of the wished snapshots the store took; and the writers' CPU time for each step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticflow.runtime.snapshot import Snapshots

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.overhead import measured  # the path comes first

WARM_UP_STEPS = 60
LEAST_RATIO = 0.95
JOB = {"every": ("20 steps", "1 epoch"), "keep_last": 3}  # as in jobs/mnist.toml, without the best one


class Loop:
    """The loop of the generated train.py, with and without the tier."""

    def __init__(self, folder: Path, width: int, steps: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.functional import cross_entropy

        from elasticflow.runtime import data, order, replicas, snapshot, worker
        from elasticflow.runtime.state import State
        from examples.mnist import Net, digits

        policies = {
            "without": snapshot.Policy(uri=None, **JOB),  # type: ignore[arg-type]
            "with": snapshot.Policy(uri=None, memory="1 step", **JOB),  # type: ignore[arg-type]
        }
        me = self.me = worker.join("tier", "0" * 16, folder, policies["with"], seed=1234, threads=1)
        dataset = data.open_dataset(me, lambda: digits(split="train"), "train")
        schedule = self.schedule = order.Schedule(len(dataset), 64, steps=steps, tail="spill", seed=1234)
        model = self.model = Net(width=width)
        optimizer = self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

        def training_step(model: torch.nn.Module, batch: Any) -> Any:
            inputs, targets = batch
            return cross_entropy(model(inputs), targets)

        self.gradients = replicas.DataParallel(
            me, model, training_step, precision="fp32", on_nonfinite="stop", ddp={}
        ).gradients
        state = State(model=model, optimizer=optimizer, scheduler=scheduler)
        self.snapshots: dict[str, Snapshots] = {}
        for name, policy in policies.items():
            for local_rank in range(me.local_world_size):  # the first starts the writer, and says where it is
                if local_rank == me.local_rank:
                    self.snapshots[name] = snapshot.Snapshots(me, state, schedule, dataset, policy)
                dist.barrier()
            self.position = self.snapshots[name].restore()
        me.start_training(self.position, schedule, model, log_every=1)
        self.batches = data.Loader(me, dataset, schedule, None).batches(self.position)
        self.clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.holds: list[float] = []

    def block(self, name: str, steps: int) -> None:
        """Do so many steps; every rank."""
        snapshots = self.snapshots[name]
        for _ in range(steps):
            batch = next(self.batches)
            self.optimizer.zero_grad()
            loss = self.gradients(batch)
            self.clip()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.position = batch.end
            self.me.progress.step(self.position, loss, self.optimizer)
            if snapshots.due(self.position):
                began = time.perf_counter()
                snapshots.stage(self.position)
                if name == "with":
                    self.holds.append(time.perf_counter() - began)


def work(folder: Path, width: int, blocks: int, steps: int) -> None:
    """Measure as one worker of the group; rank 0 leaves result.json in *folder*."""
    import psutil

    from elasticflow.runtime import worker

    loop = Loop(folder, width, 2 * WARM_UP_STEPS + 2 * blocks * steps)
    for name in ("without", "with"):
        loop.block(name, WARM_UP_STEPS)
    loop.holds.clear()
    writers = [p for p in psutil.Process().children() if "elasticflow.snapshots.writer" in p.cmdline()]
    before = [sum(p.cpu_times()[:2]) for p in writers]
    rows = []
    for number in range(blocks):
        row = {}
        for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
            row[name] = measured(lambda count, name=name: loop.block(name, count), steps)[0]  # type: ignore[misc]
        rows.append(row)
    if loop.me.rank == 0:
        spent = [sum(p.cpu_times()[:2]) - was for p, was in zip(writers, before, strict=True)]
        result = {"rows": rows, "holds": loop.holds, "writers_s": [s / (blocks * steps) for s in spent]}
        (folder / "result.json").write_text(json.dumps(result))
    worker.leave(loop.me, loop.position, loop.schedule)


def summary(result: dict[str, Any], steps: int, log: Path) -> dict[str, Any]:
    """Return the figures that are reported."""
    rows, holds = result["rows"], sorted(result["holds"])
    ratios = [row["without"] / row["with"] for row in rows]
    low, middle, high = statistics.quantiles(ratios, n=4)
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    return {
        "steps_per_second": {
            name: round(steps / statistics.median(row[name] for row in rows), 1)
            for name in ("without", "with")
        },
        "ratio_of_pairs": {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]},
        "hold_us": {
            "median": round(statistics.median(holds) * 1e6, 1),
            "90 %": round(holds[int(0.9 * len(holds))] * 1e6, 1),
        },
        "snapshots_committed": events.count("snapshot.committed"),
        "writer_per_step_us": {
            name: round(seconds * 1e6, 1)
            for name, seconds in zip(("without", "with"), result["writers_s"], strict=True)
        },
    }


def main() -> int:
    """Start the group, print what it measured, and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each kind")
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")
    parser.add_argument("--width", type=int, default=32, help="of the network; the job's is 32")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.width, options.blocks, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        argv += [f"--blocks={options.blocks}", f"--steps={options.steps}", f"--work={folder}"]
        argv += [f"--width={options.width}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTICFLOW_RUN_FOLDER": folder}
        subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=1200)
        log = Path(folder) / "logs" / "g0001" / "rank0.jsonl"
        figures = summary(json.loads((Path(folder) / "result.json").read_text()), options.steps, log)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    is_met = figures["ratio_of_pairs"]["median"] >= LEAST_RATIO
    print(f"target (ratio >= {LEAST_RATIO}): {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
