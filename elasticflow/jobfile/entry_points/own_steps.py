"""Keys that cannot be combined with a step that takes (model, batch, optimizers) and steps them itself."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.tables.evaluation import OF_LOSS, set_tables
from elasticflow.jobfile.text.layers import table_at, value_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source

_Value = tuple[str, str]
"""Reason and remedy."""

_CAST = (
    "it runs forward and backward itself",
    "leave it out; write `with torch.autocast(...)` around the forwards in the step",
)
_BY_VALUE: dict[tuple[str, str], dict[str, _Value]] = {
    ("train", "consistency"): {
        "exact": (
            "it would cut a batch into virtual shards, whose gradients move the weights once, together",
            'use consistency = "batch": the same bits at the same number of workers',
        ),
    },
    ("train", "on_nonfinite"): {
        "skip": ("half of a step may be done when that is known", 'use on_nonfinite = "stop"'),
    },
    ("train", "precision"): {"bf16": _CAST, "fp16": _CAST},
}
_BY_KEY: dict[tuple[str, str], _Value] = {
    ("dataset", "micro_batch_size"): (
        "it is called once, with all of a worker's share",
        "leave it out; cut the share in the step, if memory asks for it",
    ),
    ("parallel", "shard"): (
        "gradients are added up across the workers before one optimizer moves",
        "leave [parallel] out, or let the step return a loss and one optimizer move the weights",
    ),
    ("model", "loss_count"): ("workers are weighted by their samples there", "leave it out"),
    ("lr_scheduler", "metric"): (
        "its optimizers may be several, whose schedules count",
        "leave it out; or let the step return a loss, and one optimizer move the weights",
    ),
}
_DDP = (
    "gradients are exchanged when an optimizer moves, without DistributedDataParallel",
    "leave it out",
)
_BEST = (
    "its loss cannot be measured without training",
    "name a metric: metrics are called with (model, batch)",
)


def check_own_step(source: Source) -> Iterator[Diagnostic]:
    """Yield the keys of the job that cannot be combined with such a step."""
    for path, (why, remedy) in _found(source.raw):
        value = show(value_at(path, source.raw))
        what = f"{dotted(path)} = {value} cannot be combined with a step that moves its optimizers"
        yield source.problem(codes.OWN_STEP, f"{what}: {why}", path, remedy=remedy)


def _found(raw: TomlTable) -> Iterator[tuple[KeyPath, _Value]]:
    for (table, key), values in _BY_VALUE.items():
        value = value_at((table, key), raw)
        if isinstance(value, str) and value in values:
            yield (table, key), values[value]
    for (table, key), texts in _BY_KEY.items():
        if value_at((table, key), raw) is not None:
            yield (table, key), texts
    for key in table_at(raw, "ddp"):
        yield ("ddp", key), _DDP
    yield from _of_losses(raw)


def _of_losses(raw: TomlTable) -> Iterator[tuple[KeyPath, _Value]]:
    """Yield the keys that depend on the loss over an evaluation set."""
    rule = value_at(("train", "stop_when"), raw)
    if isinstance(rule, str) and re.match(r"((min|max) )?([A-Za-z_]\w*\.)?loss ", rule):
        yield ("train", "stop_when"), _BEST
    for path, of_set in set_tables(raw):
        best = of_set.get("best")
        if isinstance(best, str) and best.split()[1:] == ["loss"]:
            yield (*path, "best"), _BEST
        for name, metric in table_at(of_set, "metrics").items():
            where, entry = (*path, "metrics", name), metric
            if isinstance(metric, dict):
                where, entry = (*where, "over"), metric.get("over")
            if entry == "loss" or (isinstance(entry, str) and entry.startswith(OF_LOSS)):
                yield where, _BEST
