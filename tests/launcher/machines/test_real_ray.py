"""A job on a real Ray cluster of two nodes on this machine, one of which is lost."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.machines.cluster import Demand, connect
from elasticflow.launcher.machines.ray_nodes import RayNodes
from elasticflow.launcher.machines.remote import Order
from tests.end_to_end.harness import named, project_at, steps_of, tensors
from tests.launcher.machines.clusters import cluster, on_ray

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]


@pytest.mark.parametrize(
    "demand",
    [Demand(1, 0, {"slot": 1.0}), Demand(1, 0, labels={"zone": "b"})],
    ids=["a custom resource", "a label"],
)
def test_a_node_begins_where_its_resources_and_labels_are(
    demand: Demand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the newest of three nodes, the only one that has them."""
    with cluster(nodes=2) as made:
        chosen = made.add_a_node(resources={"slot": 1}, labels={"zone": "b"})
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        ray = connect()
        try:
            order = Order(folder="/", words=("--version",), environment={}, run="job/x", grace_s=0.0)
            nodes = RayNodes(ray, 1, demand, order, lambda *_: None, lambda _: None, lambda: None)
            assert chosen == ray.get(nodes._begin(0).begun, timeout=90).ray_node
        finally:
            ray.shutdown()


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
