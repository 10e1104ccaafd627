"""What scripts may import from `elasticflow`: names, signatures and attributes, frozen."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import elasticflow


def test_names() -> None:
    """All of them can be had; another one is no attribute."""
    assert elasticflow.__all__ == [
        "Batch", "Gradients", "Run", "Sharding", "StopTraining", "__version__", "get_logger", "join",
    ]  # fmt: skip
    assert all(hasattr(elasticflow, name) for name in elasticflow.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'jion'"):
        _ = elasticflow.jion


def test_signatures_of_the_run() -> None:
    """A script that was written against them continues running."""
    methods = ["keep", "batches", "gradients", "log", "step", "evaluate", "call", "stop", "finish"]
    parameters = {
        name: list(inspect.signature(getattr(elasticflow.Run, name)).parameters)[1:] for name in methods
    }

    assert parameters == {
        "keep": ["objects"],
        "batches": [
            "dataset", "size", "epochs", "steps", "tail", "num_workers", "collate", "micro_batch_size", "order", "shards",
        ],
        "gradients": ["fn", "batch"],
        "log": ["scalars"],
        "step": ["loss", "samples"],
        "evaluate": ["dataset", "loss", "metrics", "step", "name", "model", "size", "samples", "collate"],
        "call": ["hooks"],
        "stop": ["reason"],
        "finish": [],
    }  # fmt: skip
    assert list(inspect.signature(elasticflow.join).parameters) == [
        "seed", "name", "folder", "snapshots", "every", "keep", "ignore", "virtual_shards", "shard", "log_every",
        "threads", "log_level", "gradients",
    ]  # fmt: skip
    assert list(inspect.signature(elasticflow.Gradients).parameters) == [
        "precision", "on_nonfinite", "virtual_shards", "ddp", "moves_optimizers", "clip_grad_norm", "logs_grad_norm",
    ]  # fmt: skip
    assert {"data", "inputs", "parts", "targets"} <= set(dir(elasticflow.Batch))
    assert list(inspect.signature(elasticflow.Batch).parameters)[:4] == ["samples", "total", "share", "end"]


@pytest.mark.usefixtures("real_processes")
def test_the_package_alone_loads_no_torch() -> None:
    """The command imports it first."""
    text = "import sys, elasticflow; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", text], text=True, capture_output=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "False"
