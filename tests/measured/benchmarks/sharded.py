"""A step of a model that workers share, against torch's `fully_shard` alone, in the same processes and by turns.

    python tests/measured/benchmarks/sharded.py [--workers 2] [--layers 6] [--width 384] [--steps 24] [--batch] [--gives-back [--by-layer] [--init meta] [--kinds shared,plain] | --snapshots]

Both train a GPT of the same size on batches of the same size, one sequence for each worker: *plain* by `fully_shard`, its own
reduce-scatter and AdamW; *ours* by `elasticflow.join(virtual_shards=W, shard=W)`, `run.wrap` and `run.gradients`, the exact
sum of gradients; with `--batch` without virtual shards. Neither clips. The table has medians, on rank 0, of CPU time and wall time of a step up to the optimizer's, and
of the paired ratios. Then each kind of worker alone, in processes of its own: its tensors, and the most memory that it had
(`VmHWM`), *whole* being the same exact job without `shard`. With `--gives-back` nothing is timed, and the C library gives
each freed tensor back to the system, as a GPU's memory would be free for the next one: the most memory is then counted from
what the process had before it made the model, once the model is made and at the end, for the kinds that `--kinds` names: *plain* is `fully_shard` alone,
*ddp* DistributedDataParallel. `--init meta` makes it block by block, as a job
with `parallel.init` does; with `--by-layer` each linear layer is gathered by itself, instead of each block of the GPT. With `--snapshots` a snapshot is taken after every second step, and only the time is told for which training
stands still, by turns for the kinds *shared* and *whole*.
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
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
WORDS, LENGTH = 2048, 64
LIMIT_S = 600


def launch(options: argparse.Namespace, kind: str, folder: Path) -> dict[str, Any]:
    """Run a group of workers of a kind, and return what rank 0 measured."""
    result = folder / f"{kind}.json"
    command = [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={options.workers}",
        ),
        *(__file__, "--kind", kind, "--result", str(result), "--layers", str(options.layers)),
        *("--width", str(options.width), "--steps", str(options.steps)),
        *(["--gives-back"] if options.gives_back else []),
        *(["--batch"] if options.batch else []),
        *(["--by-layer"] if options.by_layer else []),
        *(["--snapshots"] if options.snapshots else []),
        *("--init", options.init if kind == "shared" else "cpu"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        command, cwd=folder, env=environment, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL
    )
    found: dict[str, Any] = json.loads(result.read_text())
    log = folder / "runs" / kind / "by-hand" / "logs" / "g0001" / "rank0.jsonl"
    events = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    found["stalls"] = [event["stall_s"] for event in events if "stall_s" in event]
    return found


def most_memory() -> int:
    """Return the most bytes that this process had at any time."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024


def give_back() -> int:
    """Have the C library give freed tensors back at once, and elasticflow not ask for the opposite; return the most memory so far."""
    import ctypes

    import torch._dynamo.config  # which fully_shard imports
    import torch.distributed.fsdp  # noqa: F401

    from elasticflow.runtime.training import determinism

    determinism.keep_freed_memory = lambda: None
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD
    return most_memory()


def figures_of(model: Any, optimizer: Any, before: int) -> dict[str, int]:
    """Return bytes of this worker's tensors, the most memory beyond *before*, and how many parameters the whole model has."""
    from elasticflow.runtime.process.sharded_tensors import local_of

    parameters = list(model.parameters())
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    tensors += [tensor for state in optimizer.state.values() for tensor in state.values()]
    held = sum(local_of(tensor).nbytes for tensor in tensors)
    return {
        "tensors": held,
        "peak": most_memory() - before,
        "parameters": sum(p.numel() for p in parameters),
    }


def blocks_of(model: Any, *, by_layer: bool) -> list[Any]:
    """Return what is gathered as a whole: the GPT's blocks, or each linear layer of them."""
    if not by_layer:
        return list(model.blocks)
    return [layer for block in model.blocks for layer in (block.qkv, block.proj, block.mlp[0], block.mlp[2])]


def model_of(run: Any, config: Any, options: argparse.Namespace) -> Any:
    """Return the model of a kind of worker, shared if the workers share one."""
    import torch

    from elasticflow.runtime.training.deferred_build import DeferredBuild
    from elasticflow.runtime.training.shard_model import shard_model
    from examples.gpt.gpt import GPT

    torch.manual_seed(1)
    if options.init == "meta":
        build = DeferredBuild()
        model = build.call(GPT, config)
        shard_model(
            run.worker, model, run.worker.sharding, blocks_of(model, by_layer=options.by_layer), build
        )
        return model
    model = GPT(config)
    if options.kind == "whole":
        return model
    return run.wrap(model, blocks=blocks_of(model, by_layer=options.by_layer))


def of_torch(model: Any, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model as torch's own calls share it, or its gradients, among all workers, and its optimizer."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if options.kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        for module in (*blocks_of(model, by_layer=options.by_layer), model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def work(options: argparse.Namespace) -> None:
    """Train as one worker of a kind, and write down what was measured."""
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy

    import elasticflow as ef
    from examples.gpt.gpt import GPT, GPTConfig

    size = {"n_layer": options.layers, "n_embd": options.width, "n_head": 8, "dropout": 0.0}
    config = GPTConfig(vocab_size=WORDS, block_size=LENGTH, **size)

    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    workers = int(os.environ["WORLD_SIZE"])
    is_alone = options.kind in ("plain", "ddp")
    shard: dict[str, Any] = {} if options.kind == "whole" or is_alone else {"shard": workers}
    # Without virtual shards the sums are torch's own.
    gradients: Any = ef.Gradients(virtual_shards=None if options.batch else workers)
    if is_alone:
        gradients = None  # else elasticflow would exchange them
    every = "2 steps" if options.snapshots else "1000000 steps"
    run = ef.join(seed=1, gradients=gradients, threads=1, every=every, name=options.kind, **shard)
    before = give_back() if options.gives_back else 0
    plain: Any = None
    theirs: Any = None
    if options.kind == "paired" or is_alone:
        plain, theirs = of_torch(GPT(config), options)
    ours = plain if is_alone else model_of(run, config, options)
    built = most_memory() - before
    own = theirs if is_alone else torch.optim.AdamW(ours.parameters(), lr=1e-4)
    others = {} if plain is None or is_alone else {"plain": plain, "theirs": theirs}
    run.keep(model=ours, optimizer=own, **others)
    data = torch.randint(
        0, WORDS, (workers * options.steps, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
    for number, batch in enumerate(run.batches(data, size=workers, steps=options.steps)):

        def step_of_ours() -> None:
            own.zero_grad()
            run.gradients(lambda part: loss_of(ours, part.data), batch)  # noqa: B023  # called in this pass
            own.step()

        def step_of_theirs() -> None:
            theirs.zero_grad()
            loss_of(plain, data[run.rank : run.rank + 1]).backward()  # type: ignore[no-untyped-call]
            theirs.step()

        turns: list[tuple[str, Any]] = [] if is_alone else [("ours", step_of_ours)]
        if plain is not None:
            turns = [*turns, ("plain", step_of_theirs)]
        for name, step in turns if number % 2 else turns[::-1]:
            torch.distributed.barrier()
            began = time.process_time(), time.perf_counter()
            step()
            times[name].append((time.process_time() - began[0], time.perf_counter() - began[1]))
        run.step()
    if run.rank == 0:
        Path(options.result).write_text(
            json.dumps({"times": times, "built": built, **figures_of(ours, own, before)})
        )
    run.finish()


def main() -> int:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", action="store_true", help="the default of a job, not the exact sums")
    parser.add_argument("--gives-back", action="store_true", help="measure memory alone")
    parser.add_argument(
        "--by-layer", action="store_true", help="gather each linear layer by itself, not each block"
    )
    parser.add_argument(
        "--init", choices=("cpu", "meta"), default="cpu", help="how workers that share a model make it"
    )
    parser.add_argument("--snapshots", action="store_true", help="measure the stall of a snapshot alone")
    parser.add_argument(
        "--kinds",
        default="shared,whole",
        help="kinds of worker whose memory is measured: shared, whole, plain, ddp",
    )
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind is not None:
        work(options)
        return 0
    if options.snapshots:
        print_stalls(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="sharded-") as folder:
        alone = {kind: launch(options, kind, Path(folder)) for kind in options.kinds.split(",")}
        paired = None if options.gives_back else launch(options, "paired", Path(folder))
    count = next(iter(alone.values()))["parameters"]
    print(f"{count:,} parameters, {options.workers} workers")
    if paired is not None:
        print_times(paired)
    for name, found in alone.items():
        print(
            f"{name}: {found['tensors'] / 2**20:.0f} MiB of tensors, most memory {found['peak'] / 2**20:.0f} MiB, "
            f"{found['built'] / 2**20:.0f} MiB once the model is made"
        )
    return 0


def print_stalls(options: argparse.Namespace) -> None:
    """Print the median stall of a snapshot, by the kind of worker; three launches of each, by turns."""
    stalls: dict[str, list[float]] = {"shared": [], "whole": []}
    for _ in range(3):
        for kind in stalls:
            with tempfile.TemporaryDirectory(prefix="sharded-") as folder:
                stalls[kind] += launch(options, kind, Path(folder))["stalls"][4:]  # memory is new at first
    for kind, found in stalls.items():
        low, _, high = statistics.quantiles(found, n=4)
        print(
            f"{kind}: a snapshot stalls training for {1000 * statistics.median(found):.1f} ms "
            f"(quartiles {1000 * low:.1f} to {1000 * high:.1f}, {len(found)} snapshots)"
        )


def print_times(paired: dict[str, Any]) -> None:
    """Print the medians of both kinds of step, and their ratios."""
    for place, name in enumerate(("CPU", "wall")):
        ours, plain = ([each[place] for each in paired["times"][kind][4:]] for kind in ("ours", "plain"))
        ratios = sorted(a / b for a, b in zip(ours, plain, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        print(
            f"{name}: ours {1000 * statistics.median(ours):.0f} ms, plain {1000 * statistics.median(plain):.0f} ms, "
            f"ratio {statistics.median(ratios):.3f} (quartiles {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    sys.exit(main())
