"""How fast training continues after a killed worker, a lost node, a new node; `tests/measured/peers` has it beside others.

    python tests/measured/benchmarks/recovery.py [--only PART ...] [--tries 10] [--json FILE]

Two workers train on the digits and save every 20 steps; in the midst of it something happens. Times are those of events, from the
kill, or from the last step before.

* **start**: from the command to the first step; nothing happens but that.
* **worker**: one of two workers of a node is killed, rank 0 and rank 1 by turns.
* **nodes**: a second node comes, and the pause in the steps is taken; then everything of it is killed at once, and
  nobody is left to tell: a machine has vanished.
* **agent**: only the second node's agent is killed, and what started it tells.
* **gpu**: the only worker of a node, on a GPU, is killed. Only where there is one, and only if it is asked for.
* the same with **-MODEL**: the model's module imports what `recovery_models.py` says, `worker-transformers` for
  instance; where that is not installed it is left out. `--only worker worker-timm` takes some.

With `--json` the tries are added to those in the file, and the tables are those of all: short pieces make one table.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

# The path comes first.
from tests.end_to_end.harness import project_at
from tests.measured.benchmarks import recovery_figures as figures
from tests.measured.benchmarks.recovery_models import MODELS, module_of, split
from tests.measured.benchmarks.recovery_ours import Ours

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.harness import Project
    from tests.measured.benchmarks.recovery_figures import Try

WAYS = ("start", "worker", "nodes", "agent")


def attempts(project: Project, way: str, tries: int) -> Iterator[tuple[str, Try]]:
    """Yield each try, with the name of its part, as it is made."""
    part, model = split(way)
    if missing := MODELS[model].missing:
        print(f"{way} is left out: {', '.join(missing)} not installed", file=sys.stderr)
        return
    make = getattr(Ours(project, module_of(model), MODELS[model].train), part)
    for name, made in make(tries):
        yield f"{name}-{model}" if model else name, made


def main() -> int:
    """Make the tries, print the tables, and return 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ways = figures.names(WAYS)
    every = [*ways, *figures.names(("gpu",))]
    parser.add_argument("--only", nargs="+", choices=every, default=ways, help="what happens")
    parser.add_argument("--tries", type=int, default=10, help="of each")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing new begins")
    parser.add_argument("--json", type=Path, help="add the tries to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and nothing that was started is left
    end = time.monotonic() + options.seconds
    tries: figures.Tries = {}
    if options.json and options.json.exists():
        tries = figures.from_json(json.loads(options.json.read_text()))
    with tempfile.TemporaryDirectory() as folder, project_at(Path(folder) / "project") as project:
        for model, source in MODELS.items():
            if source.text is not None:
                project.write(f"{module_of(model).replace('.', '/')}.py", source.text)
        for way in options.only:
            for name, made in attempts(project, way, options.tries):
                tries.setdefault(name, []).append(made)
                print(f"{name}: {made}", file=sys.stderr, flush=True)
                if options.json:  # at once: a piece may be cut off
                    options.json.write_text(json.dumps(figures.to_json(tries), indent=1) + "\n")
                if time.monotonic() > end:
                    break
    print(figures.table(tries), figures.way(tries), sep="\n\n", end="\n\n")
    kept = figures.bounds(tries)
    for words, is_kept in kept.items():
        print(f"{'kept' if is_kept else 'BROKEN'}: {words}")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
