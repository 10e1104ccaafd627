"""The split of a job's batches at each world size; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.protocol.shard_groups import node_counts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.tables.job import Job

MOST_ROWS = 12


@dataclass(frozen=True)
class ExactCost:
    """The cost of exact mode at one world size, compared with batch mode.

    Attributes:
        batch_micro_batches: Most forwards of one rank per step in batch mode.
        gradient_copies: Most sums of gradients that one rank holds at once; batch mode holds one.
        traffic: Bytes that the busiest rank sends per step, as a multiple of a ring all-reduce's; None: nothing is sent.
    """

    batch_micro_batches: int
    gradient_copies: int
    traffic: float | None


@dataclass(frozen=True)
class WorldRow:
    """The split of the global batch at one world size.

    Attributes:
        world_size: Workers, or None where only the machine tells the number per node.
        samples_per_rank: Fewest and most samples that one rank takes of a full batch.
        micro_batches: Most forwards of one rank per step, whose gradients are accumulated.
        micro_batch_size: Fewest and most samples of one forward.
        exact: The cost of exact mode, if the job has it and does not shard its model.
    """

    nodes: int
    world_size: int | None
    samples_per_rank: tuple[int, int] | None = None
    micro_batches: int | None = None
    micro_batch_size: tuple[int, int] | None = None
    exact: ExactCost | None = None


def worlds(job: Job) -> Iterator[WorldRow]:
    """Yield a row for each number of nodes that can train; of a long range, for the ends and for some numbers that divide evenly."""
    per_node = job.nodes.nproc_per_node
    for nodes in _shown(job):
        yield world_row(job, nodes, nodes * per_node if isinstance(per_node, int) else None)


def _shown(job: Job) -> list[int]:
    per_node, counts = job.nodes.nproc_per_node, node_counts_of(job)
    if len(counts) <= MOST_ROWS:
        return list(counts)
    low, high = counts[0], counts[-1]
    chosen = []
    if isinstance(per_node, int) and job.script is None:
        shared = job.train.virtual_shards or job.dataset.global_batch_size
        most = min(high - 1, shared // per_node)
        chosen = [nodes for nodes in range(low + 1, most + 1) if shared % (nodes * per_node) == 0]
    if len(chosen) < 2:
        chosen = [low << power for power in range(1, high.bit_length()) if low << power < high]
    chosen = [nodes for nodes in chosen if nodes in counts]
    room = MOST_ROWS - 2
    if len(chosen) > room:  # evenly spaced in the list, whose small numbers lie closer together
        chosen = [chosen[number * (len(chosen) - 1) // (room - 1)] for number in range(room)]
    return [low, *chosen, high]


def node_counts_of(job: Job) -> range:
    """Return the numbers of nodes that can train: without shards or a number of workers for each node, the whole range."""
    nodes, parallel = job.nodes, None if job.script is not None else job.parallel
    if parallel is None or not isinstance(nodes.nproc_per_node, int):
        return range(nodes.min, nodes.max + 1)
    return node_counts(parallel.shard, nodes.min, nodes.max, nodes.nproc_per_node)


def world_row(job: Job, nodes: int, world_size: int | None) -> WorldRow:
    """Return the split of a full batch over *world_size* ranks; unknown if that is None, or if a script splits the batch."""
    if world_size is None or job.script is not None:
        return WorldRow(nodes=nodes, world_size=world_size)
    batch, shards = job.dataset.global_batch_size, job.train.virtual_shards
    parts = job.dataset.shards or batch  # the ranks share data shards, or samples
    fewest, most = (n * batch // parts for n in (parts // world_size, -(-parts // world_size)))
    forwards = -(-most // (job.dataset.micro_batch_size or most))
    if shards is None:
        return WorldRow(
            nodes=nodes,
            world_size=world_size,
            samples_per_rank=(fewest, most),
            micro_batches=forwards,
            micro_batch_size=_pieces(job, fewest, most),
        )
    size = batch // shards  # each shard is one forward
    return WorldRow(
        nodes=nodes,
        world_size=world_size,
        samples_per_rank=(shards // world_size * size, -(-shards // world_size) * size),
        micro_batches=-(-shards // world_size),
        micro_batch_size=(size, size),
        exact=None if job.parallel is not None else exact_cost(shards, world_size, forwards),
    )


def _pieces(job: Job, fewest: int, most: int) -> tuple[int, int]:
    """Return the sizes of the smallest and the largest micro-batch, if a rank's part is cut evenly."""
    micro = job.dataset.micro_batch_size
    if micro is None:
        return fewest, most
    cuts = [(part, -(-part // micro)) for part in (fewest, most) if part]
    return min(part // number for part, number in cuts), max(-(-part // number) for part, number in cuts)


def exact_cost(shards: int, world_size: int, batch_micro_batches: int) -> ExactCost:
    """Return the cost of a step that adds up *shards* in the order of one binary tree.

    Each rank finishes one slice of the gradients: it receives that slice of every subtree sum, and sends the finished
    slice to all ranks.
    """
    sums = copies = 0
    for rank in range(min(world_size, shards)):
        low, high = rank * shards // world_size, (rank + 1) * shards // world_size
        mine, most = _subtrees(low, high, shards)
        sums, copies = max(sums, mine), max(copies, most)
    traffic = None if world_size == 1 else (sums + 1) / 2
    return ExactCost(batch_micro_batches=batch_micro_batches, gradient_copies=copies, traffic=traffic)


def _subtrees(low: int, high: int, leaves: int) -> tuple[int, int]:
    """Return the number of subtrees that neighbouring leaves add up to, and the most sums held meanwhile."""
    number = most = 0
    while low < high:
        size = low & -low or 1 << (leaves - 1).bit_length()
        while low + size > high and high < leaves:  # at the tree's right end, missing leaves count as present
            size >>= 1
        held = min(size, leaves - low)
        most = max(most, number + held.bit_length())
        number, low = number + 1, low + size
    return number, most
