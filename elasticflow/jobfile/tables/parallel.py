"""The table of models that are larger than one device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elasticflow.jobfile.tables.types import Entry, Table, optional

MOST_DEGREE = 2**20


class ParallelTable(Table):
    """Shards the model: several workers hold one copy of it together, by torch's fully_shard. Without it each worker holds a whole copy."""

    shard: Literal["node", "all"] | Annotated[int, Field(ge=1, le=MOST_DEGREE)] = Field(
        description="Workers that hold one copy of the model together: a number, those of each node, or all of them. It must divide the "
        "number of workers; where a copy spans nodes, nodes beyond the largest number that it divides wait as spares.",
        examples=[2, "node", "all"],
    )
    wrap: list[Entry] = Field(
        default=[],
        description="Classes of modules that are gathered and freed as a whole, such as the blocks of a transformer; default: the elements "
        "of the model's longest ModuleList.",
        examples=[["gpt:Block"]],
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free gathered parameters after the forward and gather them again for the backward: less memory, more traffic.",
    )
    init: Literal["cpu", "meta"] = Field(
        default="cpu",
        description="Memory in which each worker builds the model: the CPU's, which must hold a whole one; or none (torch's meta device), "
        "and blocks are filled in one after the other, with the same values.",
    )
    offload: Literal["cpu"] | None = optional(
        description="Keep each worker's part of the parameters, its gradients and the optimizer's state in the CPU's memory: blocks are moved to "
        "the device one after the other, and the optimizer moves on the CPU. Workers without an accelerator leave it out.",
        examples=["cpu"],
    )
