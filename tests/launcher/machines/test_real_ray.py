"""A job on a real Ray cluster of two nodes on this machine, one of which is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.harness import named, project_at, steps_of, tensors
from tests.launcher.machines.clusters import cluster, on_ray

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("ray")
pytestmark = pytest.mark.nightly


def test_a_node_of_ray_is_lost(tmp_path: Path) -> None:
    """The run continues with the other one, and has the bits of a run on this machine alone."""
    with cluster(nodes=2) as ray, project_at(tmp_path / "project") as project:
        run = on_ray(project, ray, "ray", epochs=8)
        run.wait_for_group(2, 0)
        ray.lose_a_node()
        assert run.end() == 0, run.told()
        alone = on_ray(project, None, "alone", epochs=8)
        assert alone.end() == 0, alone.told()

        assert "Ray has lost it; it is begun again where there is room" in run.told()
        assert "raylet" not in run.told()
        events = run.events()
        assert "node_lost" in [event["class"] for event in named(events, "generation.ended")]
        assert steps_of(run.run) == steps_of(alone.run)
        expected, got = tensors(alone.run), tensors(run.run)
        assert [key for key in expected if expected[key] != got[key]] == []
        assert expected.keys() == got.keys()
