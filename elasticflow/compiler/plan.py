"""Job -> LaunchPlan: everything a launch needs, decided and checked; pure (floor 2)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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


class RestartPlan(Fact):
    """What failures cost: budget in failures, refill by time or progress, seconds without progress that are a hang."""

    budget: int
    refill_s: float | None
    refill_steps: int | None
    refill_epochs: int | None
    hang_timeout_s: float
    grace_s: float


class SnapshotPlan(Fact):
    """Where snapshots go (None: the run folder), when, and which stay; intervals as written in the job file."""

    uri: str | None
    every: tuple[str, ...]
    keep_last: int
    keep_best: int | None
    keep_every: str | None
    options: dict[str, Any]


class LaunchPlan(Fact):
    """Everything a launch needs; written to plan.json, read back by `resume`.

    Attributes:
        format: Version of this record.
        job_name: The job's name.
        job_digest: SHA-256 over the resolved job's canonical JSON.
        job_files: The job file and what it extends, relative to the project root.
        module_path: Folders of the job's own code, relative to the project root.
        modules: Modules of the job's factories: what the fork server imports once.
        torchrun_args: torchrun's argv after its own name, entry point last (`train.py`).
        environment: Variables of the launch, each with its value.
        reasons: Why each variable is set, by name.
        start_method: fork (from a warm server) or spawn.
        worlds: Batch split at the smallest, largest and some world sizes between.
    """

    format: Literal[1] = 1
    job_name: str
    job_digest: str
    job_files: tuple[str, ...]
    module_path: tuple[str, ...]
    modules: tuple[str, ...]
    nodes_min: int
    nodes_max: int
    nproc_per_node: int | Literal["auto", "gpu", "cpu"]
    endpoint: str | None
    interface: str | None
    torchrun_args: tuple[str, ...]
    environment: dict[str, str]
    reasons: dict[str, str]
    start_method: Literal["fork", "spawn"]
    restarts: RestartPlan
    snapshots: SnapshotPlan
    log_level: str
    worlds: tuple[WorldRow, ...]
