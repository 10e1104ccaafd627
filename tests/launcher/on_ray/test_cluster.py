"""What a node of a run asks of Ray, and a cluster that does not answer."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from elasticflow.errors import RayError
from elasticflow.launcher.on_ray.cluster import Demand, connect, demand_of


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    """Return a node as `ray.nodes()` has it."""
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("workers", "nodes", "expected"),
    [
        (2, [node(CPU=8)], Demand(2, 0)),
        (2, [node(CPU=8), node(CPU=8, GPU=4)], Demand(0, 2)),
        (2, [node(CPU=8), node(alive=False, GPU=4)], Demand(2, 0)),
        ("auto", [node(CPU=8, GPU=2), node(CPU=8, GPU=4)], Demand(0, 4)),
        ("auto", [node(CPU=8)], Demand(1, 0)),
        (1, [], Demand(1, 0)),
    ],
    ids=["cpus", "gpus", "a gpu that is gone", "all gpus", "no gpus", "no nodes"],
)
def test_a_worker_has_a_gpu_where_there_is_one(
    workers: int | str, nodes: list[dict[str, Any]], expected: Demand
) -> None:
    """Else a CPU."""
    assert demand_of(workers, nodes) == expected


def test_what_fits() -> None:
    """Each resource has to be there."""
    assert Demand(0, 2).fits({"GPU": 2.0})
    assert not Demand(0, 2).fits({"CPU": 8.0, "GPU": 1.0})
    assert (str(Demand(0, 2)), str(Demand(4, 0))) == ("2 GPUs", "4 CPUs")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match="ray cannot be imported") as refused:
        connect()

    assert refused.value.remedy == "pip install 'elasticflow[ray]'"
