"""Snapshots of a training job: when, what of them this rank stages, and going on from one (floor R)."""

from __future__ import annotations

import select
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from elasticflow import events
from elasticflow.errors import DatasetError, SnapshotError, StateError
from elasticflow.run_folder import snapshot_name
from elasticflow.runtime import buffers, restore
from elasticflow.runtime.policy import Policy
from elasticflow.runtime.share import Sharing, nbytes_of
from elasticflow.runtime.state import check_fit
from elasticflow.snapshots.mapped import NodeLoader
from elasticflow.snapshots.policy import Due
from elasticflow.snapshots.staging import StagingClient, start_writer

if TYPE_CHECKING:
    from elasticflow.runtime.member import Worker
    from elasticflow.runtime.order import Position, Schedule
    from elasticflow.runtime.state import Captured, State
    from elasticflow.snapshots.staging import WriterProcess

__all__ = ["Policy", "Snapshots", "load_weights"]

_FLUSH_LIMIT_S = 3600.0  # a slow store is waited for; a dead writer is noticed at once
_WRITER_OUTCOMES = (events.SNAPSHOT_COMMITTED, events.SNAPSHOT_FAILED, events.SNAPSHOT_REMOVED)


class Snapshots:
    """Takes snapshots of *state* and goes on from one. Every rank makes one, and calls it at the same steps.

    Args:
        me: This worker.
        state: What a snapshot holds.
        schedule: What positions mean.
        dataset: The training data; its fingerprint was taken by `open_dataset`.
        policy: When, where, which stay.
    """

    def __init__(self, me: Worker, state: State, schedule: Schedule, dataset: Any, policy: Policy) -> None:
        self._me, self._state, self._schedule, self._policy = me, state, schedule, policy
        self._catalog = policy.catalog(me.run_folder, me.run_id)
        self._due = Due(policy.every)
        self._writer: WriterProcess | None = None
        self._client = self._connect()
        self._last = schedule.start
        self._last_time = time.monotonic()
        self._staged: str | None = None
        self._parent: str | None = None
        self._outcomes = select.poll()
        self._outcomes.register(self._client.fileno(), select.POLLIN)
        self._sharing = Sharing(me.rank, me.world_size)
        self._is_prepared = False
        self._awaited = 0  # snapshots staged without an outcome
        if me.rank == 0 and self._due.seconds is not None:
            me.vote.snapshot_wanted = self._is_due_by_time
        me.at_leave.append(self._finish)

    def restore(self) -> Position:
        """Go on from the newest snapshot that every rank can read, else from the beginning. Collective: every rank.

        A damaged one is set aside and the next older one is taken.

        Raises:
            DatasetError: the snapshot was taken on other data.
            StateError: the job's model or optimizer is not the snapshot's.
        """
        me = self._me
        me.phase("restoring")
        position = self._schedule.start
        loads = NodeLoader(self._client, me.heartbeat.beat)
        found = restore.newest_good(me, self._catalog, loads)
        if found is not None:
            self._refuse_other_data(found.manifest.fingerprints)
            if me.rank == 0:  # before anything of it is used: what happens now may be its doing
                me.event(events.SNAPSHOT_CHOSEN, name=found.manifest.name)
            content = found.state
            restore.apply(me, self._state, found, loads)
            if content["job_digest"] != me.job_digest and me.rank == 0:
                me.log.warning(
                    "job.changed", snapshot=found.manifest.name, was=content["job_digest"], now=me.job_digest
                )
            me.generators.are_used |= content["draws_random"]
            position = restore.position_of(content["position"])
            me.restored_from = self._parent = self._staged = found.manifest.name
        self._last, self._last_time = position, time.monotonic()
        return position

    def due(self, position: Position) -> bool:
        """True if a snapshot is due after this step; the same on every rank."""
        if self._awaited and self._outcomes.poll(0):  # asking the client takes 30 times as long
            self._log_outcomes(self._client.reports())
        if not self._is_prepared:
            self._prepare()
        if self._me.skipped_step:
            return False
        return self._me.vote.snapshot or self._due.is_due(self._last, position)

    def stage(self, position: Position, *, final: bool = False) -> None:
        """Copy this rank's share into the writer's memory and return. Collective: every rank.

        Waits only while two earlier snapshots are still being written. The same step is never staged twice.
        """
        me = self._me
        if position.step == self._last.step:
            return
        began = time.monotonic()
        me.phase("snapshot")
        me.progress.flush()  # once it is committed, nobody makes these lines again
        buffers.make_equal(me, self._state.model)
        if self._state.ema is not None:
            buffers.make_equal(me, self._state.ema)
        captured = self._state.capture()
        share = self._sharing.share_of(captured)
        name = self._name(position.step)
        trigger = self._trigger(position, final=final)
        # More ranks than tensors: a rank without bytes never gets a buffer.
        entries = share.copy_into(self._client.buffer(share.nbytes) if share.nbytes else memoryview(b""))
        record = self._record(position, captured, trigger) if me.rank == 0 else None
        self._client.stage(name=name, step=position.step, tensors=entries, nbytes=share.nbytes, record=record)
        self._last, self._last_time, self._staged = position, time.monotonic(), name
        self._awaited += 1
        if me.rank == 0:
            size = sum(nbytes_of(tensor) for tensor in captured.tensors.values())
            stall = round(time.monotonic() - began, 6)
            me.event(events.SNAPSHOT_STAGED, name=name, bytes=size, stall_s=stall, trigger=trigger)
        me.phase("training")
        me.progress.go_on()

    def _prepare(self) -> None:
        # After the first step the optimizer has its state: what cannot be stored is refused now, and the writer
        # makes its memory ready (first touch takes longer than the copy) while training goes on.
        self._client.reserve(self._sharing.share_of(self._state.capture()).nbytes)
        self._is_prepared = True

    def _connect(self) -> StagingClient:
        me, address = self._me, self._me.identity.writer
        if address is None:
            if me.local_rank == 0:
                self._writer = start_writer(self._writer_config())
                address = self._writer.address
                if me.store is not None:
                    me.store.set(f"writer/{me.node}", address)
            else:
                assert me.store is not None
                address = me.store.get(f"writer/{me.node}").decode()
        return StagingClient.connect(
            address,
            rank=me.rank,
            world_size=me.world_size,
            local_world_size=me.local_world_size,
            generation=me.generation,
        )

    def _writer_config(self) -> dict[str, Any]:
        policy, evaluation = self._policy, self._state.evaluation
        return {
            "uri": policy.uri or str(self._me.run_folder.path),
            "options": policy.options,
            "prefix": self._catalog.prefix,
            "run_id": self._me.run_id,
            "keep_last": policy.keep_last,
            "keep_best": policy.keep_best,
            "keep_every": policy.keep_every,
            "keep_within": policy.keep_within,
            "integrity": policy.integrity,
            "best_mode": None if evaluation is None else evaluation.best_mode,
        }

    def _refuse_other_data(self, fingerprints: dict[str, Any]) -> None:
        for name, mark in self._me.fingerprints.items():
            if name in fingerprints and fingerprints[name] != mark:
                raise DatasetError(
                    f"the data of `{name}` is not what the snapshot was trained on: fingerprint {mark}, not {fingerprints[name]}",
                    "point the job at the same data, or start a new run",
                )

    def _is_due_by_time(self) -> bool:
        return self._due.is_due_by_time(time.monotonic() - self._last_time)

    def _trigger(self, position: Position, *, final: bool) -> str:
        if final:
            return "end" if self._schedule.is_end(position) else "drain"
        return self._due.trigger(self._last, position)

    def _name(self, step: int) -> str:
        me = self._me
        text = f"{me.run_id}/{step}/{me.generation}".encode()
        return snapshot_name(step, me.generation, blake2b(text, digest_size=4).hexdigest())

    def _record(self, position: Position, captured: Captured, trigger: str) -> dict[str, Any]:
        me, evaluation = self._me, self._state.evaluation
        state = {
            "position": position._asdict(),
            "schedule": {
                "samples": self._schedule.samples,
                "global_batch_size": self._schedule.global_batch_size,
            },
            "seed": me.seed,
            "draws_random": me.generators.look(),
            "job": me.job,
            "job_digest": me.job_digest,
            "state": captured.tree,
        }
        manifest = {
            "trigger": trigger,
            "parent": self._parent,
            "metric": None if evaluation is None else evaluation.metric_at(position),
            "epoch": position.epoch,
            "samples": position.samples,
            "aliases": captured.aliases,
            "memory_formats": captured.memory_formats,
            "fingerprints": dict(me.fingerprints),
            "versions": {"torch": str(torch.__version__)},
        }
        return {"state": state, "manifest": manifest}

    def _finish(self) -> None:
        reports = self._client.flush(_FLUSH_LIMIT_S)
        failed = [r for r in reports if r["event"] == events.SNAPSHOT_FAILED and r["name"] == self._staged]
        self._log_outcomes(reports)
        if failed:
            raise SnapshotError(f"the last snapshot could not be written: {failed[0]['reason']}")

    def _log_outcomes(self, reports: list[dict[str, Any]]) -> None:
        me = self._me
        for report in reports:
            event = report.pop("event")
            self._awaited -= event != events.SNAPSHOT_REMOVED
            # Under our agent the writer's own reports become events.
            if me.rank == 0 and me.identity.way != "launched" and event in _WRITER_OUTCOMES:
                report.pop("generation", None)
                me.event(event, level="warning" if event == events.SNAPSHOT_FAILED else "info", **report)


def load_weights(model: torch.nn.Module, path: str) -> None:
    """Copy the tensors of a safetensors file into the model; every rank.

    Raises:
        StateError: names, shapes or dtypes differ.
    """
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except OSError as error:
        raise StateError(f"model.weights: {path} cannot be read: {error}") from error
    check_fit(model, found, "model")
    model.load_state_dict(found)
