"""The DataLoader of a training loop, and what `run.batches` is told to read the same samples."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.adopt.reading.refusal import refuse
from elasticflow.adopt.reading.values import calls_behind, definitions
from elasticflow.lint.rules.samplers import LOADER, SAMPLER
from elasticflow.lint.script.names import dotted_name
from elasticflow.lint.script.script import argument, has_unpacked, is_constant

if TYPE_CHECKING:
    from elasticflow.lint.script.forms import Kind
    from elasticflow.lint.script.script import Script

_BY_HAND = "run.batches(dataset, size=..., epochs=...) reads a dataset by index, shuffled; what it cannot: run.step(samples=...)"


class Loader(NamedTuple):
    """A DataLoader.

    Attributes:
        call: What makes it.
        drops_last: It leaves out samples that fill no batch.
        passes: Its attributes that `run.batches` is told, by its own names for them.
    """

    call: ast.Call
    drops_last: bool
    passes: dict[str, str]


def loader_of(script: Script, node: ast.expr, kind: Kind) -> Loader:
    """Return the DataLoader that an expression of a script is.

    Raises:
        RefusalError: the file does not show how it is made, or no `run.batches` reads as it does.
    """
    found = definitions(script, node)
    calls = [
        each.node
        for each in found
        if isinstance(each.node, ast.Call) and script.origin(each.node.func) == LOADER
    ]
    if not calls or len(calls) != len(found):
        other = next((each.node for each in found if each.node not in calls), node)
        made = f"`{ast.unparse(other)[:60]}`" if other is not node else "another file"
        raise refuse(node, f"how {dotted_name(node)} is made is not certain: by {made}", _BY_HAND)
    loaders = [_checked(script, call, kind) for call in calls]
    if len({(each.drops_last, *each.passes.items()) for each in loaders}) > 1:
        raise refuse(calls[1], "several DataLoaders with different options may be gone over", _BY_HAND)
    return loaders[0]


def _checked(script: Script, call: ast.Call, kind: Kind) -> Loader:
    if has_unpacked(call):
        raise refuse(call, "some arguments of the DataLoader are not in its text", _BY_HAND)
    for name in ("batch_sampler", "generator", "worker_init_fn"):
        value = argument(call, name)
        if value is not None and not is_constant(value, None):
            raise refuse(call, f"the DataLoader has a {name}, which run.batches does not call", _BY_HAND)
    size = argument(call, "batch_size", 1)
    if size is not None and is_constant(size, None):
        raise refuse(call, "the DataLoader makes no batches: batch_size=None", _BY_HAND)
    _check_data(script, call)
    _check_order(script, call, kind)
    drop = argument(call, "drop_last")
    if drop is not None and not (is_constant(drop, True) or is_constant(drop, False)):
        raise refuse(drop, "whether the DataLoader drops the last samples is not certain", _BY_HAND)
    passes = {}
    for theirs, ours in (("num_workers", "num_workers"), ("collate_fn", "collate")):
        value = argument(call, theirs)
        if value is not None and not (isinstance(value, ast.Constant) and not value.value):
            passes[ours] = theirs
    return Loader(call, is_constant(drop, True), passes)


def _check_data(script: Script, call: ast.Call) -> None:
    data = argument(call, "dataset", 0)
    for made in [] if data is None else calls_behind(script, data):
        owner = script.class_called(dotted_name(made.func))
        bases = [] if owner is None else [dotted_name(base).rpartition(".")[2] for base in owner.bases]
        streams = argument(made, "streaming")
        if "IterableDataset" in bases or (streams is not None and not is_constant(streams, False)):
            raise refuse(made, "the dataset is read in its own order, not by index", _BY_HAND)


def _check_order(script: Script, call: ast.Call, kind: Kind) -> None:
    """Check that samples come shuffled, each rank its own, as `run.batches` has them."""
    sampler = argument(call, "sampler")
    if sampler is None or is_constant(sampler, None):
        if kind == "ddp":
            raise refuse(
                call, "the DataLoader has no DistributedSampler: each rank trains on all the data", _BY_HAND
            )
        if not is_constant(argument(call, "shuffle", 2), True):
            raise refuse(
                call, "the DataLoader does not shuffle, or not for certain; run.batches does", _BY_HAND
            )
        return
    behind = [each.node for each in definitions(script, sampler)]
    for node in behind:
        if is_constant(node, None):
            continue
        if not isinstance(node, ast.Call) or script.origin(node.func) != SAMPLER:
            raise refuse(call, f"the DataLoader's sampler is not certain to be a DistributedSampler: {ast.unparse(node)[:50]}", _BY_HAND)  # fmt: skip
        shuffle = argument(node, "shuffle", 3)
        if has_unpacked(node) or not (shuffle is None or is_constant(shuffle, True)):
            raise refuse(node, "the DistributedSampler does not shuffle, or not for certain; run.batches does", _BY_HAND)  # fmt: skip
