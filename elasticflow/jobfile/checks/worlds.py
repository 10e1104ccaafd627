"""How many workers a job may have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.job import NodesTable


def largest_world_size(nodes: NodesTable) -> tuple[int, bool]:
    """Return the most workers the job may have, and whether that is exact (else: at least so many)."""
    if isinstance(nodes.nproc_per_node, int):
        return nodes.max * nodes.nproc_per_node, True
    return nodes.max, False
