"""How a job's batches and steps fall out, at each world size; pure (floor 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.spec.job import Job

MOST_ROWS = 12


class Fact(BaseModel):
    """A frozen record that goes to plan.json and back unchanged."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class WorldRow(Fact):
    """How the global batch is split at one world size.

    Attributes:
        nodes: Nodes of this row.
        world_size: Workers, or None where the number per node is known on the machine only.
        samples_per_rank: Fewest and most samples one rank takes of a full batch.
        micro_batches: Most forwards of one rank per step.
    """

    nodes: int
    world_size: int | None
    samples_per_rank: tuple[int, int] | None
    micro_batches: int | None


def worlds(job: Job) -> Iterable[WorldRow]:
    """Yield rows of the smallest and the largest number of nodes, and of doublings between them."""
    low, high = job.nodes.min, job.nodes.max
    doublings = [low << power for power in range(high.bit_length()) if low << power < high]
    between = doublings[: MOST_ROWS - 1] if high - low >= MOST_ROWS else range(low, high)
    per_node = job.nodes.nproc_per_node
    for nodes in (*between, high):
        yield world_row(job, nodes, nodes * per_node if isinstance(per_node, int) else None)


def world_row(job: Job, nodes: int, world_size: int | None) -> WorldRow:
    """Return how a full batch is split over *world_size* ranks; unknown where it is None."""
    if world_size is None:
        return WorldRow(nodes=nodes, world_size=None, samples_per_rank=None, micro_batches=None)
    batch, shards = job.dataset.global_batch_size, job.train.virtual_shards
    if shards is not None:  # a forward each
        fewest, most = (n * batch // shards for n in (shards // world_size, -(-shards // world_size)))
        return WorldRow(
            nodes=nodes,
            world_size=world_size,
            samples_per_rank=(fewest, most),
            micro_batches=-(-shards // world_size),
        )
    fewest, most = batch // world_size, -(-batch // world_size)
    micro = job.dataset.micro_batch_size or most
    return WorldRow(
        nodes=nodes, world_size=world_size, samples_per_rank=(fewest, most), micro_batches=-(-most // micro)
    )


def num_steps(job: Job, samples: int) -> int:
    """Return the optimizer steps of a whole run over a dataset of so many samples."""
    if job.train.steps is not None:
        return job.train.steps
    assert job.train.epochs is not None
    epochs, batch = job.train.epochs, job.dataset.global_batch_size
    if job.dataset.tail == "spill":
        return -(-epochs * samples // batch)
    return epochs * (samples // batch if job.dataset.tail == "drop" else -(-samples // batch))
