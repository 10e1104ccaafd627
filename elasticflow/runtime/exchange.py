"""The sum over all ranks in the order of one tree: bytes are moved by the library, additions are ours (floor R)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from elasticflow.runtime import treesum
from elasticflow.runtime.order import split

if TYPE_CHECKING:
    from elasticflow.runtime.flat import Flat, Layout


class Exchange:
    """Adds up what all ranks hold: slices go to their owners, who add in the tree's order, and come back to all."""

    def __init__(self, layout: Layout, leaves: int, world_size: int, rank: int) -> None:
        self._leaves, self._world_size, self._rank = leaves, world_size, rank
        self._places = [
            treesum.places(leaves, *split(leaves, world_size, other)) for other in range(world_size)
        ]
        # For each flat tensor, what each other rank sends: its subtrees of this rank's slice, one after the other.
        self._received = [
            [flat.new_empty(len(places), flat.numel() // world_size) for places in self._places]
            for flat in (layout.new().tensors if world_size > 1 else ())
        ]

    def total(self, nodes: list[treesum.Node[Flat]], target: Flat) -> None:
        """Put the sum over all leaves into *target*; the nodes' values are spent. Collective: every rank."""
        for number, whole in enumerate(target.tensors):
            held = [node.value.tensors[number] for node in nodes]
            if self._world_size == 1:
                whole.copy_(held[0])
            else:
                self._total_of(held, self._received[number], whole)

    def _total_of(self, held: list[Tensor], received: list[Tensor], whole: Tensor) -> None:
        # Sent from one to one: gloo's all_gather takes three times as long as its sends (torch 2.13).
        slices = list(whole.chunk(self._world_size))
        parts = [each.chunk(self._world_size) for each in held]
        sent = [
            parts[0][other] if len(held) == 1 else torch.stack([each[other] for each in parts])
            for other in range(self._world_size)
        ]
        self._swap(sent, received)
        tree: treesum.TreeSum[Tensor] = treesum.TreeSum(self._leaves, lambda left, right: left.add_(right))
        for rank, places in enumerate(self._places):
            rows = [each[rank] for each in parts] if rank == self._rank else received[rank]
            for (level, place), row in zip(places, rows, strict=True):
                tree.push(level, place, row)
        [root] = tree.nodes
        slices[self._rank].copy_(root.value)
        self._swap([slices[self._rank]] * self._world_size, slices)

    def _swap(self, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
        """Give every other rank its tensor of *outgoing* and get one from it into *incoming*."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        ops = [dist.P2POp(dist.isend, outgoing[other], other) for other in others]
        ops += [dist.P2POp(dist.irecv, incoming[other], other) for other in others]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
