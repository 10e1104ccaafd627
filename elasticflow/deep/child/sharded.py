"""Tries a step of a model that workers will share, for `--deep`: sharded as they do it, with a single worker to hold all rows.

Code that computes with a part of the model that is not gathered fails here as it would there. The number of workers changes
the rows that each holds, and no call of the job's code.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elasticflow.deep.child.run import DeepRun
from elasticflow.deep.child.state import build
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.runtime.training.shard_model import blocks_of, fully_shard_blocks

if TYPE_CHECKING:
    from torch import nn

    from elasticflow.deep.child.entry_point import EntryPoint
    from elasticflow.deep.child.report import Report
    from elasticflow.runtime.process.shard_layout import Sharding


def try_out(report: Report, code: EntryPoint, sharding: Sharding, batch: Any) -> None:
    """Build the model anew, shard it, and have train.py make two steps of it.

    The second meets what the first leaves behind: parameters that are gathered no longer, an optimizer's state of rows.

    Raises:
        BrokenError: a step raised; the problem was reported.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    random_streams.seed_all(code.seed)
    group = dist.new_group([0])

    def shard(model: nn.Module) -> None:
        fully_shard_blocks(model, blocks_of(model, sharding), group, "cpu", sharding)

    run = DeepRun(report, code, build(report.quietly(), code, shard))
    for _ in range(2):
        report.call(
            "step",
            code.key_of("training_step"),
            "a training step of the sharded model",
            partial(run.train, batch),
        )
