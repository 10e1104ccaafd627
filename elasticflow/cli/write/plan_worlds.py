"""The table of `plan` that says how a batch is split at each number of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.cli.output import table
from elasticflow.observe.terminal.formats import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.compiler.plan.batch_split import WorldRow
    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.jobfile.tables.job import Job

_HEADER = (("", "nodes"), ("", "workers"), ("samples", "each"), ("forwards", "each"), ("samples", "in one"))
_HEADER_OF_SCRIPT = ("nodes", "workers")
_EXACT_HEADER = (("forwards", "of batch mode"), ("gradient", "sums"), ("", "traffic"))


def worlds_table(worlds: Sequence[WorldRow]) -> Iterator[str]:
    """Yield the header of two lines and a line for each world size."""
    if all(world.samples_per_rank is None and world.world_size is not None for world in worlds):
        yield from table(_HEADER_OF_SCRIPT, map(_workers, worlds), justify="right")
        return
    header = _HEADER if worlds[0].exact is None else _HEADER + _EXACT_HEADER
    yield from table(["\n".join(lines) for lines in header], map(_row, worlds), justify="right")


def _workers(world: WorldRow) -> tuple[str, str]:
    """Return a line where the batches are the script's, or the workers of a node are not known."""
    return f"{world.nodes:,}", "as found" if world.world_size is None else f"{world.world_size:,}"


def _row(world: WorldRow) -> tuple[str, ...]:
    nodes = f"{world.nodes:,}"
    if world.world_size is None or world.samples_per_rank is None or world.micro_batch_size is None:
        return nodes, *("as found" for _ in _HEADER[1:])
    row = (
        *(nodes, f"{world.world_size:,}", either(*world.samples_per_rank)),
        *(f"{world.micro_batches:,}", either(*world.micro_batch_size)),
    )
    if world.exact is None:
        return row
    traffic = "none" if world.exact.traffic is None else f"{world.exact.traffic:g}"
    return *row, f"{world.exact.batch_micro_batches:,}", f"{world.exact.gradient_copies:,}", traffic


def either(fewest: int, most: int) -> str:
    """Return `4`, `4 or 5` or `4 to 6`."""
    if fewest == most:
        return f"{most:,}"
    return f"{fewest:,} or {most:,}" if most == fewest + 1 else f"{fewest:,} to {most:,}"


def worlds_notes(job: Job, plan: LaunchPlan) -> Iterator[str]:
    """Yield the notes under the table: formulas for the rows it leaves out, and what its columns mean."""
    batch, micro, shards = (
        job.dataset.global_batch_size,
        job.dataset.micro_batch_size,
        job.train.virtual_shards,
    )
    if len(plan.worlds) <= plan.nodes_max - plan.nodes_min or plan.worlds[0].world_size is None:
        if shards is None:
            size = "" if micro is None else f", in as few even forwards of at most {micro:,} as that takes"
            yield f"with W workers: each takes {batch:,} / W samples, rounded down or up{size}"
        else:
            yield f"with W workers: each runs {shards:,} / W forwards of {plural(batch // shards, 'sample')}, rounded down or up"
    if shards is not None:
        yield (
            f"exact: a batch is {plural(shards, 'virtual shard')} of {plural(batch // shards, 'sample')}, a forward and "
            "backward each, instead of the forwards of batch mode; a worker holds at most so many sums of gradients, where "
            "batch mode holds one, and sends so many times the bytes of a ring all-reduce (at most log2(shards / workers) "
            "+ 1 sums, and 1 times, where shards and workers are powers of two)"
        )
