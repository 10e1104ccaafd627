"""What a node of a run asks of Ray, and a cluster that does not answer."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from elasticflow.errors import RayError
from elasticflow.launcher.machines.cluster import Demand, connect, demand_of, draining_nodes


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


def test_custom_resources_have_to_be_there_too() -> None:
    """Labels are Ray's to compare; both are told."""
    demand = Demand(1, 0, {"license": 2.0}, {"zone": "a"})
    assert demand.fits({"CPU": 1.0, "license": 2.0})
    assert not demand.fits({"CPU": 8.0, "license": 1.0})
    assert str(demand) == "1 CPUs, 2 license, zone=a"


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RayError, match="ray cannot be imported") as refused:
        connect()

    assert refused.value.remedy == "pip install 'elasticflow[ray]'"


def test_other_versions_than_the_clusters_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says so in six lines, of which the first names no version."""
    text = (
        "Version mismatch: The cluster was started with:\n    Ray: 2.49.0\n    Python: 3.10.4\n"
        "This process on node 10.0.0.7 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    with pytest.raises(
        RayError, match=r"has Ray 2\.49\.0, Python 3\.10\.4, and this machine has Ray 2\.60\.0"
    ) as refused:
        _connect(monkeypatch, RuntimeError(text))
    assert "pip install 'ray==2.49.0', in an environment of Python 3.10.4" == refused.value.remedy


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ray's own first line."""
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(
        RayError, match=r"no Ray cluster answers at head:6379: Could not find any running Ray"
    ):
        _connect(monkeypatch, ConnectionError("Could not find any running Ray instance.\nmore"))


def _connect(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init(**_: object) -> None:
        raise error

    played = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", played)
    connect()


@pytest.mark.parametrize("state", [SimpleNamespace(), SimpleNamespace(state=SimpleNamespace())])
def test_a_ray_that_does_not_tell_who_is_taken_away(monkeypatch: pytest.MonkeyPatch, state: Any) -> None:
    """It is known that nothing is known; what the cluster raises is raised."""
    monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace(state=state))
    assert draining_nodes() is None


def test_an_error_of_the_cluster_is_not_taken_for_nobody_being_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told as the cluster being out of reach."""

    def ask() -> dict[str, int]:
        raise ConnectionError("gone")

    state = SimpleNamespace(state=SimpleNamespace(get_draining_nodes=ask))
    monkeypatch.setitem(sys.modules, "ray._private", SimpleNamespace(state=state))
    with pytest.raises(ConnectionError):
        draining_nodes()
