"""Snapshots against torch's own ways: stall, time to durable, memory, load time, bytes per rank.

    python tests/measured/benchmarks/snapshot.py [--parameters 50000000] [--rounds 7] [--parts times] [--folder F] [--json FILE]

* **times**: one torchrun group of two processes holds a model and its AdamW and saves them in each way in turn, in
  another order each round, each at rest before the next one starts. *Stall*: from the call to its return, when training
  may continue, on the slowest rank. *Durable*: from the call until all is on the disk with fsync. `copy` copies as many
  bytes as each rank of ours stages, in one piece, into shared memory that is there: the least a stall can be.
  Then each way loads what it saved, with the files in the page cache (*warm*) and dropped from it (*cold*). `dcp.load`
  loads in place and is done; the others also give the optimizer its state, and ours verifies every byte.
* **loads**, only if asked for: the loads alone, of what each way saved once.
* **worlds**: groups of 1, 2 and 4 processes: the bytes that a rank stages, and the stall.
* **memory**: groups of two save twice in quick succession, then load: the most memory of all their processes above what
  it was before, shared memory counted once, as a multiple of the state.

A quick look: `--parameters 5000000 --rounds 2 --parts times`. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.measured.benchmarks import snapshot_figures as figures  # the path comes first

GROUP = Path(__file__).with_name("snapshot_group.py")
PARTS = ("times", "worlds", "memory")
ALONE = ("loads",)
WORLDS = (1, 2, 4)
LIMIT_S = 900


def measured(options: argparse.Namespace, what: str, world_size: int = 2) -> dict[str, Any]:
    """Return what one group measured; its standard error is shown if it fails."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        argv = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={world_size}",
        ]
        argv += [str(GROUP), folder, f"--what={what}", f"--rounds={options.rounds}"]
        argv += [f"--parameters={options.parameters}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTICFLOW_RUN_FOLDER": folder}
        log = Path(folder) / "log.txt"
        with log.open("w") as stream:
            ended = subprocess.run(
                argv, check=False, env=environment, stdout=stream, stderr=stream, timeout=LIMIT_S
            )
        if ended.returncode:
            sys.stderr.write(log.read_text())
            raise SystemExit(f"the group that measures {what} ended with code {ended.returncode}")
        found: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return found


def main() -> int:
    """Start the groups, print what they measured, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--parameters", type=int, default=50_000_000, help="of the model; AdamW has twice as many"
    )
    parser.add_argument("--rounds", type=int, default=7, help="how often each way is measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS + ALONE, default=PARTS, help="what to measure")
    parser.add_argument("--folder", help="where the files go; default: the folder for temporary files")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    found: figures.Figures = {}
    if "times" in options.parts:
        found["times"] = figures.of_times(measured(options, "times"))
    if "loads" in options.parts:
        found["loads"] = figures.of_loads(measured(options, "loads"))
    if "worlds" in options.parts:
        found["worlds"] = figures.of_worlds({w: measured(options, "alone", w) for w in WORLDS})
    if "memory" in options.parts:
        whiches = (*figures.MOST_MEMORY, "theirs")
        found["memory"] = figures.of_memory({which: measured(options, which) for which in whiches})
    print(figures.table(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    met = figures.targets(found)
    for target, is_met in met.items():
        print(f"{'met' if is_met else 'MISSED'}: {target}")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
