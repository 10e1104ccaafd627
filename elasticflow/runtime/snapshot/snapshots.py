"""Snapshots of a training job: takes them when they are due, stages this rank's part, and resumes from one."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from elasticflow import events
from elasticflow.errors import SnapshotError, StateError
from elasticflow.protocol import worker_environment
from elasticflow.protocol.snapshot_settings import AUTO, SnapshotSettings
from elasticflow.runtime.data.dataset import EVALUATION_DATA, TRAINING_DATA, marks_of, opened, require_same
from elasticflow.runtime.data.order.order import require_same_order
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import devices, environment
from elasticflow.runtime.process.context import Restored
from elasticflow.runtime.process.sharded_tensors import local_of
from elasticflow.runtime.process.stopping import Leaving
from elasticflow.runtime.process.torch_private import version_of
from elasticflow.runtime.snapshot import memory_tier, restore, writer_connection
from elasticflow.runtime.snapshot.memory_tier import MemoryTier
from elasticflow.runtime.snapshot.metadata import FROZEN, RESTING, WRAPPED, SnapshotMetadata, StateRecord
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner
from elasticflow.runtime.snapshot.replicas import CaptureCheck, ReplicaCheck, flip
from elasticflow.runtime.snapshot.restored_state import RestoredState
from elasticflow.runtime.snapshot.staging_copy import copier_for
from elasticflow.runtime.snapshot.trajectory import TrajectoryRecorder
from elasticflow.runtime.snapshot.unsaved import Unsaved
from elasticflow.runtime.snapshot.writer_connection import WriterReports
from elasticflow.snapshots.client.loading import NodeLoader
from elasticflow.snapshots.client.messages import SnapshotReport
from elasticflow.snapshots.format.policy import Due
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from elasticflow.runtime.data.dataset import OpenedDataset
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position, Schedule
    from elasticflow.runtime.snapshot.restore import SnapshotContent
    from elasticflow.runtime.state.options import OptionChange
    from elasticflow.runtime.state.state import Captured, State
    from elasticflow.snapshots.client.memory_tier import RecalledState
    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.format.policy import HasPosition

# A store may be slow; a dead writer shows at once.
_FLUSH_LIMIT_S = 3600.0
# Names of restored parts, in an event.
_MOST_NAMES = 20
_LAST_FAILED = "the last snapshot could not be written: {}"
_OVERTAKEN = "{} was written while it was copied, and not by its optimizer's step"


class MakesSteps(Protocol):
    """The object that computes steps, as far as snapshots need it."""

    @property
    def is_exact(self) -> bool:
        """True if steps have the same bits at every world size."""

    @property
    def was_skipped(self) -> bool:
        """True if the last step was skipped."""


class Snapshots:
    """Takes snapshots of *state* and resumes from one. Every rank creates an instance, and calls it at the same steps.

    Args:
        dataset: The training data, as `open_dataset` or `open_shards` returned it; None: `use_data` sets it later.
        compare_every: Interval at which the ranks' replicas are compared; they are also compared after the first step and for each
            snapshot.

    Attributes:
        restored: The snapshot that `restore` resumed from; None: the beginning.
        loop: Arguments of the script's loop, from the restored snapshot; None: the snapshot has none.
    """

    def __init__(
        self,
        worker: Worker,
        state: State,
        step: MakesSteps,
        schedule: Schedule,
        dataset: OpenedDataset | None,
        policy: SnapshotSettings,
        compare_every: str | None = None,
        not_exchanged: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._worker, self._state, self._step, self._schedule = worker, state, step, schedule
        self._dataset = opened(dataset)
        self._awaits_data = dataset is None
        self._unchecked: tuple[StateRecord, Manifest] | None = None
        self._catalog = Catalog.of_run(policy, worker.run_folder, worker.run_id)
        self._client = writer_connection.connect(worker, policy, self._catalog.prefix, state)
        self._reports = WriterReports(worker, self._client, self._catalog)
        # While this rank waits for a slow store.
        self._client.waiting = self._reports.wait
        self._metadata = SnapshotMetadata(worker, state, schedule, self._fingerprints())
        self._planner = ShardPlanner(worker.rank, worker.world_size)
        self._copier = copier_for(worker.device, state.optimizers.values())
        self._client.dropping = lambda slot: self._copier.release(memoryview(slot.memory))
        # A tensor was written while a snapshot was copied: another snapshot is due in its place.
        self._owes_snapshot = False
        self._capture_check = CaptureCheck(worker)
        self.unsaved = Unsaved(worker, state, policy.ignore)
        self._memory_tier = None
        # At an interval the memory tier covers one node. Without our agent, the writer ends with its worker, and the tier is of no use.
        is_single_node = worker.local_world_size == worker.world_size
        holds = worker.identity.writer is not None if policy.memory == AUTO else is_single_node
        if policy.memory is not None and holds:
            self._memory_tier = MemoryTier(
                worker, self._client, state, self._metadata, self._copier, policy.memory
            )
        # A state in an "auto" tier counts only once it was compared, so it never has to be forgotten.
        tier = self._memory_tier
        forget = None if tier is None or tier.is_auto else tier.forget
        self._replica_check = ReplicaCheck(
            worker, state, compare_every, forget, is_exact=step.is_exact, not_exchanged=not_exchanged
        )
        self._due, self._is_due = Due(policy.every), False
        self._keeps_best = policy.keep.best is not None
        # The next snapshot's state is in the memory tier, and the writer may not have begun to write it.
        self._awaits_writer = False
        self._last: HasPosition = schedule.start
        self._last_time = time.monotonic()
        self._staged: str | None = None
        # The newest step whose state was copied, and how often each of the model's tensors had been written by then.
        self._copied: tuple[int, dict[str, int]] = -1, {}
        self.restored: Restored | None = None
        self.loop: Mapping[str, Any] | None = None
        self.end_wanted: str | None = None
        self._frozen: list[str] | None = None
        self._resting: list[str] | None = None
        self._wrapped: list[str] = []
        self._changes: Sequence[OptionChange] = ()
        self._as_restored: RestoredState | None = None
        self._is_prepared = False
        if worker.device.type != "cpu" or (worker.rank == 0 and self._due.seconds is not None):
            worker.vote.when("snapshot", self._asks_for_snapshot)
        worker.moments.leave.append(self._await_last)
        fault_injection.expose(partial(flip, state.model))
        self._tell_of_stateful_data()

    def use_data(self, dataset: OpenedDataset) -> None:
        """Continue with *dataset* and the current schedule, in a loop that opens its data after `restore`. Every rank.

        Raises:
            DatasetError: the restored snapshot was taken on other data.
            StateError: the snapshot's position counts in another order of samples.
        """
        self._dataset, self._awaits_data = dataset, False
        self._metadata.fingerprints = self._fingerprints()
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None:
            self._require_same_data(*unchecked)
        self._tell_of_stateful_data()

    def describe_loop(self, settings: Mapping[str, Any]) -> None:
        """Add *settings* to the arguments of the script's loop that snapshots record. Every rank."""
        self._metadata.loop = {**(self._metadata.loop or {}), **settings}

    def note_end_wanted(self, reason: str | None) -> None:
        """Have the next snapshots record *reason*, given to a `Run.stop` that has not ended training yet; None: no call. Every rank."""
        self._metadata.end_wanted = reason

    def begin_stage(self, number: int) -> None:
        """Have snapshots record the data read until now as that of stage *number*, which has ended. Every rank."""
        fingerprint, unchecked = self._dataset.fingerprint, self._unchecked
        if unchecked is not None:
            # The stage had ended when the restored snapshot was taken, and a loop over epochs does not open its data again.
            fingerprint, self._unchecked = unchecked[1].fingerprints.get(TRAINING_DATA), None
        self._metadata.past_data[f"{TRAINING_DATA} of stage {number}"] = fingerprint or ""

    def require_past_data(self, number: int, dataset: OpenedDataset) -> None:
        """Compare the data of stage *number*, which had ended when the snapshot was taken. Every rank.

        Raises:
            DatasetError: the stage was trained on other data.
        """
        name = f"{TRAINING_DATA} of stage {number}"
        if self._unchecked is not None and dataset.fingerprint is not None:
            require_same({name: dataset.fingerprint}, self._unchecked[1].fingerprints, None, None)
            self._metadata.past_data[name] = dataset.fingerprint

    def restore(self) -> Position:
        """Continue from the newest state that every rank can read, else from the beginning. Collective: every rank.

        The state is the one that an earlier generation held in memory, else a snapshot; a damaged snapshot is set aside,
        and the next older snapshot is tried.

        Raises:
            DatasetError: the snapshot was taken on other data.
            StateError: the job's model or optimizer is not the snapshot's.
        """
        worker, began = self._worker, time.monotonic()
        worker.phase("restore")
        worker.leave_if_asked()
        loader = NodeLoader(self._client, self._beat_or_leave)
        held = self._recalled()
        if held is None:
            content = restore.newest_good(worker, self._catalog, loader)
        else:
            content = memory_tier.content_of(held, worker.run_id)
        position = self._schedule.start if content is None else self._take_over(content, loader)
        if content is not None:
            seconds = time.monotonic() - began
            self.restored = Restored(content.manifest.name, held is not None, seconds)
        self._last, self._last_time = position, time.monotonic()
        if held is not None:
            self._metadata.parent = held.parent
            self._last = held.held.committed or (self._schedule.start if held.parent is None else position)
        if self._memory_tier is not None:
            self._memory_tier.begin(position)
        # A state that an earlier generation held may be newer than every snapshot.
        worker.vote.may_leave_untrained &= held is None
        self._replica_check.begin(position)
        self.unsaved.begin()
        if folder := os.environ.get(worker_environment.TRAJECTORY):
            TrajectoryRecorder(Path(folder), worker, self._state, position, is_exact=self._step.is_exact)
        self._recall_stop(position.step)
        return position

    def put_back(self, *, is_last: bool = True, reads_on: bool = False) -> None:
        """Restore the state again if it was changed since `remember_restored`. Collective: every rank.

        Called where training continues: a script's actions between `Run.keep` and its loop belong to the run's beginning,
        and the snapshot contains their result. After a call with *is_last*, later calls do nothing.

        Args:
            reads_on: Nothing is loaded again: the script may have begun to read a kept loader, whose state cannot be loaded again.

        Raises:
            SnapshotError: the snapshot cannot be read again.
            StateError: with *reads_on*, a rank has changed the model, an optimizer or a schedule.
        """
        before = self._as_restored
        if before is None or self.restored is None or not before.is_remembered:
            return
        names = before.changed()
        if reads_on:
            names = [name for name in names if not name.startswith("include.")]
        frozen_again = before.freeze_again()
        before.set_modes_again()
        if is_last:
            before.forget()
        worker = self._worker
        if worker.all_true(not names and (reads_on or not frozen_again)):
            return
        if reads_on:
            raise StateError(
                f"{names[0] if names else 'kept state'} was changed between run.keep and the loop, after snapshot {self.restored.name} was "
                "loaded into it; where a loader is kept, which may be read by now, nothing is put back",
                "change it before run.keep, or only if run.position.step == 0",
            )
        names += frozen_again
        loader = NodeLoader(self._client, self._beat_or_leave)
        held = self._recalled() if self.restored.is_from_memory else None
        if held is None:
            content = restore.SnapshotContent.of(loader.load(self.restored.name))
        else:
            content = memory_tier.content_of(held, worker.run_id)
        restore.apply(worker, self._state, content, loader, self._changes)
        self._tell_of_put_back(names)

    def _recalled(self) -> RecalledState | None:
        return None if self._memory_tier is None else self._memory_tier.recall(self._catalog)

    def _tell_of_put_back(self, names: Sequence[str]) -> None:
        if self._worker.rank == 0 and self.restored is not None:
            restored = self.restored.name
            self._worker.event(events.STATE_PUT_BACK, names=names[:_MOST_NAMES], snapshot=restored)

    def record_end(self, reason: str) -> None:
        """Record beside the snapshots that the script's own loop ends after this step; rank 0 writes."""
        if self._worker.rank == 0:
            self._catalog.write_stop({"step": self._worker.progress.number, "reason": reason, "by_rank": 0})

    def remember_restored(self) -> None:
        """Freeze parameters as in the snapshot, and remember the restored state. Every rank.

        Where training continues, changes that the script has made to that state are undone, or refused.
        """
        if self.restored is not None:
            self._as_restored = RestoredState(self._state, self.restored.name, self._frozen, self._resting)
            # The script may have made the model as it was at the run's beginning.
            if names := self._as_restored.freeze_again():
                self._tell_of_put_back(names)

    @contextmanager
    def as_wrapped(self) -> Iterator[None]:
        """Have those parameters trained that were trained when the model was wrapped, before the snapshot froze them: they are exchanged once they are trained again."""
        parameters = dict(self._state.model.named_parameters())
        held = [parameters[name] for name in self._wrapped if name in parameters]
        held = [parameter for parameter in held if not parameter.requires_grad]
        for parameter in held:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in held:
                parameter.requires_grad_(False)

    def note_wrapped(self, wrapped: AbstractSet[int]) -> None:
        """Record in snapshots which frozen parameters were trained as the model was wrapped: those with an `id` in *wrapped*, which may grow."""
        self._metadata.wrapped = wrapped

    def begin_pass(self, is_running: Callable[[], bool]) -> None:
        """Note that training continues with a pass of a loop before which nothing is put back; see `RestoredState.begin_pass`."""
        if self._as_restored is not None:
            self._as_restored.begin_pass(is_running)

    def take_if_due(self, position: Position) -> None:
        """Take a snapshot if one is due, after `after_step` was called without *takes*. Every rank.

        Raises:
            ReplicasDifferError: as in `after_step`.
        """
        self._is_due = self._is_due_after(position)
        if self._is_due or self._is_to_be_held(position):
            with mark("snapshot"):
                self._take(position)

    def after_step(self, position: Position, *, takes: bool = True) -> bool:
        """Take a snapshot if one is due after this step, and finish earlier ones. Every rank, after each step.

        With `keep.best` a snapshot is also due if the evaluation after this step measured a better value than ever before.
        This rank's shard is copied into the writer's memory; no rank waits for another. A rank waits only while two
        earlier snapshots are still being written, and never with the memory tier. The writer receives a snapshot for the
        store only once all replicas are known to be equal, by the end of the next step, so that every snapshot is good
        to resume from. Without *takes* no snapshot is taken now: if the result is true, the caller calls `take_if_due` later.

        Raises:
            ReplicasDifferError: the replicas were compared, and a rank diverged.
            StateError: training changes state that no snapshot would hold; checked the first few times.
        """
        fault_injection.reach("training.step")
        self._reports.log_new()
        self._copier.poll()
        if self._capture_check.is_pending:
            self._capture_check.finish(self._state.capture)
        self._replica_check.finish()
        if not self._is_prepared:
            self._prepare()
        self.unsaved.after_step()
        if self._step.was_skipped:
            return False
        if self._replica_check.is_due(position):
            self._replica_check.require_same(position)
        self._is_due = self._is_due_after(position) or self._is_new_best(position)
        is_wanted = self._is_due or self._is_to_be_held(position)
        if is_wanted and takes:
            with mark("snapshot"):
                self._take(position)
        return is_wanted

    def is_due(self, position: Position) -> bool:
        """True if a comparison or a snapshot is due at *position*, apart from the clock."""
        is_held = self._is_to_be_held(position)
        return self._due.is_due(self._last, position) or is_held or self._replica_check.is_due(position)

    def _is_due_after(self, position: Position) -> bool:
        return self._worker.vote.snapshot or self._due.is_due(self._last, position)

    def _is_to_be_held(self, position: Position) -> bool:
        return self._memory_tier is not None and self._memory_tier.is_due(position)

    def idle_steps(self, position: Position, most: int, size: int) -> int:
        """Return the number of next steps, up to *most*, after which `after_step` only logs finished snapshots.

        Args:
            most: No step within this number ends an epoch.
        """
        is_busy = self._replica_check.is_pending or self._capture_check.is_pending or self._copier.is_copying
        if is_busy or self._owes_snapshot or not self._is_prepared or self.unsaved.looks_after_steps:
            return 0
        while most > 0:
            ahead = position._replace(
                step=position.step + most,
                offset=position.offset + most * size,
                samples=position.samples + most * size,
            )
            if not self.is_due(ahead):
                return most
            most //= 2
        return 0

    def finish(self, position: Position) -> None:
        """Take the last snapshot of this launch, unless *position* has a snapshot. Every rank, after the last step.

        `worker.leave` waits until the snapshot is committed.

        Raises:
            ReplicasDifferError: the replicas differ: a rank diverged.
            SnapshotError: *position* has a snapshot, but a rank's tensor was written while it was copied to the memory tier.
            StateError: training changes state that the snapshot would not hold.
        """
        self._take(position, final=True)

    def changed_since(self, position: Position) -> list[str]:
        """Return the names of the model's tensors that were written after the state of *position* was copied: `finish` copies no other."""
        step, counts = self._copied
        now = self._counts_of_writes() if step == position.step else {}
        return [name for name, count in now.items() if counts.get(name, count) != count]

    def _note_copied(self, position: Position) -> None:
        may_be_last = self._schedule.is_end(position) or self._schedule.remaining(position) is None
        if may_be_last and self._copied[0] != position.step:
            self._copied = position.step, self._counts_of_writes()

    def _counts_of_writes(self) -> dict[str, int]:
        model = self._state.model
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        held = ((name, local_of(tensor)) for name, tensor in tensors)
        # Tensors made in inference mode, as by an evaluation behind the loop, count no writes.
        return {name: version_of(tensor) for name, tensor in held if not tensor.is_inference()}

    def _is_new_best(self, position: Position) -> bool:
        # The same on every rank, since all ranks have the same metrics. After the last step `finish` takes a snapshot anyway.
        evaluation = self._state.evaluation
        if not self._keeps_best or evaluation is None or not evaluation.ranking.found_best_at(position):
            return False
        return not (self._worker.should_leave or self._schedule.is_end(position))

    def _take(self, position: Position, *, final: bool = False) -> None:
        worker = self._worker
        # The comparison of a held state may not have ended.
        self._replica_check.finish()
        # A step has one snapshot at most.
        if position.step == self._last.step:
            if final and self._memory_tier is not None:
                # No later step can replace an overtaken copy; without a memory tier the writer reports it.
                self._require_held(self._memory_tier, position)
            return
        is_durable = final or self._is_due
        tier = self._settled_tier()
        if tier is None and not is_durable:
            return
        if is_durable:
            for action in worker.moments.snapshot:
                action(position, self._metadata.name(position.step))
        began = time.monotonic()
        self.unsaved.before_snapshot(is_durable=is_durable)
        # The writer may write a held snapshot at any moment, unless only compared states are held.
        if final or (tier is not None and not tier.is_auto and self._is_due):
            self._replica_check.require_same(position)
        # A generation that resumes from this step does not log the lines before it again.
        worker.progress.flush()
        trigger = self._trigger(position, final=final)
        waits = self._must_wait(position, final=final)
        # A tier that holds at an interval waits for no store.
        with self._snapshot_phase() if is_durable and (tier is None or tier.is_auto) else nullcontext():
            if tier is None:
                captured = self._hand_over(position, trigger, waits=waits)
            else:
                self._hold(tier, position, trigger if is_durable else None, waits=waits)
                captured = None
        self._note_copied(position)
        if not is_durable:
            return
        self._capture_check.start(captured or self._state.capture())
        self._last, self._last_time = position, time.monotonic()
        self._staged = self._metadata.name(position.step)
        self._reports.stall_s = round(self._last_time - began, 6)
        if tier is None:
            self._reports.log_staged(name=self._staged, step=position.step, trigger=trigger)

    def _must_wait(self, position: Position, *, final: bool) -> bool:
        """Return whether training must wait for the copy: if it were overtaken, no later state could replace this one."""
        is_last = final or self._worker.should_leave or self._schedule.is_end(position)
        # A script that reads its own data may end its loop after any step, and then write to the model.
        may_be_last = self._is_due and self._schedule.remaining(position) is None
        return is_last or may_be_last or self._is_new_best(position)

    @contextmanager
    def _snapshot_phase(self) -> Iterator[None]:
        self._worker.phase("snapshot")
        yield
        self._worker.phase("step")
        self._worker.progress.go_on()

    def _settled_tier(self) -> MemoryTier | None:
        """Return the memory tier, unless a rank has no slots: then switch it off. Collective: every rank, the first time."""
        tier = self._memory_tier
        if tier is None or tier.is_settled:
            return tier
        if not self._is_prepared:
            # No step was left: the run resumed from its last state in memory, which the store had not taken.
            self._prepare()
        declined = tier.settle()
        if declined is None:
            return tier
        self._memory_tier = None
        self._client.reserve(self._planner.shard_of(self._state.capture()).nbytes)
        if self._worker.rank == 0:
            self._worker.event(events.HELD_OFF, reason=declined)
        return None

    def _hold(self, tier: MemoryTier, position: Position, trigger: str | None, *, waits: bool) -> None:
        """Have *tier* hold the state after *position*; with a *trigger*, have the writer store it once it counts."""

        def then() -> None:
            if trigger is not None:
                self._owes_snapshot = False
                self._copier.then(partial(self._request_persist, position.step, trigger))

        if tier.holds(position):
            if waits:
                # Code that ran since the copy began may have overtaken it.
                self._require_held(tier, position)
            then()
            return
        self._await_writer()

        def compare(captured: Captured, commit: Callable[[], None]) -> None:
            def count() -> None:
                tier.spent(self._replica_check.cost_s, self._replica_check.waited_s)
                commit()
                then()

            if tier.is_auto:
                self._replica_check.start(position, captured, count, soon=True)
            else:
                count()

        tier.hold(position, compare, waits=waits)
        self._awaits_writer = trigger is not None and (tier.is_auto or self._is_new_best(position))

    def _require_held(self, tier: MemoryTier, position: Position) -> None:
        """Make sure that no rank's copy of the state after *position* was overtaken. Collective: every rank."""
        self._copier.finish()
        overtaken = next(filter(None, self._worker.gather_text(tier.lost(position) or "")), None)
        if overtaken is not None:
            raise SnapshotError(_LAST_FAILED.format(_OVERTAKEN.format(overtaken)))

    def _request_persist(self, step: int, trigger: str, overtaken: str | None) -> None:
        self._owes_snapshot = overtaken is not None
        if overtaken is None:
            self._client.request_persist(step, trigger)

    def _await_writer(self) -> None:
        """Wait until the writer has begun to write the last snapshot, if holding a newer state could replace that snapshot's state."""
        if self._awaits_writer:
            self._copier.finish()
            self._client.await_begun()
            self._awaits_writer = False

    def _prepare(self) -> None:
        # After the first step the optimizer has its state: state that cannot be stored is refused now, and the writer
        # prepares its memory while training continues (first touch takes longer than the copy).
        captured = self._state.capture()
        self._capture_check.start(captured)
        self._capture_check.finish(self._state.capture)
        if self._memory_tier is None:
            self._client.reserve(self._planner.shard_of(captured).nbytes)
        else:
            self._memory_tier.reserve(captured)
        self._note_size(captured)
        self._is_prepared = True

    def _hand_over(self, position: Position, trigger: str, *, waits: bool) -> Captured:
        self._copier.finish()
        self._owes_snapshot = False
        captured = self._state.capture()
        shard = self._planner.shard_of(captured)
        # If there are more ranks than tensors, a rank without bytes gets no buffer.
        target = self._client.buffer(shard.nbytes) if shard.nbytes else memoryview(b"")
        self._copier.start(shard, target, captured.stepped, waits=waits)
        send = partial(
            self._send,
            name=self._metadata.name(position.step),
            step=position.step,
            tensors=shard.entries,
            nbytes=shard.nbytes,
            record=self._metadata.record(position, captured, trigger),
        )
        self._replica_check.start(position, captured, partial(self._copier.then, send))
        self._note_size(captured)
        return captured

    def _send(self, overtaken: str | None, **shard: Any) -> None:
        self._owes_snapshot = overtaken is not None
        refusal = None if overtaken is None else _OVERTAKEN.format(overtaken)
        self._client.stage(**shard, refusal=refusal)

    def _note_size(self, captured: Captured) -> None:
        self._reports.nbytes = sum(tensor.nbytes for tensor in captured.tensors.values())

    def _take_over(self, content: SnapshotContent, loader: NodeLoader) -> Position:
        worker, manifest, record = self._worker, content.manifest, StateRecord.from_json(content.state)
        loop = dict(record.loop or {})
        self._frozen, self._resting = loop.pop(FROZEN, None), loop.pop(RESTING, None)
        self._wrapped = loop.pop(WRAPPED, [])
        self.loop = loop or None
        if self._awaits_data or record.position.stage:
            self._unchecked = record, manifest
        else:
            self._require_same_data(record, manifest)
        restore.complete_evaluation(record.tree, manifest)
        devices.require_type_of_snapshot(worker.device, worker.wanted_device, manifest.versions)
        environment.log_changes(worker, manifest.versions, is_exact=self._step.is_exact)
        # Logged first: from here on the snapshot may cause a failure.
        if worker.rank == 0:
            worker.event(events.SNAPSHOT_CHOSEN, name=manifest.name)
        self._changes = changes = restore.option_changes(worker, self._state, record, manifest.world_size)
        restore.apply(worker, self._state, content, loader, changes)
        if changes and worker.rank == 0:
            worker.event(events.OPTIONS_CHANGED, options=[vars(change) for change in changes])
        if record.job_digest != worker.job_digest and worker.rank == 0:
            facts = {"snapshot": manifest.name, "was": record.job_digest, "now": worker.job_digest}
            worker.event(events.JOB_CHANGED, **facts)
        worker.generators.are_used |= record.draws_random
        worker.scalar_names[:] = record.scalars
        if record.stop is not None and worker.rank == 0:
            worker.vote.stop_wanted = record.stop
        self.end_wanted = record.end_wanted
        self._metadata.parent = self._staged = manifest.name
        return record.position

    def _require_same_data(self, record: StateRecord, manifest: Manifest) -> None:
        require_same_order(self._schedule.order_record, record.order)
        samples = self._schedule.samples, record.samples
        require_same(self._fingerprints(), manifest.fingerprints, *samples)

    def _tell_of_stateful_data(self) -> None:
        # Snapshots hold the position in place of a dataset's own state, which may be more than a position.
        if self._worker.rank == 0 and self._state.misses(content := self._dataset.content):
            kind = f"{type(content).__module__}.{type(content).__qualname__}"
            self._worker.event(events.STATE_LEFT_OUT, name="dataset", type=kind)

    def _fingerprints(self) -> dict[str, str]:
        evaluation = self._state.evaluation
        fingerprints = {
            TRAINING_DATA: self._dataset.fingerprint,
            EVALUATION_DATA: None if evaluation is None else evaluation.ranking.fingerprint,
        }
        known = {name: fingerprint for name, fingerprint in fingerprints.items() if fingerprint is not None}
        return {**known, **marks_of(self._dataset.values)}

    def _asks_for_snapshot(self) -> bool:
        """True if this rank asks all ranks for a snapshot: by rank 0's clock, or in place of a snapshot that was overtaken."""
        is_due = self._worker.rank == 0 and self._due.is_due_by_time(time.monotonic() - self._last_time)
        return is_due or self._owes_snapshot

    def _trigger(self, position: Position, *, final: bool) -> str:
        if final:
            stopped, evaluation = self._worker.stopped, self._state.evaluation
            owes = evaluation is not None and evaluation.is_owed
            is_end = self._schedule.is_end(position) and not owes
            return "end" if is_end or (stopped is not None and stopped.is_end) else "drain"
        trigger = self._due.trigger(self._last, position)
        is_best = trigger == "time" and not self._worker.vote.snapshot and self._is_new_best(position)
        return "best" if is_best else trigger

    def _await_last(self) -> None:
        self._replica_check.finish()
        self._copier.finish()
        self._capture_check.finish(self._state.capture)
        reports = self._client.flush(_FLUSH_LIMIT_S)
        self._reports.log(reports)
        outcomes = [r for r in reports if isinstance(r, SnapshotReport) and r.name == self._staged]
        for outcome in outcomes:
            if outcome.event == events.SNAPSHOT_FAILED:
                raise SnapshotError(_LAST_FAILED.format(outcome.reason))
        worker = self._worker
        if worker.rank == 0 and worker.stopped is not None and worker.stopped.is_end:
            # Beside the snapshots, where launches on other machines find it.
            self._catalog.write_stop({"step": worker.progress.number, **worker.stopped._asdict()})

    def _beat_or_leave(self) -> None:
        """Report that this rank lives, while a snapshot is read for it; raise Leaving if it was asked to exit."""
        self._worker.heartbeat.beat()
        if self._worker.leaves_untrained:
            raise Leaving

    def _recall_stop(self, step: int) -> None:
        """Have a run that stopped after *step* stop again before the next step; rank 0 requests it."""
        stop = self._catalog.read_stop() if self._worker.rank == 0 else None
        # If the step differs, the last snapshot is damaged and the run resumes from an earlier one. A stop by the job file
        # (`by_rank` None) is not repeated, since the file may have changed: the evaluation decides again.
        if stop is not None and stop["step"] == step and stop["by_rank"] is not None:
            self._worker.vote.stop_wanted = stop["reason"]
