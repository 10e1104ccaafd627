"""The order of work in a training loop: as it begins, after each step, as a pass or an epoch ends, and at the end."""

from __future__ import annotations

import atexit
import math
import os
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from elasticflow import events
from elasticflow.errors import SnapshotError, StateError
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.loop import drift, kept
from elasticflow.runtime.loop.ballot import Ballot, is_fixed, require_loss
from elasticflow.runtime.loop.gradients import LoopStep, not_exchanged
from elasticflow.runtime.loop.lockstep import Call, Lockstep
from elasticflow.runtime.loop.loop_schedule import (
    LoopSchedule,
    after_own_epoch,
    after_own_step,
    next_stage,
    stage_of,
    within,
)
from elasticflow.runtime.loop.own_data import OwnData
from elasticflow.runtime.loop.passes import MISSING, Batches, Pass
from elasticflow.runtime.loop.script_checks import OWN_LOOP_OVER
from elasticflow.runtime.loop.script_loops import OwnLoop, is_in_loop, own_loop_at
from elasticflow.runtime.loop.source import Source
from elasticflow.runtime.loop.stages import Stages
from elasticflow.runtime.process.sharded_tensors import box_of, require_no_hooks, sharded_modules
from elasticflow.runtime.process.stopping import Leaving, Stopped
from elasticflow.runtime.snapshot.restore import candidates
from elasticflow.runtime.snapshot.snapshots import Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import several_optimizers
from elasticflow.runtime.training.evaluation import run_sets
from elasticflow.runtime.training.shard_model import require_made_after
from elasticflow.runtime.worker import end_by, leave, leave_unfinished
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CodeType, FrameType

    from torch import nn

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.runtime.data.order.order import Order
    from elasticflow.runtime.loop.batch import Batch
    from elasticflow.runtime.loop.gradients import Gradients
    from elasticflow.runtime.loop.hooks import Hooks
    from elasticflow.runtime.loop.script_checks import ScriptChecks
    from elasticflow.runtime.measuring.speed import Measures
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.process.step_log import AnyOptimizers, LateNumber
    from elasticflow.runtime.training.evaluation import Evaluation


# A rank that ends without `finish` waits so long for the other ranks, so that an error can name their calls.
_GOODBYE_S = 10.0


@contextmanager
def _ends_here_if_asked(worker: Worker) -> Iterator[None]:
    """End this process if it is asked to exit before it has trained."""
    try:
        yield
    except Leaving:
        leave_unfinished(worker)


class TrainingLoop:
    """Does the work of the calls of `Run`, in the same order on all ranks. Every rank has one; other arguments are as for `join_job`.

    Args:
        gradients: Options given to `join`. None: the script exchanges gradients itself.
        script: Checks of the script. None: the loop is that of a train.py that the compiler wrote.

    Attributes:
        ballot: Tells the other ranks of this rank's steps, and of a request to end.
    """

    def __init__(
        self,
        worker: Worker,
        policy: SnapshotSettings,
        *,
        gradients: Gradients | None,
        log_every: int,
        compare_replicas: str | None = None,
        measures: Measures | None = None,
        script: ScriptChecks | None = None,
    ) -> None:
        self._policy, self.gradients, self._script = policy, gradients, script
        worker.tell = self._tell
        self._compare_every, self._log_every, self._measures = compare_replicas, log_every, measures
        self.ballot, self._pass, self.stages = Ballot(worker), Pass(), Stages()
        self._own_data = OwnData(worker, self._tell if script is None else script.warn)
        self.worker, self.schedule = worker, LoopSchedule()
        self.position: Position = self.schedule.start
        self._optimizers: AnyOptimizers = ()
        self.hooks: Hooks | None = None
        self._kept: tuple[Snapshots, State] | None = None
        self._source: Source | None = None
        self._known_source: Source | None = None  # `batches` was called before `keep`
        self._step: LoopStep | None = None
        self._lockstep: Lockstep | None = None
        self._wrapped: set[int] = set()  # `id` of the parameters that were trained when `Run.wrap` was called
        self.exit_status: Any = None
        self._is_training = self._is_over = self._counts_on_snapshot = False
        # The code after `step` in this pass belongs to the step: a snapshot that is due is taken before the next pass.
        self._owes_snapshot = self._is_in_steps = self._are_steps_over = False
        self._steps_before = 0  # as earlier loops of `steps` counted them
        self._began_after = 0  # the step after which this launch began to train
        # Before the first step of a resumed run: the loop that the script has come to.
        self._own_loop: OwnLoop | None = None
        # Step and loop of the newest pass that a loop's head has begun.
        self._begun: tuple[int, CodeType, int] | None = None
        # Tells whether the first pass of a resumed run had its generators seeded.
        self._is_seeded: Callable[[], bool] = lambda: False
        self._handled = sys.exception()  # the whole run may be in an `except` of the script's
        self._failed: Exception | None = None  # of a step that was begun to be finished
        self._quiet_steps = 0  # how many of the next steps only write their log line: see `_step_quietly`

    @property
    def is_finished(self) -> bool:
        """True if training has ended, not just this launch; see `Run.is_finished`."""
        stopped = self.worker.stopped
        if stopped is not None or self.worker.should_leave:
            return self.schedule.is_end(self.position) or (stopped is not None and stopped.is_end)
        return self.schedule.is_end(self.position) or self._pass.is_left or self._are_steps_over

    def is_past_own_loop(self, frame: FrameType) -> bool:
        """Return True if *frame* is past a loop without `Run.batches`, `Run.epochs` and `Run.steps`, and no rank was asked to exit."""
        has_begun = self._is_training or self._begun is not None
        is_own = self.schedule.steps is None and self.stages.epochs is None and not self._is_in_steps
        stays = self.worker.stopped is None and not self.worker.should_leave
        return has_begun and is_own and stays and not is_in_loop(frame)

    def keep(self, objects: Mapping[str, Any], caller: FrameType) -> None:
        """Include *objects* in snapshots, and load the newest one; see `Run.keep`. Collective: every rank.

        Args:
            caller: Frame whose variables are searched for state that is not kept.
        """
        if self._kept is not None:
            raise StateError("run.keep was called a second time", "name everything in one call")
        worker = self.worker
        parts = kept.parts_by_name(objects) if self._script is None else kept.parts_of(objects)
        if worker.layout.is_cut and not sharded_modules(parts["model"]):
            raise StateError(
                f"join(shard={worker.layout.degree}) was called, and the model is not sharded",
                "run.wrap(model) before the optimizer is made, and before run.keep",
            )
        given = several_optimizers.optimizers(parts.get("optimizers") or parts.get("optimizer"))
        require_made_after(parts["model"], given.values())
        for name, parameter in parts["model"].named_parameters():
            # Before the first step: rows are all that a snapshot can hold.
            if box_of(parameter, f"model.{name}") is not None:
                require_no_hooks(parameter, f"model.{name}")
        self._step = LoopStep(
            worker, self.gradients, parts, None if self._source is None else self._source.virtual_shards
        )
        state = State(**parts)
        self._lockstep = Lockstep.of(worker, state.model)
        self._optimizers = state.optimizers
        if self._script is None:  # the log of a train.py has no optimizer's name where there is only one
            self._optimizers = parts["optimizers"] if "optimizers" in parts else parts["optimizer"]
        note_rates, optimizers = worker.progress.note_rates, self._optimizers
        for optimizer in state.optimizers.values():
            # A schedule sets the rates of the next step before `step` is called.
            optimizer.register_step_post_hook(lambda *_: note_rates(optimizers))
        data = None if self._source is None else self._source.opened
        snapshots = Snapshots(
            worker, state, self._step, self.schedule, data, self._policy, self._compare_every,
            not_exchanged=self._not_exchanged,
        )  # fmt: skip
        snapshots.note_wrapped(self._wrapped)
        self._kept = snapshots, state
        self._known_source = self._source
        with _ends_here_if_asked(worker):
            self.position = snapshots.restore()
        if self._counts_on_snapshot and snapshots.restored is None:
            raise SnapshotError(
                "the model was built without initial values, since the store listed a snapshot, and none of those listed can be read",
                "start again: damaged snapshots were set aside, so that the run begins with initial values",
            )
        if self._script is not None:
            self._own_data.note_seeds()
            self._pass.watch(state, computes_gradients=self.gradients is None)
            repeats_epochs = partial(self._begins_epoch_again, state)
            self._script.begin(state, snapshots, self.schedule, objects, caller, repeats_epochs)
            self.ballot.recall_end(snapshots.end_wanted)
            if snapshots.restored is not None:
                stands = "had finished" if self.is_finished else "continues"
                self._tell(
                    f"{stands} after step {self.position.step}, from snapshot {snapshots.restored.name}"
                )
        worker.phase("build")

    @contextmanager
    def wrapping(self, model: nn.Module) -> Iterator[None]:
        """Note the parameters of *model* that are trained, while it is wrapped as in the start before."""
        with nullcontext() if self._kept is None else self._kept[0].as_wrapped():
            self._wrapped |= {id(each) for each in model.parameters() if each.requires_grad}
            yield

    def finds_snapshot(self) -> bool:
        """Return whether the store lists a snapshot, which `keep` will load; see `Run.finds_snapshot`. Collective: every rank."""
        catalog = Catalog.of_run(self._policy, self.worker.run_folder, self.worker.run_id)
        self._counts_on_snapshot = bool(candidates(self.worker, catalog))
        return self._counts_on_snapshot

    def require_keep(self, caller: str) -> tuple[Snapshots, State]:
        """Return the snapshots and the state that they hold; raise StateError if `Run.keep` was not called before `Run.` *caller*."""
        if self._kept is None:
            raise StateError(
                f"run.{caller} was called before run.keep",
                "run.keep(model=model, optimizer=optimizer) says what a run continues with",
            )
        return self._kept

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the number of each remaining epoch; see `Run.epochs`."""
        snapshots, _ = self.require_keep("epochs")
        stage = self.stages.begin_epochs(number)
        if stage == stage_of(self.position):
            snapshots.put_back(is_last=self.position.is_epoch_end)
        elif stage > stage_of(self.position) and self.worker.should_leave:
            self.schedule.has_more = True
        try:
            while not self.worker.should_leave:
                done = within(self.position).epoch if stage == stage_of(self.position) else 0
                if stage < stage_of(self.position) or done >= number:
                    break
                self.stages.begin_epoch(self.position)
                self._seed_first_pass(snapshots)
                if done and not self._reads_own_data(snapshots):
                    self._own_data.seed_epoch(stage, done)
                yield done
                self._end_epoch(snapshots)
        except GeneratorExit:
            self._pass.is_left = True
            raise
        finally:
            self.stages.end_epochs()
        if stage == stage_of(self.position) and self.schedule.steps is None:
            self.schedule.epochs = number
        self._seed_after(stage)

    def require_steps_left(self, number: int) -> None:
        """Raise StateError if earlier loops have made all of the first *number* steps, in this launch."""
        # A loop that was left by break is continued by another one over the same number.
        done = self.position.step if self._is_training else self._steps_before
        if number <= done:
            raise StateError(
                f"run.steps({number}) counts the steps of the whole run, and earlier loops have made {done}: no step is left",
                f"run.steps({done + number}) makes {number} more",
            )
        self._steps_before = number

    def steps(self, number: int) -> Iterator[int]:
        """Yield the number of each remaining step; see `Run.steps`."""
        snapshots, state = self.require_keep("steps")
        if not self._is_training:
            reads_on = kept.has_loader(state)
            snapshots.put_back(is_last=self.position.step < number, reads_on=reads_on)
        self._seed_first_pass(snapshots)
        self._is_in_steps, self._are_steps_over = True, False
        try:
            while not self.worker.should_leave and self.position.step < number:
                before = self.position.step
                yield before
                self._require_no_failure()
                if self.schedule.steps is not None:
                    raise StateError(
                        "run.batches was called inside of run.steps, which is for data that the script reads itself",
                        f"for batch in run.batches(dataset, size=256, steps={number})",
                    )
                if self.position.step == before:
                    raise StateError(f"run.step was not called in step {before + 1}", MISSING)
                self._take_owed()
                self._own_data.begin_pass(self.position.step)
            self._are_steps_over = not self.worker.should_leave
        finally:
            self._is_in_steps = False

    def note_reader(self, frame: FrameType) -> None:
        """Note that *frame* reads where the run stands: a pass begins at the head of a loop, and a resumed run continues there, as in `steps`."""
        if self._script is None or self._kept is None or self.schedule.steps is not None:
            return
        loop = own_loop_at(frame)
        if loop is None:
            return
        snapshots, _ = self._kept
        if not self._is_training and loop != self._own_loop:
            self._own_loop, self._is_seeded = loop, loop.is_running
            snapshots.begin_pass(loop.is_running)
        # Later passes before the next step have other draws.
        begun = self.position.step, frame.f_code, loop.first
        if begun == self._begun:
            return
        self._begun = begun
        if self._is_training:
            self._own_data.begin_pass(self.position.step)
        else:
            self._seed_first_pass(snapshots, loop.is_running)

    def _seed_first_pass(self, snapshots: Snapshots, is_here: Callable[[], bool] = lambda: True) -> None:
        """Seed the generators before a loop's first pass if the script reads its own data: a restart repeats the draws."""
        if self.position.step > 0 and self._reads_own_data(snapshots):
            self._own_data.seed(self.position.step)
            self._is_seeded = is_here

    def _reads_own_data(self, snapshots: Snapshots) -> bool:
        of_batches = any(map(drift.is_of_batches, snapshots.loop or {}))
        return self.schedule.steps is None and self.gradients is None and not of_batches

    def batches(
        self,
        dataset: Any,
        given: Mapping[str, Any],
        options: dict[str, Any],
        *,
        micro_batch_size: int | None,
        order: Order | None,
        caller: FrameType,
    ) -> Batches:
        """Return this rank's part of each global batch that is left; see `Run.batches`. Collective: every rank.

        Args:
            given: Arguments that the trajectory depends on: size, epochs, steps, tail and shards.
            caller: Frame of the script, at the line of the call.
        """
        of_loader = {"num_workers": options["num_workers"], "micro_batch_size": micro_batch_size}
        self.stages.require_arguments(dataset, {**given, **of_loader})
        in_epochs = self.stages.epochs
        if in_epochs is not None:
            # The code before an epoch's batches may have drawn: the model's draws do not depend on that.
            self.worker.generators.after_data()
        arguments = given if in_epochs is None else {**given, "epochs": in_epochs.number}
        if self._is_training and self.worker.should_leave:
            self.schedule.has_more = True
            return Batches(lambda: iter(()))
        settings = drift.of_batches(**arguments)
        self._meet(Call.BATCHES)
        with _ends_here_if_asked(self.worker):
            source = self.stages.source_again(dataset, arguments)
            if source is None:
                drift.require_same_on_ranks(self.worker, {"job.seed": self.worker.seed, **settings})
                source = Source(
                    self.worker, dataset, self.gradients, options,
                    micro_batch_size=micro_batch_size, order=order, stage=self.stages.stage_of_call(), **arguments,
                )  # fmt: skip
                self.stages.require_new(source, caller)
            self._source = source
            if self._kept is None:
                self.schedule.steps = source.schedule
            elif not self._enter(source, settings):
                self._seed_after(source.stage)
                return Batches(lambda: iter(()))
        return Batches(partial(self._loop, source, settings))

    def _enter(self, source: Source, settings: Mapping[str, Any]) -> bool:
        """Move to the stage of *source*; return False if the run is past that stage. Collective: every rank."""
        snapshots, _ = self.require_keep("batches")
        now = stage_of(self.position)
        if source.stage < now:
            snapshots.require_past_data(source.stage, source.opened)
            return False
        if source.stage == now and self._is_training and self.schedule.steps is None:
            raise StateError(
                f"run.batches was called after {self.position.step} steps over data that the script reads itself, and would begin after "
                "as many samples",
                "for epoch in run.epochs(1): around the loop over that data makes it a stage of its own",
            )
        if source.stage > now:
            self._begin_stage(source.stage, snapshots)
            self.position = self.position._replace(cursors=source.schedule.start.cursors)
        elif snapshots.restored is None and not self._is_training:
            self.position = source.schedule.start
        is_known = self.schedule.steps is source.schedule
        self.schedule.steps, self.schedule.epochs = source.schedule, None
        if source is not self._known_source and not (is_known and self._is_training):
            snapshots.use_data(source.opened)
        if self._script is not None:
            is_resumed = source.stage == now and not self._is_training
            self._script.compare_batches(snapshots, settings, is_resumed=is_resumed)
            if is_resumed and (self.stages.epochs is None or not self.position.is_epoch_end):
                snapshots.put_back()
        if not self._is_training:
            self._begin()
        elif source.stage > now and self.worker.rank == 0:
            left = self.schedule.remaining(self.position)
            steps = None if left is None else self.position.step + left
            samples = self.schedule.samples
            self.worker.event(events.STAGE_STARTED, stage=source.stage, steps=steps, samples=samples)
        return True

    def _begin_stage(self, stage: int, snapshots: Snapshots) -> None:
        if not (self.schedule.is_end(self.position) or self._pass.is_left):
            raise StateError(
                f"run.batches was called again in the middle of a loop over batches, after step {self.position.step}",
                "end that loop first: each run.batches is a stage of its own, and they come one after the other",
            )
        snapshots.begin_stage(stage_of(self.position))
        self.position = next_stage(self.position, stage)
        self._pass.is_left = self.schedule.has_ended = False

    def _enter_own_data(self, snapshots: Snapshots, state: State) -> None:
        """Begin the stage of data that the script reads itself, at its first step. Collective: every rank."""
        epochs = self.stages.epochs
        if epochs is not None and epochs.stage > stage_of(self.position):
            self._begin_stage(epochs.stage, snapshots)
        if epochs is not None:
            self.schedule.steps, self.schedule.epochs = None, epochs.number
        if self.schedule.has_ended:
            self.schedule.has_ended = False
            self._tell(
                f"had finished after step {self.position.step}, and is trained on: the script's own loop continues"
            )
        if not self._is_training:
            snapshots.use_data(OpenedDataset(None))
            with _ends_here_if_asked(self.worker):
                self._begin()
            if self.position.step > 0 and not self._is_seeded():
                self._own_data.note_resumed()
            # It holds a frame of the script's.
            self._own_loop, self._is_seeded = None, lambda: False
            objects = kept.own_objects(state)
            if self.worker.rank == 0:
                self.worker.event(events.DATA_OWN, kept=[*objects])
            self._own_data.warn_of_read_ahead(objects)
            if epochs is None and not kept.has_loader(state):
                self._tell(
                    "the script reads its own data: a restart makes its loader anew, without what was drawn ahead; "
                    "run.keep(loader=loader) if it has a state, or run.batches, which brings each sample once"
                )

    def _begin(self) -> None:
        worker, snapshots, state = self.worker, *self.require_keep("step")
        worker.start_training(
            self.position, self.schedule, state.model, restored=snapshots.restored,
            log_every=self._log_every, measures=self._measures,
            keeps_modes=self._script is not None,  # a script may have frozen a BatchNorm by its mode
        )  # fmt: skip
        if self.hooks is not None:
            self.hooks.start(self.position)
        if state.evaluation is not None:  # one may have been cut short when all ranks were asked to exit
            state.evaluation.run_if_owed(self.position)
        self._is_training, self._began_after = True, self.position.step

    def _loop(self, source: Source, settings: Mapping[str, Any]) -> Iterator[Batch]:
        self.require_keep("batches")
        if not self._is_training:
            with _ends_here_if_asked(self.worker):
                if not self._enter(source, settings):
                    return
        try:
            for part, batch in self.stages.reading(source, self.position):
                self._pass.open(batch)
                if part.model_keys and self._script is not None:
                    self.worker.generators.seed_model(part.model_keys[0])
                if self.gradients is None:  # the script's own exchange is not seen
                    self.worker.vote.part = batch.samples / batch.total
                    self.worker.vote.end_own_part()
                if self._script is not None:
                    self._script.check_count(sys._getframe(1), batch)  # noqa: SLF001
                yield batch
                if self._is_over_after(part.end):
                    break
        except GeneratorExit:
            self._pass.is_left = True
            if self._lockstep is not None:
                self._lockstep.note_left()
            raise
        self._meet(Call.LEAVE)
        self._seed_after(source.stage)

    def _seed_after(self, stage: int) -> None:
        if self._script is not None and self.stages.epochs is None:
            self._own_data.seed_after(stage)

    def _is_over_after(self, end: Position) -> bool:
        """Return True if the loop over batches ends with the pass that ended at *end*; in the middle of an epoch, end the process."""
        self._require_no_failure()
        if self._pass.batch is not None:
            raise StateError(f"run.step was not called in step {end.step}", MISSING)
        self._take_owed()
        is_in_epochs = self.stages.epochs is not None
        if self.worker.should_leave and is_in_epochs and not end.is_epoch_end and not self.is_finished:
            self._end()
        return self.worker.should_leave or (is_in_epochs and end.is_epoch_end)

    def make_gradients(self, fn: Callable[[Batch], Any], batch: Batch) -> float:
        """Make the gradients of *batch*; return its mean loss. See `Run.gradients`. Collective: every rank."""
        if self._step is None or self._source is None or batch.shards is None:
            raise StateError(
                "run.gradients needs virtual shards, by whose sums the bits are the same at any number of workers",
                "elasticflow.join(virtual_shards=16): at least as many as there will ever be workers; "
                "without them elasticflow.join(gradients=elasticflow.Gradients())",
            )
        self._meet(Call.GRADIENTS)
        self._pass.note_gradients()
        adding = self._pass.adding_gradients() if self._step.adds_up else nullcontext()
        with adding, nullcontext() if self._lockstep is None else self._lockstep.off():
            loss = self._step.forward_backward(fn, batch.shards, self._source.virtual_shards)
        if self.worker.stopped is not None:  # raised in *fn*: this step changes nothing
            self._end()
        return loss

    def step(self, loss: Any, samples: int | None) -> None:
        """Finish a step; see `Run.step`. Collective: every rank."""
        self._meet(Call.STEP)
        before = self._pass.batch, self.position
        try:
            if not (self._quiet_steps and self._step_quietly(loss, samples)):
                self._quiet_steps = 0
                self._step_fully(loss, samples)
        except Exception as error:
            # A call that was refused before it changed anything may be made again.
            if before != (self._pass.batch, self.position):
                self._failed = error
            raise

    def _step_fully(self, loss: Any, samples: int | None) -> None:
        worker, snapshots, state = self.worker, *self.require_keep("step")
        if self.schedule.steps is None and self._is_training and worker.should_leave:
            self._end()  # the script made a pass after the exit was agreed: it does not count
        require_loss(loss, samples)
        batch = self._pass.close()
        self._require_one_call(batch, samples)
        # A restart does not repeat the code after this call.
        worker.vote.may_cut_short &= not self._defers_snapshot(is_own=batch is None)
        state.reshard()
        self._pass.require_kept()
        if batch is None:
            self._enter_own_data(snapshots, state)
        is_pending = self._pass.is_pending()
        if (
            self.gradients is not None and batch is not None
        ):  # the ranks' reports travelled with the gradients
            self._finish_step(batch.end, math.nan if loss is None else float(loss))
        else:
            self._tell_step(loss, batch, int(samples or 0), is_pending=is_pending)
        self._pass.settle(is_pending=is_pending)
        self._agree_on_end(batch)
        if self.hooks is not None:
            self.hooks.after_step(self.position)
        if state.evaluation is not None:
            state.evaluation.after_step(self.position)
        if batch is None and self.gradients is None:
            self._own_data.end_pass(loss, self.position.step)
        if is_pending:
            self.ballot.hold_back()
        else:
            self._snapshot_and_leave(snapshots, state)
            if batch is not None:
                self._quiet_steps = self._quiet_steps_ahead(snapshots, state)

    def _require_one_call(self, batch: Batch | None, samples: int | None) -> None:
        if batch is not None:
            return
        if self.schedule.steps is not None and (self.stages.epochs is None or samples is None):
            raise StateError("run.step was called twice in one pass through the loop", MISSING)
        if samples is None:
            raise StateError(
                "run.step does not know how many samples this step had",
                "run.step(loss=loss, samples=len(inputs)) where the script reads its data itself",
            )

    def _step_quietly(self, loss: Any, samples: int | None) -> bool:
        """Finish a step if nothing but its log line is due after it; return False if more is due.

        Code between two steps runs on cold caches, and costs several times what a tight loop would suggest. So a step at which
        the ranks need not meet does not repeat the checks of the step before.
        """
        this = self._pass
        batch = this.batch
        if batch is None or batch.end.is_epoch_end or not this.has_moved:
            return False
        self._quiet_steps -= 1
        require_loss(loss, samples)
        this.close()
        self.worker.vote.may_cut_short = self._script is None
        this.require_kept()
        mean, scalars = self.ballot.add(loss, batch.samples)
        self.worker.progress.note_step(0, scalars)
        self._finish_step(batch.end, mean)
        this.settle(is_pending=False)
        fault_injection.reach("training.step")
        return True

    def _quiet_steps_ahead(self, snapshots: Snapshots, state: State) -> int:
        """Return the number of next steps that are quiet if an optimizer moves in each and none ends an epoch.

        In all other steps `step` checks everything. The ranks meet at the same steps either way, so that a step may be quiet
        on some ranks only.
        """
        is_busy = self.gradients is not None or self.hooks is not None or state.evaluation is not None
        if is_busy or self._owes_snapshot or self.worker.should_leave:
            return 0
        left = self.schedule.remaining(self.position)
        most = min(self.ballot.room_after(self.position), 0 if left is None else left - 1)
        return snapshots.idle_steps(self.position, most, self.schedule.global_batch_size)

    def _tell_step(self, loss: Any, batch: Batch | None, samples: int, *, is_pending: bool) -> None:
        """Report a step whose gradients carried no report; the other ranks learn of it if a meeting is due."""
        worker, snapshots, _ = self.worker, *self.require_keep("step")
        mean, scalars = self.ballot.add(loss, samples if batch is None else batch.samples)
        worker.progress.note_step(0, scalars)
        if batch is None:
            self._finish_step(after_own_step(self.position, self.ballot.meet(is_pending=is_pending)), mean)
            return
        is_end, is_needed = self.schedule.is_end(batch.end), snapshots.is_due(batch.end)
        self.ballot.meet_if_due(batch.end, is_end=is_end, is_needed=is_needed, is_pending=is_pending)
        self._finish_step(batch.end, mean)

    def _finish_step(self, position: Position, loss: float | LateNumber) -> None:
        self.position = position
        self.worker.log_step(position, loss, self._optimizers)

    def _agree_on_end(self, batch: Batch | None) -> None:
        """Learn whether some rank called `stop`, at the steps after which all ranks meet. Collective at these steps."""
        is_at_once = batch is None or self.gradients is not None
        is_now = is_at_once or is_fixed(self.position, is_end=self.schedule.is_end(self.position))
        self.ballot.is_end_due |= self.worker.vote.end and is_now
        if self.ballot.is_end_due:
            self.ballot.agree_on_end(self.position.step)

    def _snapshot_and_leave(self, snapshots: Snapshots, state: State) -> None:
        worker, epochs = self.worker, self.stages.epochs
        is_own = self.schedule.steps is None
        is_epoch_end = epochs is not None and not is_own and self.position.is_epoch_end
        waits = is_epoch_end or self._begins_epoch_again(state)
        is_deferred = not waits and self._defers_snapshot(is_own=is_own)
        is_wanted = snapshots.after_step(self.position, takes=not (waits or is_deferred))
        if is_epoch_end:
            # The code after the epoch's batches runs first, evaluations included.
            worker.vote.may_cut_short, self.stages.is_after_batches = False, True
            return
        self._owes_snapshot = is_deferred and (is_wanted or worker.should_leave)
        if not worker.should_leave:
            return
        if worker.stopped is not None and worker.stopped.is_end:
            worker.vote.leave_wanted = False  # code after the loop is not cut short
        if not waits and not is_deferred:
            snapshots.finish(self.position)
        if is_own and epochs is not None and not self.is_finished:
            self._end(takes_snapshot=False)

    def _begins_epoch_again(self, state: State) -> bool:
        """Return True if a restart begins the epoch again: the script reads its data itself, by a loader without a state."""
        is_own = self.schedule.steps is None and self.stages.epochs is not None
        return is_own and not kept.has_loader(state)

    def _may_be_ahead(self, state: State) -> bool:
        """Return True if kept objects other than models, as a loader or a counter, may be ahead of the last step."""
        is_own = self.schedule.steps is None
        may_be_in_pass = is_own or self._pass.batch is not None
        return (is_own and self.stages.epochs is not None) or (may_be_in_pass and kept.holds_more(state))

    def _defers_snapshot(self, *, is_own: bool) -> bool:
        """Return True if a snapshot is taken as the pass ends, with the effects of the code after `step`."""
        return self._script is not None and (not is_own or self._is_in_steps)

    def _take_owed(self) -> None:
        """Take the snapshot that was due after the last step, now that the pass is over. Collective: every rank.

        If the pass has called `stop`, the snapshot records that.
        """
        self._pass.require_still(self.position.step)
        self.worker.vote.may_cut_short = not self.stages.is_after_batches
        if self.ballot.is_end_due:
            self.ballot.agree_on_end(self.position.step)
        if not self._owes_snapshot:
            return
        self._meet(Call.PASS)
        snapshots, _ = self.require_keep("step")
        self._owes_snapshot = False
        snapshots.note_end_wanted(self.ballot.end_wanted())
        if self.worker.should_leave:
            snapshots.finish(self.position)
        else:
            snapshots.take_if_due(self.position)

    def _end_epoch(self, snapshots: Snapshots) -> None:
        """Do the work that is due once the code after an epoch's batches has run. Collective: every rank."""
        self._meet(Call.EPOCH)
        worker, stages = self.worker, self.stages
        worker.vote.may_cut_short, stages.is_after_batches = True, False
        if self.schedule.steps is None and stages.has_stepped(self.position):
            self.position = after_own_epoch(self.position)
            if not kept.has_loader(self.require_keep("epochs")[1]):
                self._own_data.warn_of_workers()
        if not worker.should_leave:
            stages.require_whole_epoch(self.position)
        self.ballot.agree_on_end(self.position.step)
        if worker.should_leave and not self.position.is_epoch_end:
            return
        is_pending = self._pass.holds_gradients
        if not is_pending:
            snapshots.take_if_due(self.position)
        self._pass.settle(is_pending=is_pending)
        if worker.should_leave and not self.is_finished:
            self._end()

    def evaluate(self, name: str, make: Callable[[State], Evaluation]) -> dict[str, float]:
        """Return the metrics of the evaluation that *make* returns; see `Run.evaluate`. Collective: every rank."""
        worker, _, state = self.worker, *self.require_keep("evaluate")
        self._quiet_steps = 0
        self._meet(Call.EVALUATE)
        self.ballot.meet()
        evaluation = make(state)
        may_cut_short = worker.vote.may_cut_short
        # If the evaluation is cut short, a snapshot is taken.
        worker.vote.may_cut_short &= self._pass.is_between_steps and not self._may_be_ahead(state)
        measured = run_sets(worker, {name: evaluation}, self.position, ranked=None, stop_when=None)
        worker.vote.may_cut_short = may_cut_short
        self.ballot.is_end_due = True
        if measured is None:
            if not self.stages.is_after_batches:
                self._pass.require_closed(self.position.step)
            self._end(takes_snapshot=not self.stages.is_after_batches)
        return {key.removeprefix(f"{name}."): value for key, value in measured.items()}

    def finish(self) -> NoReturn:
        """Take the last snapshot and end this process; see `Run.finish`. Collective: every rank."""
        self.require_keep("finish")
        if self._script is not None:
            error = sys.exception()
            if error is not None and error is not self._handled and not isinstance(error, StopIteration):
                raise error  # as in `finally: run.finish()`, which would end the process without reporting it
            self._close_loop()
            self._warn_of_late_changes(self._script.warn)
            self._script.is_over = self.is_finished
        elif not self.worker.should_leave:
            self.schedule.has_ended = True
        self._end()

    def end_if_forgotten(self) -> None:
        """Finish a run whose script ended without `finish`, if its loop was over; otherwise report where the run stands."""
        if self._is_over or not self._is_training:
            return
        try:
            # Ranks that wait elsewhere notice that this process has ended.
            with suppress(RuntimeError):
                self._meet(Call.LEAVE, _GOODBYE_S)
            is_over = self._are_steps_over or self.schedule.is_end(self.position)
            if self._pass.is_closed and (self.worker.should_leave or is_over) and not self.exit_status:
                self._close_loop()  # other ranks may have called `finish`
                self._end()
        except Exception as error:  # noqa: BLE001  # Python would print it at this process's exit, and end by code 0
            end_by(error)
        self._tell(
            f"the script ended after step {self.position.step} without run.finish(): the same command resumes from the newest snapshot"
        )

    def _warn_of_late_changes(self, warn: Callable[[str], None]) -> None:
        """Warn if code behind the loop has changed the model after the last snapshot was taken, as where it loads the best weights."""
        snapshots, _ = self.require_keep("finish")
        if names := snapshots.changed_since(self.position):
            warn(
                f"the snapshot after step {self.position.step} was taken when the loop ended, and the script has changed {names[0]} since, "
                f"of {len(names)} tensors of the model: the snapshot does not have the change; torch.save(model.state_dict(), ...) keeps it"
            )

    def _close_loop(self) -> None:
        """Agree with all ranks on how the loop ended, before the run says whether it is finished. Collective."""
        worker = self.worker
        self._meet(Call.LEAVE)
        self._meet(Call.FINISH)
        self._pass.require_closed(self.position.step)
        self.ballot.meet()
        self.ballot.agree_on_end(self.position.step, is_over=True)
        if worker.should_leave or self.schedule.is_end(self.position):
            return
        if self._pass.is_left:
            left = self.schedule.remaining(self.position)
            of = "" if left is None else f" of {self.position.step + left}"
            worker.stopped = Stopped(f"the script left its loop after step {self.position.step}{of}", 0)
        elif self._source is not None:
            raise StateError(
                f"run.finish was called in the middle of the loop over run.batches, after step {self.position.step}",
                "run.stop(reason) in the loop ends training early; a for loop may also be left by break",
            )
        else:
            self.schedule.has_ended = True
            if self._is_training:
                snapshots, _ = self.require_keep("finish")
                worker.moments.leave.append(partial(snapshots.record_end, OWN_LOOP_OVER))

    def _require_no_failure(self) -> None:
        """Raise the error of a step again if the script has caught it, as by `except Exception: continue`."""
        if self._failed is not None:
            raise self._failed

    def _meet(self, call: Call, limit_s: float | None = None) -> None:
        self._require_no_failure()
        if self._lockstep is not None:
            self._lockstep.meet(call, limit_s)

    def _end(self, *, takes_snapshot: bool = True) -> NoReturn:
        self._is_over = True
        worker, snapshots, state = self.worker, *self.require_keep("finish")
        self.ballot.meet()
        if takes_snapshot:
            snapshots.finish(self.position)
        why = "" if worker.stopped is None or not worker.stopped.is_end else f" ({worker.stopped.reason})"
        place = self._policy.uri or os.path.relpath(worker.run_folder.path)
        done = f"after step {self.position.step}{why}, snapshots in {place}"
        text = f"finished {done}" if self.is_finished else f"leaves {done}: the same command resumes the run"
        is_as_before = not self._is_training or self.position.step == self._began_after
        if self.is_finished and self.position.step > 0 and is_as_before:
            text += "; nothing was left to train: join(folder=...), or a start without that folder, begins a new run"
        worker.moments.leave.append(lambda: self._tell(text))  # after the last snapshot's commit
        if self._script is not None:
            worker.moments.leave.append(atexit._run_exitfuncs)  # noqa: SLF001  # wandb and others end there
        leave(worker, self.position, self.schedule, state.evaluation)

    def _tell(self, text: str) -> None:
        if self._script is not None:
            self._script.tell(text)

    def _not_exchanged(self) -> str | None:
        """Return the gradients that ranks do not exchange, as a phrase; None: this run, or a wrapper of the script's, exchanges all."""
        if self.gradients is not None:
            return None
        _, state = self.require_keep("step")
        return not_exchanged(state, self._wrapped, is_first=self.position.step <= self._began_after + 1)
