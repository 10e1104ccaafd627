"""What `run.step` takes of a step in a loop of the script's own.

    python tests/benchmarks/own_loop.py [--steps 600]

One torchrun group of two processes trains the net of jobs/mnist.toml on the digits that come along, in DistributedDataParallel, by
a loop on `run.batches` and `run.step`, with a snapshot every 100 steps. Stated is, for rank 0 and medians over blocks of 50 steps,
the CPU time of the training thread inside `run.step` as a share of the process's CPU time in these steps (bound 2 %), and of
`run.step` and the next batch together. Waiting for the other rank is not CPU time: it is what the step would wait for anyway.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

MOST_SHARE = 0.02
_WARM_UP, _BLOCK = 100, 50


def train(steps: int) -> None:
    """Train and print what it took; every rank."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    import elasticflow as ef
    from examples.mnist import Net, digits

    run = ef.join(seed=1, every="100 steps", threads=1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.keep(model=model, optimizer=optimizer)
    replicas = DistributedDataParallel(model)
    in_step, in_both, process, walls = [], [], [], []
    inside = outside = 0.0
    began, wall = time.process_time(), time.perf_counter()
    left = time.thread_time()
    for batch in run.batches(digits(split="train"), size=64, steps=steps):
        outside += time.thread_time() - left
        optimizer.zero_grad()
        loss = cross_entropy(replicas(batch.inputs), batch.targets)
        torch.autograd.backward(loss * batch.share)
        optimizer.step()
        before = time.thread_time()
        run.step(loss=loss)
        left = time.thread_time()
        inside += left - before
        if batch.end.step % _BLOCK == 0:
            now, then = time.process_time(), time.perf_counter()
            if batch.end.step > _WARM_UP:
                in_step.append(inside / (now - began))
                in_both.append((inside + outside) / (now - began))
                process.append((now - began) / _BLOCK)
                walls.append((then - wall) / _BLOCK)
            began, wall, inside, outside = now, then, 0.0, 0.0
    if run.rank == 0:
        share, both, cpu, length = map(statistics.median, (in_step, in_both, process, walls))
        print(
            json.dumps({"share": share, "with_batch": both, "cpu_ms": 1e3 * cpu, "wall_ms": 1e3 * length}),
            flush=True,
        )
    run.finish()


def main() -> int:
    """Run the group; return 0 if the bound holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options.steps)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*torchrun, __file__, "--steps", str(options.steps)], cwd=folder, text=True, capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=600, check=False,
        )  # fmt: skip
    if done.returncode:
        sys.stderr.write(done.stderr)
        return 1
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    print(f"a step takes {result['cpu_ms']:.1f} ms of CPU time, {result['wall_ms']:.1f} ms on the clock")
    print(f"run.step takes {result['share']:.2%} of it, with the next batch {result['with_batch']:.2%}")
    print(f"{'kept' if result['share'] <= MOST_SHARE else 'NOT KEPT'}: at most {MOST_SHARE:.0%}")
    return int(result["share"] > MOST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
