"""How long `validate` takes, against the imports it cannot do without: `python tests/measured/benchmarks/validate.py`.

Whole processes, in turn, so that other load on the machine meets both; the ratio of the medians is what counts.
Then many files in one call, and what a shell waits for when it completes.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TARGET = 1.8
MANY = 200
MOST_MORE_S = 1.0
CASES = 1000
MOST_MATRIX_S = 1.0
# What the installed command does.
ELASTICFLOW = ("-c", "from elasticflow.__main__ import main; main()")
COMPLETED = ("run", "jobs/mnist.toml", "--set", "train.")


def seconds(*arguments: str, cwd: Path = ROOT, **variables: str) -> float:
    """Return the wall time of one Python process."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment |= variables
    environment["PYTHONPATH"] = str(ROOT)  # also from another folder, and before it is installed
    command = [sys.executable, *arguments]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL)
    # Not by `timeout=`: that looks every 50 ms whether the process has ended.
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    code = process.wait()
    elapsed = time.perf_counter() - start
    watchdog.cancel()
    assert code == 0, f"{command} ended with {code}"
    return elapsed


def many_files(folder: Path) -> list[str]:
    """Return variants of the main job under a copy of its project: name, width and learning rate are each one's own."""
    for name in ("jobs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "pyproject.toml").touch()
    text = (folder / "jobs" / "mnist.toml").read_text("utf-8")
    names = [f"jobs/variant{number}.toml" for number in range(MANY)]
    for number, name in enumerate(names):
        one = text.replace('name = "mnist"', f'name = "mnist{number}"')
        one = one.replace("width = 32", f"width = {32 + number}").replace(
            "lr = 3e-3", f"lr = {number + 1}e-3"
        )
        (folder / name).write_text(one, "utf-8")
    return names


def matrix_file(folder: Path) -> str:
    """Return a file of 5,000 lines beside those copies: each case with a learning rate, seed and width of its own."""
    cases = [
        f"\n[matrix.cases.c{number:04d}]\noptimizer.args.lr = {number + 1}e-5\njob.seed = {number}\n"
        f"model.args.width = {16 + number}"
        for number in range(CASES)
    ]
    text = "\n".join(['extends = "mnist.toml"', *cases, ""])
    assert text.count("\n") >= 5 * CASES
    (folder / "jobs" / "sweep.toml").write_text(text, "utf-8")
    return "jobs/sweep.toml"


def main(rounds: int = 15) -> int:
    """Print the figures; 1 when a target is missed."""
    validate = (*ELASTICFLOW, "validate", "jobs/mnist.toml")
    imports = ("-c", "import click; from pydantic import BaseModel")
    seconds(*validate)  # compiled files and the disk cache are there for both
    ours, theirs, completion = [], [], []
    for _ in range(rounds):
        theirs.append(seconds(*imports))
        ours.append(seconds(*validate))
        completion.append(seconds(*ELASTICFLOW, *COMPLETED, _ELASTICFLOW_COMPLETE="zsh"))
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"import click, pydantic: {statistics.median(theirs) * 1000:.0f} ms (median of {rounds})")
    print(f"elasticflow validate:   {statistics.median(ours) * 1000:.0f} ms")
    print(f"ratio: {ratio:.2f} (at most {TARGET})")
    print(f"completion of --set:    {statistics.median(completion) * 1000:.0f} ms")
    with tempfile.TemporaryDirectory() as folder:
        names = many_files(Path(folder))
        many = [seconds(*ELASTICFLOW, "validate", *names, cwd=Path(folder)) for _ in range(3)]
        sweep = matrix_file(Path(folder))
        matrix = [seconds(*ELASTICFLOW, "validate", sweep, cwd=Path(folder)) for _ in range(5)]
    more = statistics.median(many) - statistics.median(ours)
    print(f"{MANY} files: {more:.2f} s more (at most {MOST_MORE_S})")
    cases = statistics.median(matrix)
    print(f"5,000 lines, {CASES:,} cases: {cases:.2f} s (at most {MOST_MATRIX_S}; median of 5)")
    return int(ratio > TARGET or more > MOST_MORE_S or cases > MOST_MATRIX_S)


if __name__ == "__main__":
    sys.exit(main())
