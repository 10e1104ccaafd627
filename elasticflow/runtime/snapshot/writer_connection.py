"""This rank's connection to the snapshot writer of its node, and the writer's reports."""

from __future__ import annotations

import select
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from elasticflow import events
from elasticflow.errors import RunTakenOverError
from elasticflow.runtime.process.sharded_tensors import part_of
from elasticflow.snapshots.client.messages import FENCED, GiveUp, PersistBegun, SnapshotReport, as_event
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.client.writer_process import WriterStart, start_writer
from elasticflow.system import forked_children
from elasticflow.system.process_record import ProcessRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.state.state import State
    from elasticflow.snapshots.client.messages import WriterReport
    from elasticflow.snapshots.store.catalog import Catalog

# Writers live as long as the worker that started them.
_started: list[Any] = []


class WriterReports:
    """Receives the writer's reports; rank 0 logs them and each staged snapshot.

    Attributes:
        nbytes: Bytes of the last snapshot staged or requested, all ranks together.
    """

    def __init__(self, me: Worker, client: StagingClient, catalog: Catalog) -> None:
        self._me, self._client, self._catalog = me, client, catalog
        self._poll = select.poll()
        self._poll.register(client.fileno(), select.POLLIN)
        self.nbytes, self.stall_s = 0, 0.0

    def log_new(self) -> None:
        """Log the writer's reports since the last call, if any; never waits."""
        # Receiving takes 30 times as long as polling.
        if self._client.has_reports or (self._client.is_awaiting and self._poll.poll(0)):
            self.log(self._client.reports())

    def log(self, reports: Iterable[WriterReport | PersistBegun]) -> None:
        """Log *reports* of the writer.

        Raises:
            RunTakenOverError: another start of the run has taken it over; under our agent the supervisor handles that.
        """
        me = self._me
        for report in reports:
            if isinstance(report, SnapshotReport) and report.event == events.SNAPSHOT_FAILED:
                self._tell_other_nodes(report)
            if isinstance(report, PersistBegun):
                self.log_staged(**vars(report))
            # Under our agent the writer's own reports become events.
            elif me.identity.started_by != "launcher":
                if me.rank == 0:
                    fields = as_event(report)
                    fields.pop("generation", None)
                    me.event(events.EVENTS[fields.pop("event")], **fields)
                if isinstance(report, SnapshotReport) and report.event == events.SNAPSHOT_FAILED:
                    self._tell_of_failed(report)

    def wait(self) -> None:
        """Report that this rank lives, while it waits for the writer, and tell the writer which snapshots failed on other nodes."""
        me = self._me
        me.heartbeat.beat()
        if me.rank != 0 or me.store is None:
            return
        for name in self._client.open_names:
            if me.store.check([key := _failure_key(name)]):
                self._client.send(GiveUp(name, me.store.get(key).decode()))

    def _tell_other_nodes(self, report: SnapshotReport) -> None:
        """Tell rank 0, whose node commits and waits for this node's shards: this node may not be able to write that on the store."""
        me = self._me
        if me.local_rank == 0 and me.rank != 0 and me.store is not None:
            me.store.set(_failure_key(report.name), report.reason or "")

    def _tell_of_failed(self, report: SnapshotReport) -> None:
        if report.reason == FENCED:
            self._end_taken_over()
        if self._me.rank == 0:
            self._me.tell(f"snapshot {report.name} could not be written: {report.reason}")

    def _end_taken_over(self) -> NoReturn:
        claim = self._catalog.generations(self._me.generation).get(self._me.generation + 1, {})
        holder = ProcessRecord.from_json(claim)
        who = f"generation {self._me.generation + 1}" + ("" if holder is None else f", {holder}")
        raise RunTakenOverError(
            f"this run was started a second time, and continues there ({who}): snapshots of this process no longer count",
            "let one of them run; its snapshots are those of the run",
        )

    def log_staged(self, **facts: Any) -> None:
        """Log that the writer has a snapshot's bytes; *facts* are the snapshot's name, step and trigger."""
        me, single = self._me, self._client.single
        if me.rank == 0:
            me.event(events.SNAPSHOT_STAGED, bytes=self.nbytes, stall_s=self.stall_s, **facts)
            if single is not None:
                me.event(events.STAGING_SINGLE, reason=single)
                self._client.single = None


def _failure_key(name: str) -> str:
    return f"snapshot/{name}/failed"


def connect(me: Worker, settings: SnapshotSettings, prefix: str, state: State) -> StagingClient:
    """Return this rank's connection; without our agent, the first rank of a node starts the writer. Every rank.

    Raises:
        SnapshotError: no writer runs, or the writer refuses this generation.
    """
    address = me.identity.writer
    if address is None:
        if me.local_rank == 0:
            best_mode = None if state.evaluation is None else state.evaluation.ranking.best_mode
            settings = replace(settings, keep=replace(settings.keep, best_mode=best_mode))
            uri = settings.uri or str(me.run_folder.path)
            start = WriterStart(uri, me.run_id, settings, prefix)
            writer = start_writer(start)
            forked_children.own(*writer.descriptors())
            _started.append(writer)
            address = writer.address
            if me.store is not None:
                me.store.set(f"writer/{me.node}", address)
        else:
            assert me.store is not None
            address = me.store.get(f"writer/{me.node}").decode()
    client = StagingClient.connect(
        address,
        rank=me.rank,
        world_size=me.world_size,
        local_world_size=me.local_world_size,
        local_rank=me.local_rank,
        generation=me.generation,
        part=part_of(state.sharded_modules),
    )
    forked_children.own(client.fileno())
    return client
