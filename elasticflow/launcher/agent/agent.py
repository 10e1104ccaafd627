"""One agent per node: torch's elastic agent with the cures it needs (floor 3).

It forms each generation the supervisor decides on, starts the workers from its fork server, forwards what they log,
and reports how the generation ended. Whether to restart is never its round_.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.run import config_from_args, get_args_parser

from elasticflow import environment
from elasticflow.launcher.agent.helpers import HelperLostError
from elasticflow.launcher.agent.left_behind import Orphans, adopted
from elasticflow.launcher.agent.presence import Presence
from elasticflow.launcher.agent.rank_logs import GenerationLogs
from elasticflow.launcher.agent.reports import Reports
from elasticflow.launcher.agent.workers import ForkedWorkers, environment_of
from elasticflow.launcher.rendezvous import interface
from elasticflow.launcher.rendezvous.keys import is_requested, join_store
from elasticflow.launcher.rendezvous.rounds import Feed, SupervisedRendezvous
from elasticflow.rendezvous_place import RendezvousPlace
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it
    from torch.distributed.elastic.agent.server.api import RunResult

    from elasticflow.launcher.agent.agent_process import AgentConfig
    from elasticflow.launcher.agent.fork_client import ForkServer
    from elasticflow.launcher.agent.heartbeats import Heartbeats
    from elasticflow.launcher.rendezvous.keys import Keys
    from elasticflow.snapshots.staging import WriterProcess

_POLL_S = 0.02
_ROOT_CAUSE_WAIT_S = 0.15


class Agent(LocalElasticAgent):
    """LocalElasticAgent with workers from a fork server and restarts decided by the supervisor."""

    def __init__(
        self,
        spec: WorkerSpec,
        config: AgentConfig,
        store: Keys,
        logs: GenerationLogs,
        server: ForkServer,
        writer: WriterProcess,
        heartbeats: Heartbeats,
    ) -> None:
        super().__init__(spec, logs, exit_barrier_timeout=1)
        self._config = config
        self._control = store
        self._logs = logs
        self._server = server
        self._writer = writer
        self._heartbeats = heartbeats
        self._folder = RunFolder(Path(config.run_folder))
        self._feed = Feed(store)
        self._presence = Presence(config, self._feed)
        self._reports = Reports(self._feed, config.node, self._folder, writer, heartbeats)
        self._orphans = Orphans(self._left_behind, self._reports.left_behind)
        place = RendezvousPlace.parse(config.rendezvous)
        self._interface = interface.variables(place.host, place.port)
        self._rendezvous_handler.may_wait = self._look
        self._workers: ForkedWorkers | None = None
        self._ended_alone: set[int] = set()
        self._stands_still = self._has_shown = False

    @property
    def _rendezvous_handler(self) -> SupervisedRendezvous:
        handler = self._worker_group.spec.rdzv_handler
        assert isinstance(handler, SupervisedRendezvous)
        return handler

    def announce(self) -> None:
        """Tell the supervisor that this node is ready: everything is imported."""
        refused = self._server.wait_ready()
        self._presence.begin()
        self._rendezvous_handler.skip_old()
        spec = self._worker_group.spec
        self._feed.post(
            {
                "type": "node",
                "node": self._config.node,
                "host": socket.gethostname(),
                "nproc": spec.local_world_size,
                "node_rank": self._config.node_rank,
                "refused": refused,
            }
        )

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Run generation after generation until the supervisor stops the launch."""
        while True:
            self._initialize_workers(self._worker_group)
            failed = self._watch()
            self._stop_workers(self._worker_group)
            self._orphans.look(time.monotonic())
            self._worker_group.state = WorkerState.STOPPED
            assert self._workers is not None
            self._reports.ended(self._workers, self._ended_alone, failed=failed)

    def finish(self, patience_s: float) -> None:
        """After `run`: have the writer end what it holds, for at most *patience_s*, and tell what became of it.

        What workers have left behind is ended.
        """
        self._writer.finish(patience_s)
        self._orphans.end()
        self._reports.forward()

    def _assign_worker_ranks(
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return this node's workers; the round says how many each node has.

        Overrides torch's, where all agents wait for the first one, which may die meanwhile.
        """
        place = self._rendezvous_handler.place
        workers = []
        for local_rank in range(place.nproc):
            worker = Worker(local_rank)
            worker.global_rank = worker.role_rank = place.first_rank + local_rank
            worker.world_size = worker.role_world_size = place.world_size
            workers.append(worker)
        return workers

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 5) -> None:
        """Leave nothing behind when `run` ends: torch's gives workers 30 s that cannot be set."""
        super()._shutdown(signal.SIGKILL, timeout)
        self._presence.end()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Fork this node's workers of the decided generation.

        Overrides torch's, which reads the restart count as a generation number (it differs between nodes)
        and reuses one store prefix for all of them.
        """
        round_ = self._rendezvous_handler.round
        self._logs.generation = round_.generation
        self._heartbeats.reset(len(worker_group.workers))
        extra = {
            environment.RUN_ID: self._folder.run_id,
            environment.RUN_FOLDER: str(self._folder.path),
            environment.GENERATION: str(round_.generation),
            environment.NODE: self._config.node,
            environment.RENDEZVOUS: self._config.rendezvous,
            environment.WRITER: self._writer.address,
            environment.FAILED_AT: "" if round_.failed_at is None else repr(round_.failed_at),
            environment.NUMA: _numa(worker_group.spec),
            environment.HEARTBEAT_FD: str(self._heartbeats.fd),
            **self._interface,
        }
        envs = {w.local_rank: environment_of(w, worker_group, extra) for w in worker_group.workers}
        entry_point = str(Path(self._config.launch_folder) / "train.py")
        self._workers = ForkedWorkers(self._server, worker_group.spec.role, entry_point, envs, self._logs)
        self._pcontext = self._workers
        self._workers.start()
        self._ended_alone = set()
        self._stands_still = self._has_shown = False
        pids = self._workers.pids()
        ranks = {w.local_rank: w.global_rank for w in worker_group.workers}
        self._reports.begun(round_.generation, ranks, pids)
        return pids

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kill what is left of the group at once.

        After a failure waiting is useless: a signal handler cannot run inside a collective (measured),
        and torch's grace of 30 s cannot be set for restarts.
        """
        if self._workers is not None:
            self._workers.close(signal.SIGKILL, timeout=5)

    def _watch(self) -> bool:
        """Return whether the generation failed, once its workers have all ended or one has failed."""
        assert self._workers is not None
        generation = self._rendezvous_handler.round.generation
        draining = False
        while True:
            select.select([self._server.fileno(), self._writer.fileno()], [], [], _POLL_S)
            self._reports.forward()
            self._look()
            result = self._workers.wait(0)
            if result is not None:
                if result.is_failed():
                    self._await_root_cause()
                    self._look()
                self._reports.forward()
                self._ended_alone = set(self._workers.exits())
                return bool(result.is_failed())
            if not draining and is_requested(self._control, "drain", generation):
                draining = True
                self._workers.send(signal.SIGTERM)
            if is_requested(self._control, "stop", generation):
                return False  # what is left of the group is killed next
            self._look_for_hang(generation)

    def _look(self) -> None:
        """Pass on a wish to leave, and look after the helpers, without which the agent leaves.

        Raises:
            RendezvousGracefulExitError: this node was let go, or is taken for lost.
            HelperLostError: the writer or the fork server has ended: whatever workers say then is only what follows.
        """
        self._presence.look()
        self._orphans.pursue(time.monotonic())
        if (code := self._writer.exit_code()) is not None:
            raise HelperLostError("snapshot writer", code)
        if not self._server.pump():
            raise self._server.lost()

    def _left_behind(self) -> list[int]:
        return adopted(self._folder, {self._server.process.pid, self._writer.process.pid})

    def _await_root_cause(self) -> None:
        """Wait a moment while all failures so far are exceptions: the rank that caused them may still be ending."""
        assert self._workers is not None
        deadline = time.monotonic() + _ROOT_CAUSE_WAIT_S
        while time.monotonic() < deadline:
            exits = self._workers.exits()
            if len(exits) == len(self._workers.pids()) or any(code < 0 for code, _ in exits.values()):
                return
            self._server.pump(0.01)

    def _look_for_hang(self, generation: int) -> None:
        """Tell whether all workers here stand still, and where if those of all nodes do: the supervisor asks then."""
        assert self._workers is not None
        stands_still = self._heartbeats.stand_still(self._workers.exits())
        if stands_still != self._stands_still:
            self._stands_still = stands_still
            self._reports.standstill(is_so=stands_still)
        if stands_still and not self._has_shown and is_requested(self._control, "stacks", generation):
            self._has_shown = True
            self._reports.stacks(self._workers)


def build_agent(
    config: AgentConfig, server: ForkServer, writer: WriterProcess, heartbeats: Heartbeats
) -> Agent:
    """Return the agent, configured by parsing the very argv that was written into the launch folder."""
    argv = (Path(config.launch_folder) / "torchrun.args").read_text(encoding="utf-8").splitlines()
    arguments = get_args_parser().parse_args(argv)
    # Logs go to the run folder; told of no folder, torch makes one beside it for each agent and leaves it there (2.13).
    arguments.log_dir = os.devnull
    launch, _, _ = config_from_args(arguments)
    place = RendezvousPlace.parse(config.rendezvous)
    store = join_store(place)
    folder = RunFolder(Path(config.run_folder))
    spec = WorkerSpec(
        role=launch.role,
        local_world_size=launch.nproc_per_node,
        entrypoint=str(Path(config.launch_folder) / "train.py"),
        rdzv_handler=SupervisedRendezvous(store, config.node, folder.run_id, place),
        max_restarts=0,  # the supervisor's ledger is the only place where restarts are counted
        monitor_interval=launch.monitor_interval,
        local_addr=launch.local_addr,
        event_log_handler="null",
        numa_options=launch.numa_options,
    )
    assert launch.logs_specs is not None
    logs = GenerationLogs.like(launch.logs_specs, folder)
    return Agent(spec, config, store, logs, server, writer, heartbeats)


def _numa(spec: WorkerSpec) -> str:
    return "" if spec.numa_options is None else spec.numa_options.affinity_mode.value
