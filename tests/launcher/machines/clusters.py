"""Ray clusters of several nodes on this machine, as `ray.cluster_utils` makes them, and runs on them."""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.end_to_end.harness import Project, Running

_NODE = {"num_cpus": 1, "object_store_memory": 80_000_000}
_PREEMPTION = 2  # DRAIN_NODE_REASON_PREEMPTION of Ray's gcs.proto
SETS = (
    "nodes.min=1",
    "nodes.max=2",
    "nodes.nproc_per_node=1",
    'train.consistency="exact"',
    "train.virtual_shards=4",
)


class LocalCluster:
    """A cluster whose nodes have one CPU each, that of the head not counted.

    Attributes:
        address: For RAY_ADDRESS.
    """

    def __init__(self, nodes: int) -> None:
        self._begin(nodes)

    def _begin(self, nodes: int) -> None:
        from ray.cluster_utils import Cluster

        head = {**_NODE, "num_cpus": 0, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self._nodes: list[Any] = []
        for _ in range(nodes):
            self.add_a_node()

    def add_a_node(self, **options: Any) -> str:
        """Begin one more node, such as one with resources or labels of its own; return Ray's id of it."""
        self._nodes.append(self._cluster.add_node(**_NODE, **options))
        return str(self._nodes[-1].node_id)

    def lose_a_node(self) -> None:
        """Cut the power of a node, the newest one: all that runs there dies at once."""
        node = self._nodes.pop()
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        below = raylet.children(recursive=True)
        for process in (raylet, *below):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def drain_a_node(self, seconds: float) -> None:
        """Announce, as an autoscaler or a cloud does, that the newest node goes in *seconds*; nothing ends it."""
        deadline_ms = int((time.time() + seconds) * 1000)
        client = import_module("ray._raylet").GcsClient(address=self.address)
        is_taken, why = client.drain_node(self._nodes.pop().node_id, _PREEMPTION, "taken away", deadline_ms)
        assert is_taken, why

    def restart(self) -> None:
        """Have the head die with all nodes, and begin a cluster of as many anew, which knows nothing of the first."""
        number = len(self._nodes)
        while self._nodes:
            self.lose_a_node()
        for processes in self._cluster.head_node.all_processes.values():
            for each in processes:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(each.process.pid).kill()
        self._begin(number)

    @property
    def size(self) -> int:
        """Nodes that take work, the head not counted."""
        return len(self._nodes)

    def actors(self) -> list[str]:
        """Return the classes of actors that live."""
        state: Any = import_module("ray._private.state").GlobalState()
        options = import_module("ray._raylet").GcsClientOptions.create(self.address, None, True, False)
        state._initialize_global_state(options)
        table = state.actor_table(None, None, None)
        return [each["ActorClassName"] for each in table.values() if each["State"] != "DEAD"]

    def end(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()


@contextmanager
def cluster(nodes: int) -> Iterator[LocalCluster]:
    """Yield a cluster of so many nodes, which is gone afterwards."""
    made = LocalCluster(nodes)
    try:
        yield made
    finally:
        made.end()


def on_ray(project: Project, ray: LocalCluster | None, run_id: str, epochs: int = 12) -> Running:
    """Start the main job on Ray; without *ray*: with one worker on this machine alone."""
    sets = [f"--set={text}" for text in (*SETS, f"train.epochs={epochs}")]
    where = {} if ray is None else {"RAY_ADDRESS": ray.address}
    options = ["--on", "ray"] if ray is not None else []
    return project.start(
        "run", "jobs/mnist.toml", f"--run-id={run_id}", *options, *sets, run_id=run_id, **where
    )
