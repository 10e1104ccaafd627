"""The table that makes several jobs of one file (floor 1)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from elasticflow.spec.fields import Name, Table


class MatrixTable(Table):
    """One file, several jobs: each case is the file with some keys changed, named `<job.name>-<case>`."""

    axes: dict[str, Any] = Field(
        default={},
        description="Keys of the job, each with a list of values; every combination is a case.",
        examples=[{"optimizer": {"args": {"lr": [1e-3, 3e-3]}}, "job": {"seed": [1, 2]}}],
    )
    exclude: list[dict[str, Any]] = Field(
        default=[],
        description="Combinations that are left out: all with these values of these axes.",
        examples=[[{"optimizer": {"args": {"lr": 3e-3}}, "job": {"seed": 2}}]],
    )
    cases: dict[Name, dict[str, Any]] = Field(
        default={},
        description="Further cases by name, each with the keys it changes.",
        examples=[{"wide": {"model": {"args": {"width": 64}}}}],
    )
