"""A small job for the compiler's tests, with keys changed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.launch_folder import LaunchRecord, digest_as_written, record_in
from elasticflow.jobfile.tables.job import Job

if TYPE_CHECKING:
    from pathlib import Path

_TABLES: dict[str, dict[str, Any]] = {
    "job": {"name": "small"},
    "model": {"entry": "pieces:Net", "loss": "torch.nn.functional:cross_entropy"},
    "optimizer": {"entry": "torch.optim:SGD", "args": {"lr": 0.1}},
    "dataset": {"entry": "pieces:digits", "global_batch_size": 64},
    "train": {"epochs": 2},
    "nodes": {"nproc_per_node": 2},
}


def make_job(**changes: Any) -> Job:
    """Return the job with keys changed, dots written as two underscores: `nodes__max=4`; None takes a key away."""
    tables = {name: dict(table) for name, table in _TABLES.items()}
    for key, value in changes.items():
        table, _, name = key.partition("__")
        if value is None:
            tables.get(table, {}).pop(name, None)
        else:
            tables.setdefault(table, {})[name] = value
    return Job.model_validate(tables)


def job_in(folder: Path) -> Job:
    """Return the job that the launch in *folder* was made from."""
    found = record_in(folder)
    assert isinstance(found, LaunchRecord)
    return found.made.job


def is_edited(folder: Path) -> bool:
    """Return whether train.py in *folder* is another than what was written there."""
    return hashlib.sha256((folder / "train.py").read_bytes()).hexdigest() != digest_as_written(folder)
