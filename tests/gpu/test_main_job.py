"""The main job on a GPU: the device is chosen by itself, and each precision reaches its accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.end_to_end.harness import named, read_lines
from tests.gpu.marks import LAUNCHED_ON

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

_ON_CPU, _ON_GPU = LAUNCHED_ON


@pytest.mark.parametrize(
    ("device", "precision", "epochs"),
    [
        pytest.param(*_ON_CPU.values, "fp32", 4, marks=_ON_CPU.marks),
        *(pytest.param(*_ON_GPU.values, kind, 10, marks=_ON_GPU.marks) for kind in ("fp32", "bf16", "fp16")),
    ],
    indirect=["device"],
)
def test_main_job_trains_on_the_device(project: Project, device: str, precision: str, epochs: int) -> None:
    """One worker reaches the accuracy of the CPU run at every precision."""
    sets = (
        "nodes.nproc_per_node=1",
        "nodes.device=auto",
        f"train.precision={precision}",
        f"train.epochs={epochs}",
    )
    running = project.run("jobs/mnist.toml", precision, *sets)

    assert running.end() == 0, running.told()
    assert named(running.events(), events.TRAINING_STARTED)[0]["device"].startswith(device)
    accuracy = [line["eval"]["accuracy"] for line in read_lines(running.run.metrics) if "eval" in line][-1]
    assert accuracy >= 0.97
