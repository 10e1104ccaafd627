"""The examples of the gallery, trained at one to four workers; the GPT beside a plain torchrun script, over seeds.

By hand: `python -m tests.measured.campaign.gallery [exact] [torchrun]`; where transformers and peft are absent the table says so.
The tables lie beside this file.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev

from elasticflow.scaffold import gallery
from tests.measured.campaign.facts import head

ROOT = Path(__file__).resolve().parents[3]
NEEDS = {"lora": ("transformers", "peft")}
WORLDS, STEPS = "1,2,3,4", 10
SEEDS, SEED_STEPS = range(1, 6), 1000
LENGTH = f"--set=train.steps={SEED_STEPS}", f"--set=lr_scheduler.args.total={SEED_STEPS}"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def write(name: str, folder: Path) -> Path:
    """Write an example as `elasticflow init --example` does, and return its folder."""
    folder = folder / name
    folder.mkdir()
    for file, content in gallery.files_of(name).items():
        (folder / file).write_bytes(content)
    return folder


def elasticflow(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in an example's folder."""
    argv = [sys.executable, "-m", "elasticflow", *arguments]
    return subprocess.run(argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def exact_row(name: str, folder: Path) -> tuple[str, bool]:
    """Return an example's row of the table, and whether nothing differed where nothing may."""
    missing = [module for module in NEEDS.get(name, ()) if find_spec(module) is None]
    if missing:
        return f"| {name} | not tried: {', '.join(missing)} not installed | | | | |", True
    folder = write(name, folder)
    worlds, sets = WORLDS, ["--set=train.consistency=exact", "--set=train.virtual_shards=4"]
    if elasticflow(folder, "validate", "job.toml", *sets).returncode:
        worlds, sets = (
            "2",
            [],
        )  # its step moves the optimizers: what is promised is a restart with as many workers
    done = elasticflow(
        folder, "verify", "job.toml", f"--worlds={worlds}", f"--steps={STEPS}", "--format=json", *sets
    )
    print(done.stdout, done.stderr, file=sys.stderr)
    found = json.loads(done.stdout)
    trials = found["trials"]
    calm = [str(*trial["worlds"]) for trial in trials if trial["killed_after"] is None]
    killed = [" to ".join(map(str, trial["worlds"])) for trial in trials if trial["killed_after"] is not None]
    values = max((trial["comparison"]["values"] or 0 for trial in trials if trial["comparison"]), default=0)
    same = "same bits" if found["same"] else "NOT THE SAME"
    cells = name, found["consistency"], ", ".join(calm), ", ".join(killed), values, same
    return f"| {' | '.join(map(str, cells))} |", found["same"]


def exact_table(folder: Path) -> tuple[str, bool]:
    """Try every example, and return the table as Markdown, and whether all was as promised."""
    facts = head()
    rows = [exact_row(name, folder) for name in gallery.examples()]
    lines = [
        "# The examples, at one to four workers, and killed",
        "",
        f"{facts['date']}, {facts['facts']}, {facts['cores']} cores, commit {facts['commit']}; {STEPS} steps of each job as it is, but for",
        '`train.consistency = "exact"` and 4 virtual shards where the job supports it. Every tensor and number of model and optimizer',
        "is compared after every step.",
        "",
        "| example | consistency | undisturbed, at so many workers | killed, then drained and resized | compared | |",
        "|---|---|---|---|---:|---|",
        *(row for row, _ in rows),
    ]
    return "\n".join(lines) + "\n", all(is_good for _, is_good in rows)


def ours(folder: Path, seed: int) -> float:
    """Return the validation loss that the job comes to."""
    done = elasticflow(folder, "run", "job.toml", f"--run-id=seed{seed}", f"--set=job.seed={seed}", *LENGTH)
    assert done.returncode == 0, done.stdout
    lines = (folder / "runs" / "gpt" / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()
    return float([line["eval"]["loss"] for line in map(json.loads, lines) if "eval" in line][-1])


def by_hand(folder: Path, seed: int) -> float:
    """Return the validation loss that the hand-written script comes to."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [*torchrun, "train_ddp.py", f"--seed={seed}", f"--steps={SEED_STEPS}", f"--snapshot=seed{seed}.pt"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(re.findall(r"val loss ([0-9.]+)", done.stdout)[-1])


def lines_of_code(text: str) -> int:
    """Return how many lines of Python hold code: no comments, docstrings or blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return sum(1 for number, line in lines if line and line[0] != "#" and number not in docstrings)


def lines_of_job(text: str) -> int:
    """Return how many lines of TOML hold keys or tables."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def torchrun_table(folder: Path) -> str:
    """Train both over the seeds, and return the table as Markdown."""
    folder = write("gpt", folder)
    rows: list[str] = []
    losses: tuple[list[float], list[float]] = [], []
    for seed in SEEDS:
        found = ours(folder, seed), by_hand(folder, seed)
        for values, value in zip(losses, found, strict=True):
            values.append(value)
        rows.append(f"| {seed} | {found[0]:.4f} | {found[1]:.4f} |")
        print(rows[-1], file=sys.stderr)
    means, spreads = [mean(each) for each in losses], [stdev(each) for each in losses]
    between = abs(means[0] - means[1])
    noise = (sum(spread**2 for spread in spreads) / len(SEEDS)) ** 0.5
    code = {name: (folder / name).read_text() for name in ("gpt.py", "train_ddp.py", "job.toml")}
    shared = lines_of_code(code["gpt.py"])
    facts = head()
    return "\n".join(
        [
            "# The example GPT and the same training by hand, for torchrun",
            "",
            f"{facts['date']}, {facts['facts']}, {facts['cores']} cores, commit {facts['commit']}; two workers each, {SEED_STEPS} steps.",
            "",
            "Validation loss at the end, nats per character:",
            "",
            "| seed | `elasticflow run job.toml` | `torchrun train_ddp.py` |",
            "|---:|---:|---:|",
            *rows,
            f"| mean | {means[0]:.4f} | {means[1]:.4f} |",
            f"| standard deviation | {spreads[0]:.4f} | {spreads[1]:.4f} |",
            "",
            f"The means differ by {between:.4f}, which is {between / noise:.1f} standard errors of such a difference ({noise:.4f}).",
            "",
            "| lines of code, without comments, docstrings and blank lines | |",
            "|---|---:|",
            f"| model, data and loss, of both (`gpt.py`) | {shared} |",
            f"| `job.toml` | {lines_of_job(code['job.toml'])} |",
            f"| `train_ddp.py` | {lines_of_code(code['train_ddp.py'])} |",
        ]
    ) + "\n"  # fmt: skip


def main() -> int:
    """Write the tables that are asked for; return 1 if bits differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", choices=("exact", "torchrun"), default=["exact", "torchrun"])
    options = parser.parse_args()
    is_good = True
    for name in options.tables:
        with tempfile.TemporaryDirectory() as folder:
            if name == "exact":
                text, is_good = exact_table(Path(folder))
            else:
                text = torchrun_table(Path(folder))
        Path(__file__).with_name(f"gallery_{name}.md").write_text(text, encoding="utf-8")
        print(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
