"""How fast training goes on after a killed worker, a lost node, a new node: elasticflow and torchrun.

    python tests/benchmarks/recovery.py [--only PART ...] [--who WHO] [--tries 10] [--rival-tries N] [--json FILE]

Two workers train on the digits and save every 20 steps; in the midst of it something happens. torchrun is started as
its documentation says, anew for each try, and runs `recovery_script.py`. Times are those of the steps' own lines and
of events, from the kill, or from the last step before.

* **worker**: one of two workers of a node is killed, rank 0 and rank 1 by turns.
* **nodes**: a second node comes, and the pause in the steps is taken; then everything of it is killed at once, and
  nobody is left to tell: a machine has vanished.
* **agent**: only the second node's agent is killed, and what started it tells. Not tried with torchrun, where the
  workers then go on without it.
* the same with **-slow**: the model's module sleeps for 3 s when it is imported.

With `--json` the tries are added to those in the file, and the tables are those of all: short pieces make one table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# The path comes first.
from tests.benchmarks import recovery_figures as figures
from tests.benchmarks.recovery_figures import OURS, SLOW, THEIRS
from tests.benchmarks.recovery_ours import Ours
from tests.benchmarks.recovery_torchrun import Torchrun
from tests.end_to_end.harness import project_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.benchmarks.recovery_figures import Try
    from tests.end_to_end.harness import Project

_SLOW_MODULE = '''"""The digits' network, in a module that takes long to import."""

import time

from examples.mnist import Net

__all__ = ["Net"]

time.sleep(3)
'''


WAYS = ("worker", "nodes", "agent")


def attempts(project: Project, way: str, who: str, tries: int, limit_s: float) -> Iterator[tuple[str, Try]]:
    """Yield each try, with the name of its part, as it is made."""
    slow = SLOW if way.endswith(SLOW) else ""
    model = "examples.slow" if slow else "examples.mnist"
    maker = Ours(project, model) if who == OURS else Torchrun(project.root, model, limit_s)
    make = getattr(maker, way.removesuffix(SLOW), None)
    for name, made in make(tries) if make is not None else ():
        yield name + slow, made


def main() -> int:
    """Make the tries, print the tables, and return 1 if a bound is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ways = figures.names(WAYS)
    parser.add_argument("--only", nargs="+", choices=ways, default=ways, help="what happens")
    parser.add_argument("--who", choices=(OURS, THEIRS), help="one of the two")
    parser.add_argument("--tries", type=int, default=10, help="of each")
    parser.add_argument("--rival-tries", type=int, help="torchrun's, where it takes too long for as many")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that torchrun has to go on")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing new begins")
    parser.add_argument("--json", type=Path, help="add the tries to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and nothing that was started is left
    end = time.monotonic() + options.seconds
    tries: figures.Tries = {}
    if options.json and options.json.exists():
        tries = figures.from_json(json.loads(options.json.read_text()))
    most = {
        OURS: options.tries,
        THEIRS: options.tries if options.rival_tries is None else options.rival_tries,
    }
    with tempfile.TemporaryDirectory() as folder, project_at(Path(folder) / "project") as project:
        project.write("examples/slow.py", _SLOW_MODULE)
        for way, who in itertools.product(options.only, (options.who,) if options.who else (OURS, THEIRS)):
            for name, made in attempts(project, way, who, most[who], options.limit):
                tries.setdefault(name, {}).setdefault(who, []).append(made)
                print(f"{name} {who}: {made}", file=sys.stderr, flush=True)
                if options.json:  # at once: a piece may be cut off
                    options.json.write_text(json.dumps(figures.to_json(tries), indent=1) + "\n")
                if time.monotonic() > end:
                    break
    print(figures.table(tries), end="\n\n")
    if any(OURS in by for by in tries.values()):
        print(figures.way(tries), end="\n\n")
    kept = figures.bounds(tries)
    for words, is_kept in kept.items():
        print(f"{'kept' if is_kept else 'BROKEN'}: {words}")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
