"""Nodes on Ray that cannot be begun, wait, or are taken away; ray itself is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elasticflow.launcher.machines import ray_nodes
from elasticflow.launcher.machines.cluster import Demand
from elasticflow.launcher.machines.ray_nodes import RayNodes
from elasticflow.launcher.machines.remote import Order


class TaskError(Exception):
    """The actor's own code has raised."""


class ActorError(Exception):
    """The actor is gone; with `actor_init_failed`, its code could not be loaded."""

    actor_init_failed = False


class BeginningError(ActorError):
    """As where a package is missing on a node."""

    actor_init_failed = True


class Ray:
    """As much of ray as a run's nodes use; what an actor's first answer is, is given."""

    exceptions = SimpleNamespace(
        GetTimeoutError=TimeoutError, RayTaskError=TaskError, RayActorError=ActorError
    )

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.begun = 0
        self.options: dict[str, Any] = {}

    def remote(self, kind: type) -> Any:
        """Return what actors are made by."""
        call = SimpleNamespace(remote=lambda *_: None)
        actor = SimpleNamespace(begin=call, hear=call, leave=call)

        def make() -> Any:
            self.begun += 1
            return actor

        def keep(**options: Any) -> Any:
            self.options = options
            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=keep)

    def wait(self, promises: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Return those that are answered."""
        return ([], promises) if self.answer is None else (promises, [])

    def get(self, promise: Any, timeout: float = 0) -> Any:
        """Return or raise the answer."""
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def kill(self, actor: Any) -> None:
        """End an actor."""


class Played:
    """The nodes of a run, and what was said; it is over when it is given up, or *until* was said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ray: Ray, number: int, until: str = "") -> None:
        for name in ("_LOOK_S", "_PAUSE_S", "_WAITING_S", "_ENDING_S"):
            monkeypatch.setattr(ray_nodes, name, 0.001)
        self.said: list[str] = []
        self.given_up = 0
        order = Order(folder="/p", words=("run",), environment={}, run="job/x", grace_s=0.0)

        def say(text: str) -> None:
            self.said.append(text)
            if until and until in text:
                self.nodes._is_over.set()

        def give_up() -> None:
            self.given_up += 1
            self.nodes._is_over.set()

        self.nodes = RayNodes(ray, number, Demand(1, 0), order, lambda *_: None, say, give_up)
        monkeypatch.setattr(ray_nodes, "draining_nodes", lambda: None)
        self.nodes.run()


@pytest.mark.parametrize("kind", [TaskError, BeginningError])
def test_a_run_of_which_no_node_can_be_begun_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """With the exception's own line, once; not as a cluster that is out of reach, and not again for ever."""
    error = kind("ray::NodeActor.__init__()\n  File x\nModuleNotFoundError: No module named 'elasticflow'\n")
    ray = Ray(error)
    played = Played(monkeypatch, ray, number=2)
    reason = "ModuleNotFoundError: No module named 'elasticflow'"
    assert (reason, 1, 2) == (played.nodes.refusal, played.given_up, ray.begun)
    assert [f"a node could not be begun: {reason}"] == [text for text in played.said if "begun:" in text]
    assert not [text for text in played.said if "cannot be reached" in text]


def test_a_node_that_is_lost_before_it_runs_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine went: that is no fault of the code."""
    ray = Ray(ActorError("died"))
    monkeypatch.setattr(
        ray_nodes.RayNodes, "_tell_who_waits", lambda self: self._is_over.set() if ray.begun > 2 else None
    )
    played = Played(monkeypatch, ray, number=1)
    assert (None, 0, 3) == (played.nodes.refusal, played.given_up, ray.begun)


def test_nodes_that_wait_for_room_and_a_ray_that_does_not_tell_drains_are_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until an autoscaler brings room; what a run that seems to hang would wonder about."""
    played = Played(monkeypatch, Ray(None), number=3, until="wait for room")
    assert (
        "3 of 3 nodes wait for room, 1 CPUs each: `ray status` shows what there is; an autoscaler may bring more"
        in played.said
    )
    assert 1 == len([text for text in played.said if "does not say which nodes it takes away" in text])


@pytest.mark.parametrize("labels", [{}, {"zone": "b"}])
def test_ray_is_asked_for_all_that_a_node_demands(labels: dict[str, str]) -> None:
    """Versions of Ray that know no labels are not asked for any."""
    ray = Ray(None)
    demand = Demand(0, 2, {"slot": 1.0}, labels)
    order = Order(folder="/p", words=("run",), environment={}, run="job/x", grace_s=0.0)
    RayNodes(ray, 1, demand, order, lambda *_: None, lambda _: None, lambda: None, "DEFAULT")._begin(0)
    asked = {
        name: ray.options.get(name) for name in ("num_cpus", "num_gpus", "resources", "scheduling_strategy")
    }
    assert {
        "num_cpus": 0,
        "num_gpus": 2,
        "resources": {"slot": 1.0},
        "scheduling_strategy": "DEFAULT",
    } == asked
    assert ({"label_selector": labels} if labels else {}).items() <= ray.options.items()
    assert bool(labels) == ("label_selector" in ray.options)
