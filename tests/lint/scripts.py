"""Training scripts as texts, for the tests of `elasticflow lint`."""

from __future__ import annotations

import textwrap

from elasticflow.lint.check import lint_source

HEAD = """\
import os
import signal
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
"""


def found(body: str, *, notes: bool = False, head: str = HEAD) -> list[tuple[str, int]]:
    """Return code and line, from 1 in *body*, of each finding about a script of the usual imports and *body*."""
    text = head + textwrap.dedent(body)
    above = head.count("\n")
    return sorted(
        (each.code, (each.line or 0) - above)
        for each in lint_source(text.encode(), "train.py")
        if notes or each.severity != "note"
    )


def codes(body: str, *, notes: bool = False, head: str = HEAD) -> list[str]:
    """Return the codes of the findings about a script of the usual imports and *body*."""
    return [code for code, _ in found(body, notes=notes, head=head)]
