"""A small job on made-up data, and launches of it, for the tests on a GPU and under the pretended driver.

Steps are slow while the project has a file `slow`: kills and drains then come before the end on any machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

NAME = "small"
FILE = f"jobs/{NAME}.toml"
STEPS, EVERY = 60, 10

_CODE = """
import time
from pathlib import Path

import torch
from torch import nn

{at_import}


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.Linear(width, 3))

    def forward(self, x):
        return self.layers(x)


class Noise:
    fingerprint = "64 points"

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.02 if Path("slow").exists() else 0)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator), torch.randn(3, generator=generator)


_calls = 0


def loss(outputs, targets):
    global _calls
    _calls += 1
    {in_loss}
    return nn.functional.mse_loss(outputs, targets)
"""
_JOB = f"""
[job]
name = "{NAME}"
seed = 3
[model]
entry = "net:Net"
loss = "net:loss"
[optimizer]
entry = "torch.optim:AdamW"
args = {{ lr = 1e-2 }}
[dataset]
entry = "net:Noise"
global_batch_size = 16
[train]
steps = {STEPS}
threads = 1
[nodes]
nproc_per_node = 1
[restarts]
budget = 5
[snapshots]
every = "{EVERY} steps"
"""
EXACT = ("train.consistency=exact", "train.virtual_shards=4")
OFFLOADED = ("parallel.shard=1", 'parallel.wrap=["torch.nn:Linear"]', "parallel.offload=cpu")
# Lines for the loss, by the class of the failure that each leads to.
FAULTS = {
    "oom": "torch.empty(1 << 50, dtype=torch.uint8, device=outputs.device)",
    "user_error": "outputs[torch.tensor([99], device=outputs.device)].sum().item()",
}


def write(project: Project, *, at_import: str = "", in_loss: str = "pass", is_slow: bool = False) -> None:
    """Put the job into *project*; *at_import* and *in_loss* are lines of its module, and of its loss in each call."""
    project.write("net.py", _CODE.format(at_import=at_import, in_loss=in_loss.strip()))
    project.write(FILE, _JOB)
    if is_slow:
        project.write("slow", "")


def hurry(project: Project) -> None:
    """Let steps take no more time than they need, from now on."""
    (project.root / "slow").unlink(missing_ok=True)
