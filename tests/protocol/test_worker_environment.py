"""Conventions between agent and workers."""

from __future__ import annotations

from pathlib import Path

import elasticflow


def test_workspace_of_cublas_is_written_once() -> None:
    """The launch, the worker, the check of [env] and the refusal agree on one value."""
    places = [
        path for path in Path(elasticflow.__file__).parent.rglob("*.py") if ":4096:8" in path.read_text()
    ]
    assert ["worker_environment.py"] == [path.name for path in places]
