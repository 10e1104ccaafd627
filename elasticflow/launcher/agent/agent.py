"""One agent per node: starts the workers of each generation that the supervisor orders, and reports how they ended.

It has its fork server fork them, and forwards their log lines. The supervisor alone decides about restarts. The agent does
not import torch: it would start two seconds later and take 100 MB more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.launcher.agent.device_health import DeviceHealth
from elasticflow.launcher.agent.flight_recorder import FlightRecorder, may_use_devices
from elasticflow.launcher.agent.lingering import LingeringRanks, sleeps, waits_for_peers
from elasticflow.launcher.agent.node_heartbeat import NodeHeartbeat, NodeReleasedError
from elasticflow.launcher.agent.orphans import Orphans, adopted
from elasticflow.launcher.agent.profile_requests import ProfileRequests
from elasticflow.launcher.agent.rank_logs import tail
from elasticflow.launcher.agent.reporter import Reporter
from elasticflow.launcher.agent.standby_keeper import StandbyKeeper
from elasticflow.launcher.agent.worker_streams import WorkerStreams
from elasticflow.launcher.agent.workers import (
    ForkedWorkers,
    GroupState,
    environment_of,
    environment_of_script,
    master_of,
)
from elasticflow.launcher.fork_server.server_process import HelperLostError
from elasticflow.launcher.rendezvous import network
from elasticflow.launcher.rendezvous.requests import FileSender
from elasticflow.launcher.rendezvous.store_keys import ORDERS, is_requested, requested_check
from elasticflow.launcher.rendezvous.supervisor_channel import Orders, Outbox
from elasticflow.launcher.restarts.failures import aborted_by_nccl
from elasticflow.protocol import control_store, worker_environment
from elasticflow.protocol.messages import Activity, NodeReady, NodeReports
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.run_folder import RunFolder
from elasticflow.system.polling import readable
from elasticflow.system.processes import STOPPED, STOPPED_S, StoppedChild, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.events import EventRecord
    from elasticflow.launcher.agent.agent_process import AgentConfig
    from elasticflow.launcher.agent.worker_heartbeats import WorkerHeartbeats
    from elasticflow.launcher.compiler_cache.keeper import CompilerCacheKeeper
    from elasticflow.launcher.fork_server.client import ForkServer
    from elasticflow.launcher.fork_server.protocol import TorchrunOptions
    from elasticflow.launcher.rendezvous.supervisor_channel import Assignment
    from elasticflow.protocol.control_store import RemoteControlStore
    from elasticflow.snapshots.client.writer_process import WriterProcess

_POLL_S = 0.02
_ROOT_CAUSE_WAIT_S = 0.15
# Seconds in which killed workers have to be gone: after a generation, and when the agent exits.
_GONE_S, _GONE_FROM_DEVICES_S = 5, 25  # the driver gives back hundreds of gigabytes of pinned memory
_GONE_AT_LAST_S = 30


class _StoppedError(Exception):
    """The supervisor has stopped a generation whose workers have not started here."""


def gone_s(environment: Mapping[str, str]) -> int:
    """Return the seconds in which killed workers with these variables have to be gone before they count as stuck."""
    return _GONE_FROM_DEVICES_S if may_use_devices(environment) else _GONE_S


class Agent:
    """The agent of one node.

    Args:
        options: The launch's arguments as torchrun parses them.
        server: Forks the workers; ready to do so.
        compiler_cache: Keeps the compiler's cache; None: the job compiles nothing.
        outbox: Number of the node's outbox in the store; None: a new one.
    """

    def __init__(
        self,
        config: AgentConfig,
        options: TorchrunOptions,
        store: RemoteControlStore,
        server: ForkServer,
        writer: WriterProcess,
        heartbeats: WorkerHeartbeats,
        compiler_cache: CompilerCacheKeeper | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self._config, self._options = config, options
        self._store = store
        self._server, self._writer, self._heartbeats = server, writer, heartbeats
        self._compiler_cache = compiler_cache
        self._folder = RunFolder(Path(config.run_folder))
        self._orders = Orders(store, config.node)
        self._outbox = outbox or Outbox(store)
        self._node_heartbeat = NodeHeartbeat(config, self._outbox)
        self._reporter = Reporter(
            self._outbox, config.node, self._folder, writer, heartbeats, compiles=config.compiles
        )
        self._files = (
            FileSender(store, self._outbox.post, config.node, self._folder) if config.has_own_folder else None
        )
        self._stopped_writer = StoppedChild(writer.process, time.monotonic())
        self._orphans = Orphans(self._adopted, self._report, config.node)
        self._store_address = config.store_address
        self._interface = network.variables(
            self._store_address.host, self._store_address.port, config.interface
        )
        self._standbys = StandbyKeeper(
            config.warm,
            server,
            heartbeats,
            options.nproc,
            self._folder.imports,
            config.node,
            self._report,
        )
        self._profiles = ProfileRequests(store, self._folder, heartbeats.request_profile)
        self._device_health = DeviceHealth(
            config.node, self._outbox.post, workers=0 if config.setup.script is not None else options.nproc
        )
        self._flight_recorder = FlightRecorder(os.environ)
        self._began = time.monotonic()  # the generation, or this agent before the first
        self._ranks: dict[int, int] = {}
        self._workers: ForkedWorkers | None = None
        self._generation = 0
        self._outputs: list[tuple[Path, Path]] = []  # of each worker of a script
        self._is_stalled = self._has_told_stacks = self._is_left_waiting = False
        self._lingering = LingeringRanks(config.hang_timeout_s)
        self._check = requested_check(store)  # the newest request that is answered or out of date

    def announce(self) -> None:
        """Tell the supervisor that this node is ready: everything is imported."""
        self._node_heartbeat.begin()
        self._orders.skip_old()
        self._check = requested_check(self._store)
        self._outbox.post(
            NodeReady(
                node=self._config.node,
                host=socket.gethostname(),
                nproc=self._options.nproc,
                node_rank=self._config.node_rank,
                refused=self._server.wait_ready().refused,
                has_own_folder=self._config.has_own_folder,
            )
        )

    def run(self) -> None:
        """Run generation after generation until the supervisor stops the launch, or lets this node go.

        No worker is left afterwards.

        Raises:
            HelperLostError: the writer or the fork server has ended.
        """
        try:
            while (assignment := self._orders.wait_for_next(self._look_between)) is not None:
                try:
                    workers = self._start(assignment)
                except _StoppedError:
                    self._reporter.never_started(assignment.generation)
                    continue
                failed, alone = self._watch(workers, assignment.generation)
                # After a failure a grace would be useless: a signal handler cannot run inside a collective (measured).
                workers.close(signal.SIGKILL, gone_s(os.environ))
                if failed or len(alone) < assignment.nproc:
                    self._writer.load_ahead()
                self._orphans.look(time.monotonic())
                self._report(*workers.streams.untold())
                self._reporter.ended(workers, alone, failed=failed)
        except NodeReleasedError:
            return
        finally:
            if self._workers is not None:
                self._workers.close(signal.SIGKILL, _GONE_AT_LAST_S)
            self._device_health.end()
            self._flight_recorder.end()
            self._node_heartbeat.end()

    def finish(self, patience_s: float) -> None:
        """Have the writer finish within *patience_s*, report its snapshots, end processes that workers left behind. Called after `run`."""
        self._writer.finish(patience_s)
        self._orphans.end()
        if self._compiler_cache is not None:
            self._report(*self._compiler_cache.finish())
        self._reporter.forward()
        if self._files is not None:
            # If the launch is over, its store is gone, and the files are not needed.
            with contextlib.suppress(StoreLostError):
                self._files.send_last(self._generation)

    def _start(self, assignment: Assignment) -> ForkedWorkers:
        """Start this node's workers of a generation, and return them."""
        self._generation, self._began = assignment.generation, time.monotonic()
        self._device_health.end()  # it was not waited for
        self._check = requested_check(self._store)
        ranks = {local_rank: assignment.first_rank + local_rank for local_rank in range(assignment.nproc)}
        self._ranks = ranks
        self._heartbeats.reset(len(ranks))
        node = self._config.node
        streams = WorkerStreams(self._folder, assignment.generation, ranks, self._options, node)
        recorder = self._flight_recorder.variables(self._folder.generation_logs(assignment.generation))
        environments = {
            local_rank: self._environment(assignment, local_rank) | recorder for local_rank in ranks
        }
        if self._config.setup.script is not None:
            self._outputs = [(streams.stdouts[rank], streams.stderrs[rank]) for rank in ranks]
            where = self._store_address.host, self._config.interface
            master = master_of(self._store, *where, assignment, self._look_before_start)
            for local_rank, environment in environments.items():
                errors = streams.stderrs[local_rank].with_suffix(".error.json")
                environment.update(environment_of_script(master, assignment.generation, errors))
        self._workers = workers = ForkedWorkers(self._server, environments, streams)
        if self._compiler_cache is not None:
            self._compiler_cache.begin(is_first=assignment.first_rank == 0)
        workers.start()
        self._standbys.begin()
        self._is_stalled = self._has_told_stacks = self._is_left_waiting = False
        self._reporter.started(assignment.generation, ranks, workers.pids())
        return workers

    def _look_before_start(self) -> None:
        """Do the work of `_look` while rank 0's node is waited for; raise `_StoppedError` if the supervisor stops the generation."""
        self._look()
        if is_requested(self._store, "stop", self._generation):
            raise _StoppedError

    def _environment(self, assignment: Assignment, local_rank: int) -> dict[str, str]:
        failed_at = assignment.failed_at
        master = (self._store_address.host, self._store_address.port)
        return {
            **environment_of(assignment, local_rank, self._options.role, self._folder.run_id, master),
            worker_environment.RUN_ID: self._folder.run_id,
            worker_environment.RUN_FOLDER: str(self._folder.path),
            worker_environment.GENERATION: str(assignment.generation),
            worker_environment.NODE: self._config.node,
            worker_environment.RENDEZVOUS: self._config.rendezvous,
            worker_environment.WRITER: self._writer.address,
            worker_environment.FAILED_AT: "" if failed_at is None else repr(failed_at),
            worker_environment.NUMA: self._options.numa,
            worker_environment.HEARTBEAT_FD: str(self._heartbeats.fd),
            **self._interface,
        }

    def _watch(self, workers: ForkedWorkers, generation: int) -> tuple[bool, set[int]]:
        """Wait until all workers have ended, one has failed, or the supervisor stops the generation.

        Returns:
            True if the generation failed, and the local ranks that ended by themselves.
        """
        is_draining = False
        while True:
            readable((self._server.fileno(), self._writer.fileno()), _POLL_S)
            self._reporter.look()
            self._look()
            may_leave = is_draining and self._config.setup.script is not None
            state = workers.poll(may_leave=may_leave)
            if state is GroupState.FAILED and self._config.setup.script is not None:
                # Workers of another node may have been asked to exit first, and these failed because their peers are gone.
                may_leave = is_requested(self._store, "drain", generation)
            if may_leave and not is_draining:
                is_draining = True
                workers.send(signal.SIGTERM)
                continue
            if state is not GroupState.RUNNING:
                if state is GroupState.FAILED:
                    self._await_root_cause(workers)
                    self._look()
                self._reporter.forward()
                return state is GroupState.FAILED, set(workers.exits())
            if not is_draining and is_requested(self._store, "drain", generation):
                is_draining = True
                workers.send(signal.SIGTERM)
            if is_requested(self._store, "stop", generation):
                return False, set()
            self._look_for_lingering(workers)
            self._look_for_hang(workers, generation)
            self._reporter.activity(workers.exits())
            self._reporter.figures()
            self._report(*workers.streams.cut())
            self._standbys.look(time.monotonic())
            self._profiles.look(time.monotonic(), generation, self._ranks)
            self._look_at_compiler_cache()

    def _look(self) -> None:
        """Pass on a request to leave; end processes left behind by workers; send requested files; check the helpers.

        Raises:
            NodeReleasedError: this node was let go, or counts as lost.
            HelperLostError: the writer or the fork server has ended, from which failures of workers follow.
        """
        self._node_heartbeat.pass_on()
        self._orphans.pursue(time.monotonic())
        if self._files is not None:
            self._files.look()
        self._stopped_writer.look(time.monotonic())
        if (code := self._writer.exit_code()) is not None:
            raise HelperLostError("snapshot writer", code)
        if not self._server.pump():
            raise self._server.lost()

    def _look_between(self) -> None:
        """Do the work of `_look` while no worker runs; check the devices if the supervisor asks, also about an earlier agent's generation."""
        self._look()
        self._device_health.look(time.monotonic())
        if (wanted := requested_check(self._store)) != self._check:
            self._check = generation, nodes = wanted
            if self._config.node in nodes:
                self._device_health.begin(generation, self._began)

    def _adopted(self) -> list[int]:
        own = {self._server.process.pid, self._writer.process.pid, *self._device_health.pids()}
        return adopted(self._folder, own if (cache := self._compiler_cache) is None else own | cache.pids())

    def _look_at_compiler_cache(self) -> None:
        if self._compiler_cache is not None:
            phases = (progress.phase for progress in self._heartbeats.progress())
            self._report(*self._compiler_cache.look(time.monotonic(), phases))

    def _report(self, *reports: EventRecord) -> None:
        if reports:
            self._outbox.post(NodeReports(reports))

    def _await_root_cause(self, workers: ForkedWorkers) -> None:
        """Wait a moment while there are only exceptions and aborts by NCCL: the rank that caused them may still be ending."""
        deadline = time.monotonic() + _ROOT_CAUSE_WAIT_S
        while time.monotonic() < deadline:
            exits = workers.exits()
            if len(exits) == len(workers.pids()) or any(
                code < 0 and not aborted_by_nccl(code, tail(workers.streams.stderrs[rank]))
                for rank, (code, _) in exits.items()
            ):
                return
            self._server.pump(0.01)

    def _look_for_hang(self, workers: ForkedWorkers, generation: int) -> None:
        """Report whether all workers of this node make no progress, and their stacks when the supervisor asks.

        The supervisor asks once no worker of any node makes progress, or a signal has stopped a worker's process.
        """
        for local_rank, files in enumerate(self._outputs):
            self._heartbeats.heard(local_rank, sum(map(_size, files)))
        is_stalled = self._heartbeats.look(workers.exits()) or self._is_left_waiting
        is_one_stopped = self._is_one_stopped(workers)
        is_stalled |= is_one_stopped
        if is_stalled != self._is_stalled:
            self._is_stalled = is_stalled
            self._reporter.standstill(is_so=is_stalled, is_one_stopped=is_one_stopped)
        if is_stalled and not self._has_told_stacks and is_requested(self._store, "stacks", generation):
            self._has_told_stacks = True
            self._reporter.stacks(workers, self._flight_recorder)

    def _is_one_stopped(self, workers: ForkedWorkers) -> bool:
        """Return whether a worker has made no progress for `STOPPED_S` because a signal has stopped its process."""
        silent = self._heartbeats.silent(STOPPED_S)
        return bool(silent) and any(
            state_of(pid) == STOPPED for rank, pid in workers.left().items() if rank in silent
        )

    def _look_for_lingering(self, workers: ForkedWorkers) -> None:
        """End ranks that stay without a sign of life although their peers have ended well.

        A rank in a collective counts as hung; a rank that sleeps is left alone.
        """
        if self._is_left_waiting or not any(code == 0 for code, _ in workers.exits().values()):
            return
        left = workers.left()
        silent_s = {each.local_rank: each.seconds for each in self._heartbeats.progress()}
        if not self._lingering.look(
            time.monotonic(), {pid: silent_s[local_rank] for local_rank, pid in left.items()}
        ):
            return
        stalled = self._reporter.stalled(workers)
        self._is_left_waiting = any(map(waits_for_peers, stalled))
        if self._is_left_waiting:
            return
        pids = {self._ranks[local_rank]: pid for local_rank, pid in left.items()}
        if any(sleeps(worker, pids[worker.rank]) for worker in stalled):
            self._lingering.begin_again()
            return
        self._reporter.lingered(stalled)
        workers.excuse()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def build_agent(
    config: AgentConfig,
    server: ForkServer,
    writer: WriterProcess,
    heartbeats: WorkerHeartbeats,
    compiler_cache: CompilerCacheKeeper | None = None,
) -> Agent:
    """Return the agent once its fork server is ready and has parsed torchrun's arguments.

    Raises:
        TorchrunRefusedError: torchrun refuses these arguments.
        HelperLostError: the fork server has ended.
    """
    store = control_store.connect(config.store_address, ORDERS)
    outbox = Outbox(store)

    def tell(module: str) -> None:
        outbox.post(Activity(config.node, "import", module))

    return Agent(config, server.options(tell), store, server, writer, heartbeats, compiler_cache, outbox)
