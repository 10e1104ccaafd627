"""Samplers, mixtures, collators and hooks under `verify` and `verify --faults`: drawn as declared, whatever happens.

By hand: `python -m tests.measured.campaign.samplers`; the table lies beside this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.measured.campaign.facts import head

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
STEPS, CHAOS_STEPS, FAULTS, SEED = 12, 30, 4, 3

MODULE = """\
import random

import torch
from torch import nn


class Rows:
    def __init__(self, name="train", n=300):
        draw = random.Random(name)
        self.rows = [[draw.randrange(16) for _ in range(draw.randrange(2, 12))] for _ in range(n)]
        self.lengths = [len(row) for row in self.rows]
        self.targets = [sum(row) % 3 == 0 for row in self.rows]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = list(self.rows[index])
        if random.random() < 0.3:
            row[random.randrange(len(row))] = 0
        return row, int(self.targets[index])


class Padded:
    def __init__(self, dropped=0.0):
        self.dropped = dropped

    def __call__(self, samples):
        longest = max(len(row) for row, _ in samples)
        rows = torch.tensor([row + [0] * (longest - len(row)) for row, _ in samples])
        kept = torch.rand(rows.shape) >= self.dropped
        return rows * kept, torch.tensor([target for _, target in samples])


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(16, width), nn.Dropout(0.1), nn.Linear(width, 2)

    def forward(self, rows):
        return self.head(self.drop(self.embed(rows).mean(1)))


def weights(data):
    return [1.0 + 3.0 * target for target in data.targets]


def accuracy(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean()


def look(context, scale):
    context.log_scalar("norm", scale * sum(float(each.norm()) for each in context.model.parameters()))
    context.log_scalar("length", context.dataset.sizes[0] if hasattr(context.dataset, "sizes") else len(context.dataset))
    context.log_scalar("drawn", random.random())
"""
JOB = """\
[job]
name = "drawn"
[model]
entry = "drawn:Net"
loss = "torch.nn.functional:cross_entropy"
[optimizer]
entry = "torch.optim:AdamW"
args = { lr = 1e-2 }
[evaluation]
entry = "drawn:Rows"
args = { name = "val", n = 50 }
overlap = "allowed"
every = "4 steps"
metrics = { accuracy = "drawn:accuracy" }
collate = { entry = "drawn:Padded" }
[hooks]
on_step = { entry = "drawn:look", args = { scale = 2.0 }, every = "2 steps", all_ranks = true }
on_evaluation = { entry = "drawn:look", args = { scale = 1.0 } }
[train]
steps = 60
threads = 1
consistency = "exact"
virtual_shards = 4
[nodes]
nproc_per_node = 2
[snapshots]
every = "3 steps"
[dataset]
global_batch_size = 12
collate = { entry = "drawn:Padded", args = { dropped = 0.1 } }
"""
ONE = 'entry = "drawn:Rows"\n'
DRAWN = {
    "each once, shuffled": ONE,
    "`bucket_by`": f'{ONE}sampler = {{ bucket_by = "lengths" }}\n',
    "`weights`, `draws`": f'{ONE}sampler = {{ weights = "drawn:weights", draws = 100 }}\n',
    "`balance_by`": f'{ONE}sampler = {{ balance_by = "targets" }}\n',
    "`mix`, 0.7 and 0.3": 'mix = [{ entry = "drawn:Rows", weight = 0.7 }, { entry = "drawn:Rows", args = { name = "b", n = 60 }, weight = 0.3 }]\n',
    "`mix`, `temperature`": 'mix = [{ entry = "drawn:Rows" }, { entry = "drawn:Rows", args = { name = "b", n = 60 } }]\nsampler = { temperature = 2.0 }\n',
}


def answer(folder: Path, *arguments: str) -> tuple[bool, str]:
    """Return whether a command found the same bits, and what it printed."""
    argv = [sys.executable, "-m", "elasticflow", *arguments, "--format=json"]
    done = subprocess.run(argv, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, file=sys.stderr)
    return done.returncode == 0 and bool(json.loads(done.stdout)["same"]), done.stdout


def main() -> int:
    """Write the table; return 1 if bits differ."""
    facts, rows, is_good = head(), [], True
    for name, dataset in DRAWN.items():
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            (folder / "pyproject.toml").touch()
            (folder / "drawn.py").write_text(MODULE)
            (folder / "job.toml").write_text(JOB + dataset)
            elastic = answer(folder, "verify", "job.toml", "--worlds=1,2,3", f"--steps={STEPS}")
            options = f"--faults={FAULTS}", f"--seed={SEED}", f"--steps={CHAOS_STEPS}"
            chaos = answer(folder, "verify", "job.toml", *options)
        is_good &= elastic[0] and chaos[0]
        told = ["same bits" if same else "NOT THE SAME" for same, _ in (elastic, chaos)]
        rows.append(f"| {name} | {' | '.join(told)} |")
    lines = [
        "# Samplers, mixtures, collators and hooks, killed and resized",
        "",
        f'{facts["date"]}, {facts["facts"]}, {facts["cores"]} cores, commit {facts["commit"]}; `consistency = "exact"`, 4 virtual shards.',
        "A dataset that draws, a collator made with arguments that draws (another one for the evaluation), dropout, an evaluation each",
        "4 steps, hooks on all ranks that draw. Every tensor and number of model and optimizer is compared after every step.",
        "",
        f"| drawn | `verify`: 1, 2 and 3 workers; killed, drained, resized; {STEPS} steps | `verify --faults`: {FAULTS} faults in {CHAOS_STEPS} steps |",
        "|---|---|---|",
        *rows,
    ]
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
