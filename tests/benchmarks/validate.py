"""How long `validate` takes, against the imports it cannot do without: `python tests/benchmarks/validate.py`.

Whole processes, in turn, so that other load on the machine meets both; the ratio of the medians is what counts.
Then many files in one call, and what one file more costs.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = 1.8
MANY = 200
MOST_MORE_S = 1.0


def seconds(*arguments: str, cwd: Path = ROOT) -> float:
    """Return the wall time of one Python process."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = str(ROOT)  # also from another folder, and before it is installed
    command = [sys.executable, *arguments]
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)
    return time.perf_counter() - start


def many_files(folder: Path) -> list[str]:
    """Return copies of the main job under a copy of its project."""
    for name in ("jobs", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    (folder / "pyproject.toml").touch()
    text = (folder / "jobs" / "mnist.toml").read_text("utf-8")
    names = [f"jobs/copy{number}.toml" for number in range(MANY)]
    for name in names:
        (folder / name).write_text(text, "utf-8")
    return names


def main(rounds: int = 15) -> int:
    """Print the figures; 1 when a target is missed."""
    validate = ("-m", "elasticflow", "validate", "jobs/mnist.toml")
    imports = ("-c", "import click; from pydantic import BaseModel")
    seconds(*validate)  # compiled files and the disk cache are there for both
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(seconds(*imports))
        ours.append(seconds(*validate))
    ratio = statistics.median(ours) / statistics.median(theirs)
    print(f"import click, pydantic: {statistics.median(theirs) * 1000:.0f} ms (median of {rounds})")
    print(f"elasticflow validate:   {statistics.median(ours) * 1000:.0f} ms")
    print(f"ratio: {ratio:.2f} (at most {TARGET})")
    with tempfile.TemporaryDirectory() as folder:
        names = many_files(Path(folder))
        more = seconds("-m", "elasticflow", "validate", *names, cwd=Path(folder)) - statistics.median(ours)
    print(f"{MANY} files: {more:.2f} s more (at most {MOST_MORE_S})")
    return int(ratio > TARGET or more > MOST_MORE_S)


if __name__ == "__main__":
    sys.exit(main())
