"""A language model as public code has it: a config object with a size that the data knows, groups of parameters, a warm-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.system import fault_injection
from tests.end_to_end.by_hand import undisturbed
from tests.end_to_end.harness import named, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project
    from tests.forked import ForkedPrograms

GPT = """
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_embd: int = 768
    dropout: float = 0.0


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return x + self.dropout(F.gelu(self.mlp(self.ln(x))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


class Chars:
    fingerprint = "the same whatever the vocabulary"

    def __init__(self, block_size):
        text = "The quick brown fox jumps over the lazy dog. " * 8
        self.chars, self.block_size = sorted(set(text)), block_size
        self.vocab_size = len(self.chars) + Path("larger").exists()
        self.data = torch.tensor([self.chars.index(each) for each in text])

    def __len__(self):
        return len(self.data) - self.block_size - 1

    def __getitem__(self, index):
        piece = self.data[index : index + self.block_size + 1]
        return piece[:-1], piece[1:]


def step(model, batch):
    return model(*batch)
"""

JOB = """
[job]
name = "gpt"

[model]
entry = "gpt:GPT"
step = "gpt:step"

[model.args.config]
entry = "gpt:GPTConfig"
args = { block_size = 8, vocab_size = "${dataset.vocab_size}", n_layer = 2, n_embd = 16, dropout = 0.1 }

[optimizer]
entry = "torch.optim:AdamW"
args = { lr = 0.01, weight_decay = 0.1 }

[[optimizer.groups]]
match = "wpe.*"
args = { lr = 0.001 }

[[optimizer.groups]]
name = "no decay"
ndim = [0, 1]
args = { weight_decay = 0.0 }

[lr_scheduler]
entry = "elasticflow.schedules:warmup_cosine"
args = { warmup = 10, total = 40, final = 0.1 }

[dataset]
entry = "gpt:Chars"
args = { block_size = 8 }
global_batch_size = 7

[train]
steps = 40

[nodes]
nproc_per_node = 2

[snapshots]
every = "5 steps"
"""
# Rank 1 is killed after 8 steps; rank 0 of the next generation halts after 9, so that the launch can be asked to leave.
FAULTS = "training.step=kill@8 rank=1 generation=1, training.step=stop@9 rank=0 generation=2"


def test_groups_schedule_and_values_of_the_data_survive_a_kill_and_a_drain(
    project: Project, forked: ForkedPrograms
) -> None:
    """Bit for bit as undisturbed; what each group took is told; the same data with another value is refused."""
    project.write("gpt.py", GPT)
    job_file = project.write("gpt.toml", JOB)
    faults = {fault_injection.VARIABLE: FAULTS}
    disturbed = project.run("gpt.toml", "disturbed", job="gpt", **faults)
    disturbed.leave_from_halt(0, generation=2)
    project.write("larger", "")
    refused = project.start("resume", "disturbed", run_id="disturbed", job="gpt")
    assert refused.end() == 1, refused.told()
    assert "${dataset.vocab_size} is 30, and was 29 when the snapshot was taken" in refused.told()
    (project.root / "larger").unlink()
    resumed = project.start("resume", "disturbed", run_id="disturbed", job="gpt")
    assert resumed.end() == 0, resumed.told()

    assert tensors(resumed.run) == undisturbed(job_file, forked, workers=2)
    (opened, *_), (grouped, *_) = (
        named(disturbed.events(), name) for name in ("dataset.opened", "parameters.grouped")
    )
    assert opened["values"] == {"vocab_size": 29}
    assert [(each["name"], each["tensors"], each["args"]) for each in grouped["groups"]] == [
        ("wpe.*", 1, {"lr": 0.001}),
        ("no decay", 6, {"weight_decay": 0.0}),
        ("rest", 3, {}),
    ]
    last = resumed.run.metrics.read_text().splitlines()[-1]
    assert '"lr": {"wpe.*": 0.000' in last
