"""The run that `elasticflow.join` returns: the script writes the training loop, and the run survives failures and preemption."""

from __future__ import annotations

import atexit
import math
import os
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from elasticflow import events
from elasticflow.errors import SnapshotError, StateError
from elasticflow.runtime import worker as life
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.evaluation import several
from elasticflow.runtime.loop import drift, kept
from elasticflow.runtime.loop.ballot import Ballot, is_fixed, require_loss
from elasticflow.runtime.loop.gradients import LoopStep
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
from elasticflow.runtime.loop.source import Source
from elasticflow.runtime.loop.stages import Stages
from elasticflow.runtime.process.sharded_tensors import (
    box_of,
    is_over_all_ranks,
    require_no_hooks,
    sharded_modules,
)
from elasticflow.runtime.process.stopping import Leaving, Stopped
from elasticflow.runtime.snapshot.restore import candidates
from elasticflow.runtime.snapshot.snapshots import Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import ddp, replicable, several_optimizers
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.training.shard_model import require_made_after, shard_model
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch
    from torch import nn

    from elasticflow.protocol.snapshot_settings import SnapshotSettings
    from elasticflow.runtime.data.order.order import Order
    from elasticflow.runtime.loop.batch import Batch
    from elasticflow.runtime.loop.gradients import Gradients
    from elasticflow.runtime.loop.hooks import Hooks
    from elasticflow.runtime.loop.kept import KeptValues
    from elasticflow.runtime.loop.script_checks import ScriptChecks
    from elasticflow.runtime.measuring.speed import Measures
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.learning_rates import AnyOptimizers
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.process.step_log import LateNumber


# A rank that ends without `finish` waits so long for the others, to name what they do.
_GOODBYE_S = 10.0


@contextmanager
def _ends_here_if_asked(worker: Worker) -> Iterator[None]:
    """End this process if it is asked to exit before it has trained: nothing is lost."""
    try:
        yield
    except Leaving:
        life.leave_untrained(worker)


class Run:
    """A run that this process takes part in, as `elasticflow.join` returned it.

    All ranks call the same methods in the same order. A method marked "Collective" returns once every rank has called it.

    Attributes:
        rank: Number of this process, from 0.
        local_rank: Number of this process on its machine, from 0.
        world_size: Number of processes.
        device: Device of the model and the batches: a GPU of this rank's own, or the CPU.
        position: Position after the last finished step: `step`, `epoch` and `samples` count the work of all launches.
        worker: This process as a member of its group; for the objects of a train.py that the compiler writes.
        schedule: Schedule that positions refer to; for the same objects.
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
        # None: the loop is that of a train.py that the compiler wrote.
        self._policy, self._gradients, self._script = policy, gradients, script
        self._compare_every, self._log_every, self._measures = compare_replicas, log_every, measures
        self.rank, self.local_rank, self.world_size = worker.rank, worker.local_rank, worker.world_size
        self.device: torch.device = worker.device
        self._ballot, self._pass, self._stages = Ballot(worker), Pass(), Stages()
        self._own_data = OwnData(worker, self._tell)
        self.worker, self.schedule = worker, LoopSchedule()
        self.position: Position = self.schedule.start
        self._optimizers: AnyOptimizers = ()
        self._hooks: Hooks | None = None
        self._state: State | None = None
        self._snapshots: Snapshots | None = None
        self._source: Source | None = None
        self._known_source: Source | None = None  # `batches` was called before `keep`
        self._step: LoopStep | None = None
        self._lockstep: Lockstep | None = None
        self._wrapped: set[int] = set()  # `id` of the parameters that were trained when `wrap` was called
        self._is_training = self._is_over = self._counts_on_snapshot = False
        # The code behind `step` in this pass belongs to the step: what is due is taken before the next pass.
        self._is_owing = self._is_in_steps = self._are_steps_over = False
        self._steps_before = 0  # as earlier loops of `steps` counted them
        self._began_after = 0  # step
        self._quiet_steps = 0  # after which nothing is due but their line: see `_step_quietly`

    @property
    def is_main(self) -> bool:
        """True on rank 0: for work that a single process does, such as printing."""
        return self.rank == 0

    @property
    def is_finished(self) -> bool:
        """True if training has ended, and not only this launch: for work that is done once, after the loop.

        Training has ended if no step is left, the ranks agreed on `stop`, or the loop was left by break. `finish`, the exit code
        and the next start go by this property. A loop without `batches`, `epochs` and `steps` ends where `finish` is called: there
        `not should_leave` says the same behind the loop.
        """
        stopped = self.worker.stopped
        if stopped is not None or self.worker.should_leave:
            return self.schedule.is_end(self.position) or (stopped is not None and stopped.is_end)
        return self.schedule.is_end(self.position) or self._pass.is_left or self._are_steps_over

    @property
    def should_leave(self) -> bool:
        """True if all ranks agreed in the last `step` to make no further step; a loop over `batches` ends by itself then."""
        return self.worker.should_leave

    def keep(self, **objects: Any) -> None:
        """Include *objects* in snapshots, and load the newest snapshot into them now. Collective: every rank, once.

        Models, optimizers, learning-rate schedulers, a GradScaler and an AveragedModel are recognized by their class. Random
        generators, lists, dicts and tensors are restored in place. Other plain values are read and written in `kept`, and are the
        same on every rank. Any other object needs `state_dict` and `load_state_dict`; snapshots hold the state of rank 0's
        object. A model may be wrapped by DistributedDataParallel and torch.compile before this call or afterwards; `fully_shard`
        comes before it: each rank then stores and loads its own rows, at any number of ranks. A warning names
        state of the script that is not kept; once such state changes, it is an error. After the call `position` says where the
        run continues, and every rank has verified every byte that it loaded.

        Raises:
            StateError: no model or no optimizer was given, a snapshot cannot hold an object, or the newest snapshot holds
                other objects. Or a parameter is sharded in another way than `fully_shard` of torch.distributed.fsdp does it.
            SnapshotError: the store cannot be read.
        """
        if self._state is not None:
            raise StateError("run.keep was called a second time", "name everything in one call")
        worker = self.worker
        parts = kept.parts_by_name(objects) if self._script is None else kept.parts_of(objects)
        if worker.layout.degree > 1 and not sharded_modules(parts["model"]):
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
            worker, self._gradients, parts, None if self._source is None else self._source.virtual_shards
        )
        self._state = state = State(**parts)
        self._lockstep = Lockstep.of(worker, state.model)
        self._optimizers = state.optimizers
        if self._script is None:  # whose log names the rates as its one optimizer, or several, have them
            self._optimizers = parts["optimizers"] if "optimizers" in parts else parts["optimizer"]
        note_rates, optimizers = worker.progress.note_rates, self._optimizers
        for optimizer in state.optimizers.values():
            # A schedule sets the rates of the next step before `step` is called.
            optimizer.register_step_post_hook(lambda *_: note_rates(optimizers))
        data = None if self._source is None else self._source.opened
        self._snapshots = Snapshots(
            worker, state, self._step, self.schedule, data, self._policy, self._compare_every,
            not_exchanged=self._not_exchanged,
        )  # fmt: skip
        self._known_source = self._source
        with _ends_here_if_asked(worker):
            self.position = self._snapshots.restore()
        if self._counts_on_snapshot and self._snapshots.restored is None:
            raise SnapshotError(
                "the model was built without initial values, since the store listed a snapshot, and none of those listed can be read",
                "start again: damaged snapshots were set aside, so that the run begins with initial values",
            )
        if self._script is not None:
            self._own_data.note_seeds()
            self._pass.watch(state, computes_gradients=self._gradients is None)
            # The script's own variables, to name those that were forgotten.
            caller = sys._getframe(1)  # noqa: SLF001
            repeats_epochs = partial(self._begins_epoch_again, state)
            self._script.watch(state, self._snapshots, objects, caller, repeats_epochs)
            self._script.resume(self._snapshots, self.schedule)
            if self._snapshots.restored is not None:
                stands = "had finished" if self.is_finished else "continues"
                name = self._snapshots.restored.name
                self._tell(f"{stands} after step {self.position.step}, from snapshot {name}")
        worker.phase("build")

    def finds_snapshot(self) -> bool:
        """Return whether the store lists a snapshot, so that initial values may be left out: `keep` loads one. Collective: every rank.

        Raises:
            SnapshotError: the store cannot be read.
        """
        catalog = Catalog.of_run(self._policy, self.worker.run_folder, self.worker.run_id)
        self._counts_on_snapshot = bool(candidates(self.worker, catalog))
        return self._counts_on_snapshot

    def wrap(
        self, model: nn.Module, *, blocks: Iterable[nn.Module] | None = None, **options: Any
    ) -> nn.Module:
        """Return *model* with its gradients exchanged between ranks in each backward pass. Collective: every rank.

        With `join(shard=...)` the model is sharded among the ranks of each replica, in place, and returned;
        `Run.gradients` exchanges the gradients. Call it before the optimizer is made. Otherwise, with several ranks the
        result is DistributedDataParallel, and every rank has rank 0's weights; with a single rank it is *model* itself.
        `keep` takes the model or the result. In the loop, call the result and multiply the loss by `batch.share`.

        Args:
            model: Model on `device`.
            blocks: With `join(shard=...)`: modules to gather one at a time, such as the layers of a transformer. None: the elements
                of the model's longest ModuleList.
            options: Options of DistributedDataParallel, such as find_unused_parameters.

        Raises:
            StateError: the run computes the gradients itself (`gradients`) or the model is wrapped already, so that gradients
                would be exchanged twice; or the model is sharded, or on another device.
        """
        if self.worker.sharding is not None:
            return self._shared(model, blocks, options)
        if self._gradients is not None:
            raise StateError(
                "run.wrap exchanges gradients, and so does run.gradients: they would be exchanged twice",
                "call the model bare in the function that run.gradients is given",
            )
        if isinstance(model, DistributedDataParallel):
            raise StateError(
                "run.wrap was given a model that DistributedDataParallel has wrapped already: gradients would be exchanged twice",
                "wrap the model once, by run.wrap or by DistributedDataParallel",
            )
        replicable.require_whole(model)
        replicable.require_on(model, self.device)
        self._wrapped |= {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        return model if self.world_size == 1 else ddp.wrap(model, self.device, **options)

    def _shared(
        self, model: nn.Module, blocks: Iterable[nn.Module] | None, options: dict[str, Any]
    ) -> nn.Module:
        if options:
            raise StateError(f"run.wrap has no option {next(iter(options))} for a model that workers share")
        replicable.require_on(model, self.device)
        shard_model(self.worker, model, self.worker.sharding, blocks)
        return model

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the number of each remaining epoch, from 0: `for epoch in run.epochs(10)`. Every rank.

        Inside the loop, `batches` without *epochs* and *steps* gives the batches of the epoch. The code after the batches belongs
        to the epoch: the snapshot of the epoch's last step is taken after that code, so that a restart neither skips nor
        repeats it. A run that resumes in the middle of an epoch runs the code before `batches` again; then kept state is
        restored from the snapshot. If all ranks exit in the middle of an epoch, this process ends as by `finish`. A script that
        reads its own data resumes from the beginning of the epoch, unless `keep` was given a loader: an object that can be
        iterated over and has a state.

        Raises:
            StateError: `keep` was not called, an epoch made no step, or its batches were left by break.
        """
        self._kept("epochs")
        if type(number) is not int or number < 1:
            raise StateError(f"run.epochs({number!r}): the number of epochs is a whole number from 1")
        return self._through_epochs(number)

    def steps(self, number: int) -> Iterator[int]:
        """Yield the number of each remaining step, from 0, for a script that reads its own data: `for step in run.steps(1000)`. Every rank.

        Each pass calls `step` once, and begins with the generators of Python, NumPy and torch in a state that follows from the seed
        and the step: a restart draws what an undisturbed run draws. A script that seeds them differently on each rank before
        `keep` has a different state on each rank. The loop ends early if all ranks are asked to exit. On resuming, kept state that
        was changed between `keep` and the loop is restored from the snapshot first.

        Raises:
            StateError: `keep` was not called, a pass did not call `step`, or the loop is over `batches` or within `epochs`; earlier
                loops leave no step of *number*; or, on resuming with a kept loader, the model or an optimizer was changed between
                `keep` and the loop.
        """
        snapshots, _ = self._kept("steps")
        if type(number) is not int or number < 1:
            raise StateError(f"run.steps({number!r}): the number of steps is a whole number from 1")
        if self._stages.epochs is not None:
            raise StateError("run.steps was called inside of run.epochs", "count either steps or epochs")
        done = max(self._steps_before, self.position.step if self._is_training else 0)
        if number <= done:
            raise StateError(
                f"run.steps({number}) counts the steps of the whole run, and {done} of them are those of the loops before: none is left",
                f"run.steps({done + number}) makes {number} more",
            )
        self._steps_before = number
        return self._through_steps(number, snapshots)

    @property
    def kept(self) -> KeptValues:
        """Plain values given to `keep`, by name: `run.kept["best"] = 0.9`. Snapshots hold them.

        Raises:
            StateError: `keep` was not called.
        """
        _, state = self._kept("kept")
        return kept.values_of(state)

    def batches(
        self,
        dataset: Any,
        *,
        size: int,
        epochs: int | None = None,
        steps: int | None = None,
        tail: str = "spill",
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        micro_batch_size: int | None = None,
        order: Order | None = None,
        shards: int | None = None,
    ) -> Batches:
        """Return this rank's part of each global batch, from `position` to the end. Collective: every rank.

        Every sample comes once per epoch, shuffled by the seed and the epoch, at any number of ranks and over all
        restarts. Random draws while a sample is read and while the model runs follow from the seed, too. The loop ends early,
        after the same step on all ranks, if the ranks were asked to exit: check `is_finished` afterwards. If `batches` is called
        before `keep`, a snapshot of other data is refused before anything is restored.

        Inside `epochs` these are the batches of one epoch. A second call after the first loop, with other data, begins a
        second stage; a restart continues in the stage that the run was in.

        Args:
            dataset: Object with `__len__` and `__getitem__`; the same on every rank.
            size: Number of samples in a global batch, shared out among the ranks. It need not be divisible by the number of ranks.
            epochs: Number of passes over the dataset. Give *epochs* or *steps*, and neither inside `Run.epochs`.
            steps: Number of steps over the dataset.
            tail: Treatment of samples at an epoch's end that fill no batch: "spill" (the batch continues in the next
                epoch), "short" (a smaller batch) or "drop".
            num_workers: Loader processes of each rank; 0 reads in this process.
            collate: Function that makes a batch of a list of samples. None: torch's default_collate.
            micro_batch_size: Most samples that `gradients` passes to its function at once. None: all samples of the rank.
            order: Order of the samples, if not shuffled by the seed (`runtime/data/samplers.py`).
            shards: Number of data shards, for a dataset from `open_shards`; each shard is read in order, by one rank at a time.

        Raises:
            DatasetError: the data cannot be read by index, differs between ranks, or is not the data of the snapshot.
            StateError: `keep` was not called, a pass of the loop did not call `step`, an argument cannot be used or differs
                between ranks, or the loop over this data has ended.
            LoopDriftError: an argument differs from the snapshot's, so that resuming would be another run.
        """
        given: dict[str, Any] = {
            "size": size,
            "epochs": epochs,
            "steps": steps,
            "tail": tail,
            "shards": shards,
        }
        of_loader = {"num_workers": num_workers, "micro_batch_size": micro_batch_size}
        self._stages.require_arguments(dataset, {**given, **of_loader})
        in_epochs = self._stages.epochs
        arguments = given if in_epochs is None else {**given, "epochs": in_epochs.number}
        if self._is_training and self.worker.should_leave:
            self.schedule.has_more = True
            return Batches(lambda: iter(()))
        self._meet(Call.BATCHES)
        with _ends_here_if_asked(self.worker):
            source = self._stages.source_again(dataset, arguments)
            if source is None:
                drift.require_same_on_ranks(
                    self.worker, {"job.seed": self.worker.seed, **drift.of_batches(**arguments)}
                )
                source = Source(
                    self.worker, dataset, self._gradients, {"num_workers": num_workers, "collate": collate},
                    micro_batch_size=micro_batch_size, order=order, stage=self._stages.stage_of_call(), **arguments,
                )  # fmt: skip
                self._stages.require_new(source, sys._getframe(1))  # noqa: SLF001  # the line that calls
            self._source = source
            if self._snapshots is None:
                self.schedule.steps = source.schedule
                return Batches(partial(self._loop, source))
            if not self._enter(source, drift.of_batches(**arguments)):
                return Batches(lambda: iter(()))
        check = None if self._script is None else self._script.check_of_count()
        return Batches(partial(self._loop, source), check)

    def gradients(self, fn: Callable[[Batch], Any], batch: Batch) -> float:
        """Compute the global batch's gradients in the parameters' `grad`; return its mean loss. Collective: every rank.

        They are added to gradients of earlier calls that no optimizer has used yet.
        With virtual shards the result has the same bits at any number of ranks: *fn* is called with each shard of the batch
        in turn, and the gradients are added up in a fixed order. Otherwise *fn* is called with each micro-batch, and
        DistributedDataParallel adds up the gradients. Pass a bare model to *fn*: nothing else may exchange gradients. If *fn* raises
        StopTraining, or a rank was asked to exit, this process ends as by `finish`, and the step changes nothing.

        Args:
            fn: Function of a `Batch`, called for each part of this rank. It returns the mean loss, or a pair: the sum of the
                losses, and this part's contribution to the number by which the global sum is divided.
            batch: Batch that `batches` yielded.

        Raises:
            NonFiniteLossError: the loss is not finite; raised on every rank.
            StateError: `join` was given neither *gradients* nor *virtual_shards*, the batch has had its gradients, or an operation
                has no deterministic form here.
        """
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

    def log(self, **scalars: Any) -> None:
        """Add *scalars* to the step's line in metrics.jsonl, on the console and in the sinks; call this before `step`.

        Each scalar is a number or a tensor without dimensions, and a mean over this rank's samples; the line shows the mean over
        the global batch.

        Raises:
            StateError: the run uses `gradients`, whose function returns scalars beside its loss.
            StepResultError: a scalar cannot have its name, or there are too many scalars.
        """
        if self._gradients is not None:
            raise StateError(
                "run.log does not know over which part of the batch a scalar is a mean",
                'return it beside the loss from the function that run.gradients calls: {"loss": loss, "name": value}',
            )
        self._ballot.note(scalars)

    def step(self, *, loss: Any = None, samples: int | None = None) -> None:
        """Finish a step: report it, take a snapshot if one is due, and learn whether the ranks are asked to exit. Collective.

        A kept `Evaluation` and hooks that are due run before the snapshot. In a loop over `batches` or `steps` the script's code
        behind this call belongs to the step: the snapshot is taken once the pass has ended.
        Every rank calls this at the end of each pass through the loop, after optimizer and scheduler have stepped. Ranks
        exchange messages every tenth of a second only, so short steps wait neither for the GPU nor for other ranks here.
        A pass that only accumulated gradients, without an optimizer step, belongs to the next step of the optimizer: no snapshot
        is taken after such a pass.

        Args:
            loss: Mean over this rank's samples, a number or a tensor of one element; reported as the mean over all ranks.
            samples: Number of this rank's samples, if the script reads its data itself, without `batches`. Such a script also
                decides which samples come after a restart.

        Raises:
            StateError: a snapshot would leave out state that training changes (the message names it), *loss* is not one number,
                *samples* is not a number of samples, or `step` was called twice in a pass.
            NotExchangedError: the ranks' models differ after the first step: nothing exchanged their gradients.
            SnapshotError: the snapshot writer has failed.
        """
        self._meet(Call.STEP)
        if self._quiet_steps and self._step_quietly(loss, samples):
            return
        self._quiet_steps = 0
        worker, snapshots, state = self.worker, *self._kept("step")
        if self.schedule.steps is None and self._is_training and worker.should_leave:
            self._end()  # the script continued: this pass is left out
        require_loss(loss, samples)
        batch = self._pass.close()
        self._require_one_call(batch, samples)
        # The code behind this call runs once: a restart does not repeat it.
        worker.vote.may_cut_short &= not self._is_late(is_own=batch is None)
        state.reshard()
        self._pass.require_kept()
        if batch is None:
            self._enter_own_data(snapshots, state)
        is_pending = self._pass.is_pending()
        if self._gradients is not None and batch is not None:  # by which all have told each other everything
            self._finish_step(batch.end, math.nan if loss is None else float(loss))
        else:
            self._tell_step(loss, batch, int(samples or 0), is_pending=is_pending)
        self._pass.settle(is_pending=is_pending)
        self._agree_on_end(batch)
        if self._hooks is not None:
            self._hooks.after_step(self.position)
        if state.evaluation is not None:
            state.evaluation.after_step(self.position)
        if batch is None and self._gradients is None:
            self._own_data.end_pass(loss, self.position.step)
        if is_pending:
            self._ballot.hold_back()
        else:
            self._snapshot_and_leave(snapshots, state)
            if batch is not None:
                self._quiet_steps = self._quiet_steps_ahead(snapshots, state)

    def evaluate(
        self,
        dataset: Any,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        step: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
        name: str = "",
        model: nn.Module | None = None,
        size: int = 256,
        samples: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Return the means of *loss* and *metrics* over *dataset*, each sample once at any number of ranks. Collective.

        The log records them at `position`, like an evaluation of a job file. The model runs in evaluation mode and without
        gradients. If all ranks were asked to exit, this process ends as by `finish`; between the optimizer's step and `step`,
        while gradients wait for the optimizer, in an epoch that a restart begins again, and where the script reads a kept loader, the
        evaluation is finished first.

        Args:
            dataset: Object with `__len__` and `__getitem__` that returns pairs of input and target; the same on every rank.
            loss: Function of outputs and targets that returns their mean loss.
            metrics: Metrics by name. A metric is a function of outputs and targets that returns a mean over them, or a class
                with `update(outputs, targets)` and `compute()`. Without *loss* and *step*, a function takes the model and a batch.
            step: Function of the model and a batch that returns outputs and targets, for a model whose evaluation differs from
                its training. Not with *loss*.
            name: Prefix of the metrics' names in the log: `val` makes `val.accuracy`. The returned names have no prefix:
                `loss`, `accuracy`.
            model: Model to evaluate. None: the kept model.
            size: Number of samples in a batch.
            samples: Most samples to evaluate, always the same samples. None: all.
            collate: Function that makes a batch of a list of samples. None: torch's default_collate.

        Raises:
            DatasetError: the data cannot be read by index, or differs between ranks.
            StateError: *loss* and *step* were both given.
        """
        worker, _, state = self.worker, *self._kept("evaluate")
        if loss is not None and step is not None:
            raise StateError(
                "run.evaluate was given loss and step", "a metric measures the loss of what step returns"
            )
        self._quiet_steps = 0
        self._meet(Call.EVALUATE)
        self._ballot.meet()
        opened = index_loader.open_dataset(
            worker, lambda: dataset, name or "evaluation", given_to="run.evaluate"
        )
        evaluation = Evaluation(
            worker, kept.bare(model) if model is not None else state.model,
            None if loss is None else lambda model, batch: loss(model(batch[0]), batch[1]),
            opened, self.schedule, metrics=metrics, step=step, batch_size=size, samples=samples, collate=collate,
        )  # fmt: skip
        may_cut_short = worker.vote.may_cut_short
        # Where it is cut short, a snapshot is taken.
        worker.vote.may_cut_short &= self._pass.is_between_steps and not self._is_ahead(state)
        measured = several.run_sets(worker, {name: evaluation}, self.position, ranked=None, stop_when=None)
        worker.vote.may_cut_short = may_cut_short
        self._ballot.is_end_due = True
        if measured is None:
            if not self._stages.is_after_batches:
                self._pass.require_closed(self.position.step)
            self._end(takes_snapshot=not self._stages.is_after_batches)
        return {key.removeprefix(f"{name}."): value for key, value in measured.items()}

    def call(self, hooks: Hooks) -> None:
        """Register *hooks*, which are called when training begins and after each step. Call this before `batches` and `keep`."""
        self._hooks = hooks

    def stop(self, reason: str) -> None:
        """End training on all ranks; the run counts as finished. Any rank may call this, inside the loop.

        The loop ends after the same step at every speed and number of ranks: after the next step that is a multiple of 8 or the
        last of an epoch; with `gradients`, or if the script reads its own data, after the current step. If all ranks have
        called `evaluate` since the last step, no further step is made.
        """
        self._ballot.request_end(reason)

    def finish(self) -> NoReturn:
        """Take the last snapshot, wait until it is committed, and end this process. Collective: every rank, at the script's end.

        The run counts as finished if `is_finished` is true. Otherwise it is interrupted (exit code 75 under plain python), and
        the same command continues it. Functions registered with `atexit` are called before the process ends.

        Raises:
            StateError: the loop was left in a pass in which an optimizer had stepped, the loop is not over, or the ranks left it
                after different steps.
            SnapshotError: the last snapshot could not be written.
        """
        self._kept("finish")
        if self._script is not None:
            self._close_loop()
        elif not self.worker.should_leave:
            self.schedule.has_ended = True
        self._end()

    def end_if_forgotten(self) -> None:
        """Finish a run whose script has ended without `finish`, if its loop was over; otherwise report where the run stands."""
        if self._is_over or not self._is_training:
            return
        # Ranks that wait elsewhere notice that this process has ended.
        with suppress(RuntimeError):
            self._say_goodbye()
        if self._pass.is_closed and (self.worker.should_leave or self.schedule.is_end(self.position)):
            self._close_loop()  # as ranks that called `finish` do
            self._end()
        self._tell(
            f"the script ended after step {self.position.step} without run.finish(): the same command resumes from the newest snapshot"
        )

    def _enter(self, source: Source, settings: Mapping[str, Any]) -> bool:
        """Move to the stage of *source*; return False if the run is past that stage already. Collective: every rank."""
        snapshots, _ = self._kept("batches")
        now = stage_of(self.position)
        if source.stage < now:
            snapshots.require_past_data(source.stage, source.opened)
            return False
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
            if is_resumed and (self._stages.epochs is None or not self.position.is_epoch_end):
                snapshots.put_back()
        if not self._is_training:
            self._begin()
        elif source.stage > now:
            self._tell_stage(source)
        return True

    def _begin_stage(self, stage: int, snapshots: Snapshots) -> None:
        if not (self.schedule.is_end(self.position) or self._pass.is_left):
            raise StateError(
                f"run.batches was called again in the middle of a loop over batches, after step {self.position.step}",
                "end that loop first: each run.batches is a stage of its own, and they come one after the other",
            )
        snapshots.begin_stage(stage_of(self.position))
        self.position, self._pass.is_left, self.schedule.has_ended = (
            next_stage(self.position, stage),
            False,
            False,
        )

    def _tell_stage(self, source: Source) -> None:
        left = self.schedule.remaining(self.position)
        if self.rank == 0:
            steps = None if left is None else self.position.step + left
            self.worker.event(
                events.STAGE_STARTED, stage=source.stage, steps=steps, samples=self.schedule.samples
            )

    def _enter_own_data(self, snapshots: Snapshots, state: State) -> None:
        """Begin the stage of data that the script reads itself, at its first step. Collective: every rank."""
        epochs = self._stages.epochs
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
            if self.position.step > 0:
                self._own_data.note_resumed()
            if self.rank == 0:
                self.worker.event(events.DATA_OWN, kept=kept.own_objects(state))

    def _require_one_call(self, batch: Batch | None, samples: int | None) -> None:
        if batch is not None:
            return
        if self.schedule.steps is not None and (self._stages.epochs is None or samples is None):
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
        this.batch = None
        self.worker.vote.may_cut_short = self._script is None
        this.require_kept()
        mean, scalars = self._ballot.add(loss, batch.samples)
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
        is_busy = self._gradients is not None or self._hooks is not None or state.evaluation is not None
        if is_busy or self._is_owing or self.worker.should_leave:
            return 0
        left = self.schedule.remaining(self.position)
        most = min(self._ballot.room_after(self.position), 0 if left is None else left - 1)
        return snapshots.idle_steps(self.position, most, self.schedule.global_batch_size)

    def _tell_step(self, loss: Any, batch: Batch | None, samples: int, *, is_pending: bool) -> None:
        """Report a step to the other ranks, if a meeting is due; the exchange of its gradients has not done so."""
        worker, snapshots, _ = self.worker, *self._kept("step")
        mean, scalars = self._ballot.add(loss, samples if batch is None else batch.samples)
        worker.progress.note_step(0, scalars)
        if batch is None:
            self._finish_step(after_own_step(self.position, self._ballot.meet(is_pending=is_pending)), mean)
            return
        is_end, is_needed = self.schedule.is_end(batch.end), snapshots.is_due(batch.end)
        self._ballot.meet_if_due(batch.end, is_end=is_end, is_needed=is_needed, is_pending=is_pending)
        self._finish_step(batch.end, mean)

    def _finish_step(self, position: Position, loss: float | LateNumber) -> None:
        self.position = position
        self.worker.log_step(position, loss, self._optimizers)

    def _agree_on_end(self, batch: Batch | None) -> None:
        """Learn whether some rank called `stop`, at the steps after which all ranks meet. Collective at these steps."""
        knows_at_once = batch is None or self._gradients is not None
        if self.worker.vote.end and (
            knows_at_once or is_fixed(self.position, is_end=self.schedule.is_end(self.position))
        ):
            self._ballot.is_end_due = True
        if self._ballot.is_end_due:
            self._ballot.agree_on_end()

    def _snapshot_and_leave(self, snapshots: Snapshots, state: State) -> None:
        worker, epochs = self.worker, self._stages.epochs
        is_own = self.schedule.steps is None
        is_epoch_end = epochs is not None and not is_own and self.position.is_epoch_end
        waits = is_epoch_end or self._begins_epoch_again(state)
        is_late = not waits and self._is_late(is_own=is_own)
        is_wanted = snapshots.after_step(self.position, takes=not (waits or is_late))
        if waits and not is_own:
            # The code after the epoch's batches runs first, evaluations included.
            worker.vote.may_cut_short, self._stages.is_after_batches = False, True
            return
        self._is_owing = is_late and (is_wanted or worker.should_leave)
        if not worker.should_leave:
            return
        if worker.stopped is not None and worker.stopped.is_end:
            worker.vote.leave_wanted = False  # what follows the loop is not cut short
        if not waits and not is_late:
            snapshots.finish(self.position)
        if is_own and epochs is not None and not self.is_finished:
            self._end(takes_snapshot=False)

    def _begins_epoch_again(self, state: State) -> bool:
        """Return True if a restart begins the epoch again: the script reads its data itself, by a loader without a state."""
        is_own = self.schedule.steps is None and self._stages.epochs is not None
        return is_own and not kept.has_loader(state)

    def _is_ahead(self, state: State) -> bool:
        """Return True if the script's own data may be ahead of the last step: a kept loader may have given the next samples out."""
        return self.schedule.steps is None and (self._stages.epochs is not None or kept.has_loader(state))

    def _is_late(self, *, is_own: bool) -> bool:
        """Return True if the code behind `step` belongs to the step, since this object notices the end of the pass."""
        return self._script is not None and (not is_own or self._is_in_steps)

    def _take_owed(self) -> None:
        """Take the snapshot that was due after the last step, now that the pass is over. Collective: every rank."""
        self._pass.require_still(self.position.step)
        self.worker.vote.may_cut_short = not self._stages.is_after_batches
        if not self._is_owing:
            return
        self._meet(Call.PASS)
        snapshots, _ = self._kept("step")
        self._is_owing = False
        if self.worker.should_leave:
            snapshots.finish(self.position)
        else:
            snapshots.take_if_due(self.position)

    def _through_epochs(self, number: int) -> Iterator[int]:
        snapshots, _ = self._kept("epochs")
        stage = self._stages.begin_epochs(number)
        if stage == stage_of(self.position):
            snapshots.put_back(is_last=self.position.is_epoch_end)
        elif stage > stage_of(self.position) and self.worker.should_leave:
            self.schedule.has_more = True
        try:
            while not self.worker.should_leave:
                done = within(self.position).epoch if stage == stage_of(self.position) else 0
                if stage < stage_of(self.position) or done >= number:
                    break
                self._stages.begin_epoch(self.position)
                self._seed_first_pass(snapshots)
                yield done
                self._end_epoch(snapshots)
        except GeneratorExit:
            self._pass.is_left = True
            raise
        finally:
            self._stages.end_epochs()
        if stage == stage_of(self.position) and self.schedule.steps is None:
            self.schedule.epochs = number

    def _through_steps(self, number: int, snapshots: Snapshots) -> Iterator[int]:
        if not self._is_training:
            reads_on = kept.has_loader(self._kept("steps")[1])
            snapshots.put_back(is_last=self.position.step < number, reads_on=reads_on)
        self._seed_first_pass(snapshots)
        self._is_in_steps, self._are_steps_over = True, False
        try:
            while not self.worker.should_leave and self.position.step < number:
                before = self.position.step
                yield before
                if self.schedule.steps is not None:
                    raise StateError(
                        "run.batches was called inside of run.steps, which is for data that the script reads itself",
                        f"for batch in run.batches(dataset, size=256, steps={number})",
                    )
                if self.position.step == before:
                    raise StateError(f"run.step was not called in step {before + 1}", MISSING)
                self._take_owed()
            self._are_steps_over = not self.worker.should_leave
        finally:
            self._is_in_steps = False

    def _seed_first_pass(self, snapshots: Snapshots) -> None:
        """Seed the generators before a loop's first pass if the script reads its own data: a restart repeats the draws."""
        of_batches = any(map(drift.is_of_batches, snapshots.loop or {}))
        is_own = self.schedule.steps is None and self._gradients is None and not of_batches
        if self.position.step > 0 and is_own:
            self._own_data.seed(self.position.step)

    def _end_epoch(self, snapshots: Snapshots) -> None:
        """Do the work that is due once the code after an epoch's batches has run. Collective: every rank."""
        self._meet(Call.EPOCH)
        worker, stages = self.worker, self._stages
        worker.vote.may_cut_short, stages.is_after_batches = True, False
        if self.schedule.steps is None and stages.has_stepped(self.position):
            self.position = after_own_epoch(self.position)
            if not kept.has_loader(self._kept("epochs")[1]):
                self._own_data.warn_of_workers()
        if not worker.should_leave:
            stages.require_whole_epoch(self.position)
        self._ballot.agree_on_end()
        if worker.should_leave and not self.position.is_epoch_end:
            return
        is_pending = self._pass.holds_gradients
        if not is_pending:
            snapshots.take_if_due(self.position)
        self._pass.settle(is_pending=is_pending)
        if worker.should_leave and not self.is_finished:
            self._end()

    def _loop(self, source: Source) -> Iterator[Batch]:
        self._kept("batches")
        if not self._is_training:
            with _ends_here_if_asked(self.worker):
                if not self._enter(source, {}):
                    return
        try:
            for part, batch in self._stages.reading(source, self.position):
                self._pass.open(batch)
                if part.model_keys and self._script is not None:
                    self.worker.generators.seed_model(part.model_keys[0])
                if self._gradients is None:  # the script's own exchange is not seen
                    self.worker.vote.part = batch.samples / batch.total
                    self.worker.vote.end_own_part()
                yield batch
                if self._is_over_after(part.end):
                    break
        except GeneratorExit:
            self._pass.is_left = True
            if self._lockstep is not None:
                self._lockstep.note_left()
            raise
        self._meet(Call.LEAVE)

    def _is_over_after(self, end: Position) -> bool:
        """Return True if the loop over batches ends with the pass that ended at *end*; in the middle of an epoch, end the process."""
        if self._pass.batch is not None:
            raise StateError(f"run.step was not called in step {end.step}", MISSING)
        self._take_owed()
        if self._ballot.is_end_due:
            self._ballot.agree_on_end()
        is_in_epochs = self._stages.epochs is not None
        if self.worker.should_leave and is_in_epochs and not end.is_epoch_end and not self.is_finished:
            self._end()
        return self.worker.should_leave or (is_in_epochs and end.is_epoch_end)

    def _begin(self) -> None:
        worker, snapshots, state = self.worker, *self._kept("step")
        worker.start_training(
            self.position, self.schedule, state.model, restored=snapshots.restored,
            log_every=self._log_every, measures=self._measures,
            keeps_modes=self._script is not None,  # which may have frozen a BatchNorm by its mode
        )  # fmt: skip
        if self._hooks is not None:
            self._hooks.start(self.position)
        if (
            state.evaluation is not None
        ):  # an evaluation may be owed: it was cut short when all ranks were asked to exit
            state.evaluation.run_if_owed(self.position)
        self._is_training, self._began_after = True, self.position.step

    def _close_loop(self) -> None:
        """Agree with all ranks on how the loop ended, before the run says whether it is finished. Collective."""
        worker = self.worker
        self._meet(Call.LEAVE)
        self._meet(Call.FINISH)
        self._pass.require_closed(self.position.step)
        self._ballot.meet()
        steps = [int(text) for text in worker.gather_text(str(self.position.step))]
        for rank, step in enumerate(steps):
            if step != steps[0]:
                raise StateError(
                    f"rank {rank} left its loop after step {step}, and rank 0 after step {steps[0]}",
                    "end the loop after the same step on every rank: run.stop(reason), called by any of them, does",
                )
        if not worker.should_leave:
            self._ballot.agree_on_end()
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
                worker.moments.leave.append(self._record_own_end)

    def _meet(self, call: Call, limit_s: float | None = None) -> None:
        if self._lockstep is not None:
            self._lockstep.meet(call, limit_s)

    def _say_goodbye(self) -> None:
        """End this process by name if other ranks that share the model are still in the loop; at its exit nothing can be raised."""
        try:
            self._meet(Call.LEAVE, _GOODBYE_S)
        except StateError as error:
            life.end_by(error)

    def _record_own_end(self) -> None:
        if self._snapshots is not None:
            self._snapshots.record_end(OWN_LOOP_OVER)

    def _end(self, *, takes_snapshot: bool = True) -> NoReturn:
        self._is_over = True
        worker, snapshots, state = self.worker, *self._kept("finish")
        self._ballot.meet()
        if takes_snapshot:
            snapshots.finish(self.position)
        why = "" if worker.stopped is None or not worker.stopped.is_end else f" ({worker.stopped.reason})"
        done = f"after step {self.position.step}{why}, snapshots in {self._catalog_uri()}"
        text = f"finished {done}" if self.is_finished else f"leaves {done}: the same command resumes the run"
        worker.moments.leave.append(lambda: self._tell(text))  # behind the last snapshot's commit
        if self._script is not None:
            worker.moments.leave.append(atexit._run_exitfuncs)  # noqa: SLF001  # wandb and others end there
        life.leave(worker, self.position, self.schedule, state.evaluation)

    def _catalog_uri(self) -> str:
        return self._policy.uri or os.path.relpath(self.worker.run_folder.path)

    def _tell(self, text: str) -> None:
        if self._script is not None:
            self._script.tell(text)

    def _not_exchanged(self) -> str | None:
        """Return the gradients that ranks do not exchange, as a phrase; None: this run, or a wrapper of the script's, exchanges all."""
        if self._gradients is not None:
            return None
        _, state = self._kept("step")
        trained = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
        if state.is_sharded:
            is_first = self.position.step <= self._began_after + 1
            is_exchanged = all(is_over_all_ranks(p) for p in trained.values())
            return (
                None
                if is_exchanged or not is_first
                else "nothing exchanged their gradients between the replicas"
            )
        left_out = [name for name, parameter in trained.items() if id(parameter) not in self._wrapped]
        if left_out and len(left_out) < len(trained):
            return f"{left_out[0]} was frozen when run.wrap was called, so its gradients are not exchanged"
        if left_out and not kept.is_wrapped(state.model):
            return "nothing exchanged their gradients"
        frozen = [
            name
            for name, parameter in state.model.named_parameters()
            if id(parameter) in self._wrapped and not parameter.requires_grad
        ]
        if frozen:
            return (
                f"{frozen[0]} was frozen after run.wrap was called, and DistributedDataParallel exchanges no gradient before it has "
                "that parameter's; run.wrap(model, find_unused_parameters=True) does without, also if the parameter is trained later"
            )
        if self.position.step > self._began_after + 1:
            return None  # models that are wrapped have differed after an earlier step of this start, too
        return (
            "their gradients were not exchanged though the model is wrapped: the loop calls the bare model, "
            "or not every rank began with the same parameters"
        )

    def _kept(self, caller: str) -> tuple[Snapshots, State]:
        if self._snapshots is None or self._state is None:
            raise StateError(
                f"run.{caller} was called before run.keep",
                "run.keep(model=model, optimizer=optimizer) says what a run continues with",
            )
        return self._snapshots, self._state
