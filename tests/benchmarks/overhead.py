"""Steps per second against a hand-written DDP loop, and the CPU time that our code takes of a step.

    python tests/benchmarks/overhead.py [--blocks 20] [--steps 100] [--root PLACE] [--json FILE]

One torchrun group of two processes does blocks of the loop in examples/ddp_tutorial/train_ddp.py and blocks of the
generated train.py's loop in turn (A B B A ...), on the same model and data. Ours writes a log line per step, beats
its heart and takes a snapshot every 100 steps; the hand-written one logs and saves nothing. Reported:

* **rate**: median steps per second of each loop, their ratio, and the quartiles of the ratio over the pairs.
* **CPU difference**: median over the pairs of process CPU time (all threads) of ours to theirs. It also credits us
  with what DataLoader and DistributedSampler cost and we do without, so it may be below nought.
* **CPU in our code**: in further blocks, CPU time of the training thread between entering and leaving our code:
  the next batch, `forward_backward`, `progress.step`, `snapshots.after_step`, and, called back by torch, our step
  module and the ballot's backward. What these call that a hand-written loop calls as well is taken out: reading and
  collating samples, the user's step, DDP's forward, backward, freeing the graph. Nothing else is: tensors we create and
  collectives we start are ours. What the measuring itself takes at these borders (a dozen a step, two clock readings
  each) is found by crossing each of them twice in every other block, and taken out. It is stated as a share of the
  whole process's CPU time per step, taken from the blocks before, which have no borders; medians over the blocks, both.
* **writer**: CPU time of the snapshot writer, a process of its own, for each step.
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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks.cpu_account import Account, draw_borders  # the path comes first

WARM_UP_STEPS = 50
SNAPSHOT_EVERY = "100 steps"
LEAST_RATIO = 0.95
MOST_SHARE = 0.02


class Ours:
    """The loop of the generated train.py, one block of steps at a time."""

    def __init__(self, folder: Path, root: str | None, steps: int, account: Account) -> None:
        import torch
        from torch.nn.functional import cross_entropy
        from torch.utils.data import default_collate

        from elasticflow.runtime import worker
        from elasticflow.runtime.data import index_loader, index_schedule
        from elasticflow.runtime.snapshot import snapshots as snapshot
        from elasticflow.runtime.state.state import State
        from elasticflow.runtime.training import ddp
        from examples.ddp_tutorial.train_ddp import CLIP_GRAD_NORM, GLOBAL_BATCH_SIZE, LEARNING_RATE, SEED
        from examples.mnist import Net, digits

        policy = snapshot.Policy(uri=None, every=(SNAPSHOT_EVERY,), keep=snapshot.Keep(last=3))
        me = self.me = worker.join("overhead", "0" * 16, folder, policy, seed=SEED, threads=1)
        dataset = index_loader.open_dataset(me, lambda: digits("train", root), "train")
        images = dataset.content
        images.__dict__["__getitems__"] = account.crossing(images.__getitems__, ours=None)
        schedule = self.schedule = index_schedule.IndexSchedule(
            len(dataset), GLOBAL_BATCH_SIZE, steps=steps, tail="spill", seed=SEED
        )
        model = self.model = Net(width=32)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.optimizer = optimizer

        def training_step(model: torch.nn.Module, batch: Any) -> Any:
            inputs, targets = batch
            return cross_entropy(model(inputs), targets)

        step = account.crossing(training_step, ours=None)
        group = ddp.DDPStep(me, model, step, precision="fp32", on_nonfinite="stop", ddp={})
        draw_borders(account, group)
        state = State(model=model, optimizer=optimizer)
        snapshots = snapshot.Snapshots(me, state, group, schedule, dataset, policy)
        self.position = snapshots.restore()
        me.start_training(self.position, schedule, model, log_every=1)
        collate = account.crossing(default_collate, ours=None)
        loader = index_loader.IndexLoader(me, dataset, schedule, None, collate=collate)
        self.clip: Callable[[], object] = lambda: torch.nn.utils.clip_grad_norm_(
            model.parameters(), CLIP_GRAD_NORM
        )
        batches = loader.batches(self.position)
        self.next_batch = account.crossing(lambda: next(batches), "next batch")
        self.forward_backward = account.crossing(group.forward_backward, "forward_backward")
        self.progress = account.crossing(me.progress.step, "progress.step")
        self.after_step = account.crossing(snapshots.after_step, "snapshots.after_step")

    def block(self, steps: int) -> None:
        """Do so many steps; every rank."""
        for _ in range(steps):
            batch = self.next_batch()
            self.optimizer.zero_grad()
            loss = self.forward_backward(batch)
            self.clip()
            self.optimizer.step()
            self.position = batch.end
            self.progress(self.position, loss, self.optimizer)
            self.after_step(self.position)
            if self.me.should_leave:
                raise SystemExit("asked to leave")


class Plain:
    """The hand-written loop, one block of steps at a time."""

    def __init__(self, folder: Path, root: str | None) -> None:
        from examples.ddp_tutorial.train_ddp import Trainer

        self.trainer = Trainer(folder / "never-written.pt", root)
        self.trainer.model.train()
        self.batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        epoch = 0
        while True:
            self.trainer.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from self.trainer.loader
            epoch += 1

    def block(self, steps: int) -> None:
        """Do so many steps; every rank."""
        for inputs, targets in islice(self.batches, steps):
            self.trainer.step(inputs, targets)


def measured(block: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Return wall and CPU seconds of one block, started by all ranks together."""
    import torch.distributed as dist

    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    block(steps)
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - wall, cpu


def work(folder: Path, root: str | None, blocks: int, steps: int) -> None:
    """Measure as one worker of the group; rank 0 leaves result.json in *folder*."""
    heartbeat = os.memfd_create("heartbeats")
    os.ftruncate(heartbeat, 4096)
    os.environ["ELASTICFLOW_HEARTBEAT_FD"] = str(heartbeat)  # as under `elasticflow run`
    import torch.distributed as dist

    from elasticflow.runtime import worker

    account = Account()
    ours = Ours(folder, root, WARM_UP_STEPS + 3 * blocks * steps, account)
    plain = Plain(folder, root)
    plain.block(WARM_UP_STEPS)
    ours.block(WARM_UP_STEPS)
    rows = []
    for number in range(blocks):
        pair = {}
        for name in ("plain", "ours") if number % 2 == 0 else ("ours", "plain"):
            pair[name] = measured(plain.block if name == "plain" else ours.block, steps)
        rows.append(pair)
    writer_before = writer_cpu(ours)
    crossed: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for number in range(2 * blocks):
        account.borders = (1, 2, 2, 1)[number % 4]
        ours.block(steps)
        crossed[account.borders].append(account.taken())
    once, twice = (medians(crossed[borders], steps) for borders in (1, 2))
    mine = {
        "rank": ours.me.rank,
        "rows": rows,
        "ours_s": {name: 2 * seconds - twice[name] for name, seconds in once.items()},
        "borders_s": sum(twice.values()) - sum(once.values()),
        "cpu_s": statistics.median(row["ours"][1] for row in rows) / steps,
        "writer_s": (writer_cpu(ours) - writer_before) / (2 * blocks * steps),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if ours.me.rank == 0:
        (folder / "result.json").write_text(json.dumps(everyone))
    worker.leave(ours.me, ours.position, ours.schedule)


def medians(blocks: list[dict[str, float]], steps: int) -> dict[str, float]:
    """Return the median over the blocks of each border's seconds in a step."""
    return {name: statistics.median(block[name] for block in blocks) / steps for name in blocks[0]}


def writer_cpu(ours: Ours) -> float:
    """Return the CPU seconds that this node's snapshot writer has used, 0 on ranks that did not start it."""
    import psutil

    children = [p for p in psutil.Process().children() if "elasticflow.snapshots.writer.main" in p.cmdline()]
    assert len(children) == (ours.me.local_rank == 0)
    return float(sum(sum(p.cpu_times()[:2]) for p in children))


def summary(ranks: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return the figures that are reported."""
    rows = ranks[0]["rows"]
    rate = {name: steps / statistics.median(row[name][0] for row in rows) for name in ("plain", "ours")}
    ratios = [row["plain"][0] / row["ours"][0] for row in rows]
    cpu = [row["ours"][1] / row["plain"][1] - 1 for rank in ranks for row in rank["rows"]]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "steps_per_second": {name: round(value, 1) for name, value in rate.items()},
        "ratio": round(rate["ours"] / rate["plain"], 4),
        "ratio_of_pairs": {
            "median": round(statistics.median(ratios), 4),
            "quartiles": [round(low, 4), round(high, 4)],
        },
        "cpu_difference": round(statistics.median(cpu), 4),
        "cpu_per_step_us": [round(rank["cpu_s"] * 1e6, 1) for rank in ranks],
        "our_code_per_step_us": [
            {name: round(seconds * 1e6, 1) for name, seconds in rank["ours_s"].items()} for rank in ranks
        ],
        "our_share": round(
            sum(sum(rank["ours_s"].values()) for rank in ranks) / sum(rank["cpu_s"] for rank in ranks), 4
        ),
        "taken_out_for_borders_us": [round(rank["borders_s"] * 1e6, 1) for rank in ranks],
        "writer_per_step_us": round(sum(rank["writer_s"] for rank in ranks) * 1e6, 1),
    }


def main() -> int:
    """Start the group, print what it measured, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=20, help="blocks of each loop")
    parser.add_argument("--steps", type=int, default=100, help="steps in a block")
    parser.add_argument(
        "--root", help="folder or URL with MNIST's four files; default: the digits of the example"
    )
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.root, options.blocks, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        argv += [f"--blocks={options.blocks}", f"--steps={options.steps}", f"--work={folder}"]
        argv += [f"--root={options.root}"] if options.root else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTICFLOW_RUN_FOLDER": folder}
        subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL, timeout=1200)
        figures = summary(json.loads((Path(folder) / "result.json").read_text()), options.steps)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    is_met = figures["ratio"] >= LEAST_RATIO and figures["our_share"] <= MOST_SHARE
    print(f"targets (ratio >= {LEAST_RATIO}, share <= {MOST_SHARE:.0%}): {'met' if is_met else 'MISSED'}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
