"""Compiles a function as a worker does, from a process that is made ready beforehand, and says what that took."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch

from elasticflow.launcher.fork_server.preload import seed_imports, unsafe_to_fork, warm_up, warm_up_compiler
from elasticflow.runtime.process import torch_private
from elasticflow.runtime.process.compiler import Compilation
from elasticflow.runtime.process.step_log import Heartbeat


def main() -> None:
    """Print one line of JSON."""
    list(warm_up())
    seed_imports(1)
    warm_up_compiler(has_gpu=False)
    ready = {name for name in sys.modules if name.startswith("torch.")}
    unsafe = unsafe_to_fork(has_gpu=False)
    drawn = torch.get_rng_state()
    torch_private.warm_up_compiler(has_gpu=False)
    compilation = Compilation(Heartbeat(None, 0))
    compilation.watch()
    sum_of_sines = torch.compile(lambda x: (x * 2).sin().sum())
    value = sum_of_sines(torch.arange(64, dtype=torch.float64))
    late = {name for name in sys.modules if name.startswith("torch.")} - ready
    said = {
        **compilation.facts(),
        "has_happened": compilation.has_happened,
        "unsafe": unsafe,
        "late": sorted(name for name in late if "compile_tasks" not in name),
        "has_drawn_nothing": torch.equal(drawn, torch.get_rng_state()),
        "value": value.item().hex(),
        "headers": [path.name for path in Path(tempfile.gettempdir()).glob("torchinductor_*/*/*.gch")],
    }
    sys.stdout.write(json.dumps(said))


if __name__ == "__main__":
    main()
