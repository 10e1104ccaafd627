"""Runs the tests marked `gpu`, measures restarts on the GPU, and writes a table: `python -m tests.gpu.measure [--table FILE]`.

`run.sh` makes the environment for it. Exit code: 0 all passed and every bound is kept, 1 else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

import torch

from tests.measured.benchmarks import recovery_figures as figures

ROOT = Path(__file__).resolve().parents[2]
_TESTS_S, _RECOVERY_S = 900, 480


def facts() -> dict[str, str]:
    """Return what the table is bound to, by name."""
    driver = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    is_changed = bool(_said("git", "status", "--porcelain", "--untracked-files=no"))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _said("git", "rev-parse", "--short", "HEAD") + (" and changes" if is_changed else ""),
        "GPU": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, driver {driver[0] if driver else '?'}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "Python": sys.version.split()[0],
    }


def tested(report: Path) -> dict[str, str]:
    """Run the tests marked `gpu`; return what became of each, by name."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, "tests"], cwd=ROOT, timeout=_TESTS_S, check=False)
    outcomes = {}
    for case in ET.parse(report).getroot().iter("testcase"):  # written by pytest
        worst = next((each.tag for each in case if each.tag in {"failure", "error", "skipped"}), "passed")
        outcomes[f"{case.get('classname', '')}.{case.get('name')}"] = worst
    return outcomes


def recovered(report: Path) -> figures.Tries:
    """Kill the worker on the GPU ten times, with each model that can be imported; return the tries."""
    only = [name for name in figures.names(("gpu",)) if not name.endswith(("slow", "thread"))]
    command = [
        sys.executable,
        "tests/measured/benchmarks/recovery.py",
        "--only",
        *only,
        "--who",
        figures.OURS,
    ]
    limit = f"--seconds={_RECOVERY_S}"
    subprocess.run([*command, limit, f"--json={report}"], cwd=ROOT, timeout=2 * _RECOVERY_S, check=False)
    return figures.from_json(json.loads(report.read_text())) if report.exists() else {}


def table(bound_to: dict[str, str], outcomes: dict[str, str], tries: figures.Tries, seconds: float) -> str:
    """Return the table as Markdown."""
    passed = sum(outcome == "passed" for outcome in outcomes.values())
    lines = ["# On a GPU", "", ", ".join(f"{name}: {value}" for name, value in bound_to.items()) + ".", ""]
    lines += [f"{passed} of {len(outcomes)} tests marked `gpu` passed; all of this took {seconds:.0f} s.", ""]
    lines += ["| test | |", "|---|---|", *(f"| {name} | {outcome} |" for name, outcome in outcomes.items())]
    lines += ["", figures.table(tries), "", figures.way(tries), ""]
    lines += [f"- {'kept' if kept else 'BROKEN'}: {words}" for words, kept in figures.bounds(tries).items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Test, measure, write the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", type=Path, default=Path(__file__).with_name("results.md"))
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = tested(Path(folder) / "tests.xml")
        tries = recovered(Path(folder) / "recovery.json")
    text = table(facts(), outcomes, tries, time.monotonic() - began)
    options.table.write_text(text, encoding="utf-8")
    print(text)
    is_good = set(outcomes.values()) == {"passed"} and bool(tries) and all(figures.bounds(tries).values())
    return 0 if is_good else 1


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
