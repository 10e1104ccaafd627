"""The Ray cluster, as far as a run needs it: its nodes, the resources of a node, the nodes about to go."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.errors import RayError

if TYPE_CHECKING:
    from collections.abc import Mapping

ADDRESS = "RAY_ADDRESS"
_PRINT = "print_to_stdstream"
# Ray's refusal of another version (seen in 2.60, `_private/utils.py`): the cluster's two, then this process'.
_VERSION = re.compile(r"^ +(Ray|Python): (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Demand:
    """Resources and labels that a node of the run asks of a node of Ray."""

    cpus: float
    gpus: float
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def fits(self, resources: Mapping[str, float]) -> bool:
        """Return whether a node of Ray with *resources* meets the demand; Ray itself compares labels."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return all(resources.get(name, 0.0) >= amount for name, amount in asked.items())

    def __str__(self) -> str:
        """Return the demand in words."""
        asked = [f"{self.gpus:g} GPUs" if self.gpus else f"{self.cpus:g} CPUs"]
        asked += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        asked += [f"{name}={value}" for name, value in self.labels.items()]
        return ", ".join(asked)


def connect() -> Any:
    """Return ray, connected to the cluster that RAY_ADDRESS names, or to this machine's.

    Raises:
        RayError: ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise RayError(f"ray cannot be imported: {error}", "pip install 'elasticflow[ray]'") from error
    if ray.is_initialized():
        return ray
    address = os.environ.get(ADDRESS) or "auto"
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        if (versions := _VERSION.findall(str(error))) and len(versions) == 4:
            raise _other_versions(address, dict(versions[:2]), dict(versions[2:])) from error
        raise RayError(
            f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}",
            f"begin one with `ray start --head`, or name it: {ADDRESS}=HOST:6379",
        ) from error
    _keep_to_itself()
    return ray


def _other_versions(address: str, theirs: dict[str, str], ours: dict[str, str]) -> RayError:
    return RayError(
        f"the Ray cluster at {address} has {_in_words(theirs)}, and this machine has {_in_words(ours)}: Ray takes part with the "
        "cluster's own versions only",
        f"pip install 'ray=={theirs['Ray']}', in an environment of Python {theirs['Python']}",
    )


def _in_words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _keep_to_itself() -> None:
    """Have ray not print, on standard output, pages of what a raylet did before it was lost: `RayNodes` says that it was.

    Private to ray (seen in 2.60); where it is not there ray prints.
    """
    from ray._private import worker

    if hasattr(worker, _PRINT):
        setattr(worker, _PRINT, lambda *_, **__: None)


def demand_of(workers: int | str, nodes: list[dict[str, Any]]) -> Demand:
    """Return what a node with so many *workers* asks for: a GPU for each where Ray has any, else a CPU.

    Of workers for each GPU (`auto`, `gpu`) a node takes all that the largest node of Ray has.
    """
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    most_gpus = max((each.get("GPU", 0.0) for each in resources), default=0.0)
    if isinstance(workers, str):
        return Demand(0.0 if most_gpus else 1.0, most_gpus)
    return Demand(0.0, workers) if most_gpus else Demand(workers, 0.0)


def draining_nodes() -> set[str] | None:
    """Return the ids of nodes that Ray is about to take away; None where this version of Ray does not tell.

    Read from ray's private state (seen in 2.49 to 2.60, where Ray Train reads it, too). What that raises, such as where the
    cluster cannot be reached, is raised.
    """
    try:
        from ray._private import state

        ask = state.state.get_draining_nodes
    except (ImportError, AttributeError):
        return None
    return set(ask())
