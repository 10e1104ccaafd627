"""A job that is planned and compiled, never run."""

from __future__ import annotations

__all__ = ["JOB", "PIECES"]

JOB = """\
[job]
name = "small"
[model]
entry = "pieces:net"
loss = "pieces:loss"
[optimizer]
entry = "pieces:optimizer"
args = { lr = 0.1 }
[dataset]
entry = "pieces:Data"
global_batch_size = 8
[evaluation]
entry = "pieces:Data"
metrics = { accuracy = "pieces:loss" }
[train]
epochs = 3
[nodes]
max = 2
nproc_per_node = 2
endpoint = "head:29400"
[restarts]
refill = "1 h"
"""
PIECES = """\
def net(): ...
def loss(a, b): ...
def optimizer(params, lr): ...
class Data:
    def __len__(self): ...
    def __getitem__(self, i): ...
"""
