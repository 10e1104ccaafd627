"""The table that says what each node asks of Ray: `elasticflow run JOB --on ray`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.types import Description, Table, bad_key

RayName = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,199}$"),
    Description('a name as Ray has it, like "accelerator_type:A100"'),
]
LabelExpression = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9!][A-Za-z0-9_.,()! -]{0,499}$"),
    Description('a value of a label, or an expression of Ray like "in(us-east, us-west)" or "!spot"'),
]
# Resources that Ray counts by itself, each with the place of its number.
_COUNTED = {
    "CPU": "nodes.nproc_per_node says it",
    "GPU": "nodes.nproc_per_node says it",
    "memory": "Ray asks for none",
    "object_store_memory": "Ray asks for none",
}


class RayTable(Table):
    """Options for `elasticflow run --on ray`: what each node asks of a node of Ray, beside CPUs or GPUs."""

    resources: dict[RayName, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default={},
        description="Custom resources of each node, by Ray's names.",
        examples=[{"accelerator_type:A100": 0.001}],
    )
    labels: dict[RayName, LabelExpression] = Field(
        default={},
        description="Labels that a node of Ray must have.",
        examples=[{"ray.io/market-type": "on-demand"}],
    )
    placement: Literal["SPREAD", "DEFAULT"] = Field(
        default="SPREAD",
        description="Ray's strategy for the nodes: SPREAD over its nodes, or DEFAULT, which fills one before the next.",
    )

    @model_validator(mode="after")
    def _check_names(self) -> RayTable:
        for name in self.resources:
            if name in _COUNTED:
                message = f"ray.resources: {name} is no custom resource: {_COUNTED[name]}"
                raise bad_key("resources", codes.NOT_PASSABLE, message, "take it out of ray.resources")
        return self
