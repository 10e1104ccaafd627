"""What `memory = "1 step"` costs: steps per second with the memory tier against without, on jobs/mnist.toml's training.

    python tests/measured/benchmarks/memory_tier.py [--rounds 100] [--steps 20] [--width 32] [--json FILE]

One torchrun group of two processes does blocks of the generated train.py's loop without the tier and with it, on the
same model, data and optimizer; both take a snapshot every 20 steps, as the job says. A round is four blocks, A B B A:
blocks are as short as one snapshot's cycle, so that what the machine does meanwhile meets both kinds alike. Reported:

* **rate**: median steps per second of each kind; of the rounds' ratios the median, its standard error (from the
  quartiles, as of a normal distribution), and the quartiles.
* **CPU**: CPU time per step of both workers and their writer, of each kind, and the share that the tier adds.
* **hold**: what one hold takes on rank 0 by the clock, and how many of the wished snapshots the stores took.
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
    from collections.abc import Callable

    from elasticflow.runtime.snapshot.snapshots import Snapshots

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


KINDS = ("without", "with")
WARM_UP_STEPS = 60
LEAST_RATIO = 0.95
EVERY = ("20 steps", "1 epoch")  # as in jobs/mnist.toml


class Loop:
    """The loop of the generated train.py, with and without the tier."""

    def __init__(self, folder: Path, width: int, steps: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.functional import cross_entropy

        from elasticflow.runtime import worker
        from elasticflow.runtime.data import index_loader, index_schedule
        from elasticflow.runtime.snapshot import snapshots as snapshot
        from elasticflow.runtime.state.state import State
        from elasticflow.runtime.training import ddp
        from examples.mnist import Net, digits

        policies = {
            "without": snapshot.Policy(uri=None, every=EVERY),
            "with": snapshot.Policy(uri=None, every=EVERY, memory="1 step"),
        }
        me = self.me = worker.join("tier", "0" * 16, folder, policies["with"], seed=1234, threads=1)
        dataset = index_loader.open_dataset(me, lambda: digits(split="train"), "train")
        schedule = self.schedule = index_schedule.IndexSchedule(
            len(dataset), 64, steps=steps, tail="spill", seed=1234
        )
        model = self.model = Net(width=width)
        optimizer = self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

        def training_step(model: torch.nn.Module, batch: Any) -> Any:
            inputs, targets = batch
            return cross_entropy(model(inputs), targets)

        step = ddp.DDPStep(me, model, training_step, precision="fp32", on_nonfinite="stop", ddp={})
        self.forward_backward = step.forward_backward
        state = State(model=model, optimizer=optimizer, scheduler=scheduler)
        self.snapshots: dict[str, Snapshots] = {}
        for name, policy in policies.items():
            for local_rank in range(me.local_world_size):  # the first starts the writer, and says where it is
                if local_rank == me.local_rank:
                    self.snapshots[name] = snapshot.Snapshots(me, state, step, schedule, dataset, policy)
                dist.barrier()
            self.position = self.snapshots[name].restore()
        me.start_training(self.position, schedule, model, log_every=1)
        self.batches = index_loader.IndexLoader(me, dataset, schedule, None).batches(self.position)
        self.clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.holds: list[float] = []

    def block(self, name: str, steps: int) -> None:
        """Do so many steps; every rank."""
        snapshots = self.snapshots[name]
        for _ in range(steps):
            batch = next(self.batches)
            self.optimizer.zero_grad()
            loss = self.forward_backward(batch)
            self.clip()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.position = batch.end
            self.me.progress.step(self.position, loss, self.optimizer)
            began = time.perf_counter()
            snapshots.after_step(self.position)
            tier = snapshots._memory_tier
            if name == "with" and tier is not None and tier.holds(self.position):
                self.holds.append(time.perf_counter() - began)


def measured(block: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Return wall and CPU seconds of one block, started by all ranks together."""
    import torch.distributed as dist

    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    block(steps)
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu


def work(folder: Path, width: int, rounds: int, steps: int) -> None:
    """Measure as one worker of the group; rank 0 leaves result.json in *folder*."""
    import psutil
    import torch.distributed as dist

    from elasticflow.runtime import worker

    loop = Loop(folder, width, 2 * WARM_UP_STEPS + 4 * rounds * steps)
    for name in KINDS:
        loop.block(name, WARM_UP_STEPS)
    loop.holds.clear()
    writers = [p for p in psutil.Process().children() if "elasticflow.snapshots.writer.main" in p.cmdline()]
    before = [sum(p.cpu_times()[:2]) for p in writers]
    rows = []
    for number in range(rounds):
        row = {name: [0.0, 0.0] for name in KINDS}
        first, second = KINDS if number % 2 == 0 else KINDS[::-1]
        for name in (first, second, second, first):
            spent = measured(lambda count, name=name: loop.block(name, count), steps)  # type: ignore[misc]
            row[name] = [sum(pair) for pair in zip(row[name], spent, strict=True)]
        rows.append(row)
    mine = {
        "rows": rows,
        "holds": loop.holds,
        "writers_s": [sum(p.cpu_times()[:2]) - was for p, was in zip(writers, before, strict=True)],
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if loop.me.rank == 0:
        (folder / "result.json").write_text(json.dumps(everyone))
    worker.leave(loop.me, loop.position, loop.schedule)


def summary(ranks: list[dict[str, Any]], steps: int, log: Path) -> dict[str, Any]:
    """Return the figures that are reported."""
    rows, holds = ranks[0]["rows"], sorted(ranks[0]["holds"])
    ratios = [row["without"][0] / row["with"][0] for row in rows]
    low, middle, high = statistics.quantiles(ratios, n=4)
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    in_workers, in_writers = (
        {name: sum(seconds) / (2 * len(rows) * steps) for name, seconds in spent.items()}
        for spent in (
            {name: [row[name][1] for rank in ranks for row in rank["rows"]] for name in KINDS},
            dict(zip(KINDS, zip(ranks[0]["writers_s"], strict=True), strict=True)),
        )
    )
    without, with_tier = (in_workers[name] + in_writers[name] for name in KINDS)
    return {
        "steps_per_second": {
            name: round(2 * steps / statistics.median(row[name][0] for row in rows), 1) for name in KINDS
        },
        "ratio_of_rounds": {
            "median": round(middle, 4),
            "error": round(1.253 * (high - low) / 1.349 / len(rows) ** 0.5, 4),
            "quartiles": [round(low, 4), round(high, 4)],
        },
        "cpu_per_step_us": {
            "workers": {name: round(seconds * 1e6, 1) for name, seconds in in_workers.items()},
            "writer": {name: round(seconds * 1e6, 1) for name, seconds in in_writers.items()},
            "added": round(with_tier / without - 1, 4),
        },
        "hold_us": {
            "median": round(statistics.median(holds) * 1e6, 1),
            "90 %": round(holds[int(0.9 * len(holds))] * 1e6, 1),
        },
        "snapshots_committed": events.count("snapshot.committed"),
    }


def main() -> int:
    """Start the group, print what it measured, and return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="of four blocks each")
    parser.add_argument("--steps", type=int, default=20, help="steps in a block")
    parser.add_argument("--width", type=int, default=32, help="of the network; the job's is 32")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.width, options.rounds, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        argv += [f"--rounds={options.rounds}", f"--steps={options.steps}", f"--work={folder}"]
        argv += [f"--width={options.width}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTICFLOW_RUN_FOLDER": folder}
        subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=1200)
        log = Path(folder) / "logs" / "g0001" / "rank0.jsonl"
        figures = summary(json.loads((Path(folder) / "result.json").read_text()), options.steps, log)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    is_met = figures["ratio_of_rounds"]["median"] >= LEAST_RATIO
    print(f"target (ratio >= {LEAST_RATIO}): {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
