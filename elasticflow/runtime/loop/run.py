"""The run that `elasticflow.join` returns: the calls of a script that writes its own training loop."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from torch.nn.parallel import DistributedDataParallel

from elasticflow.errors import StateError
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.loop import kept
from elasticflow.runtime.training import ddp
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.training.replicated_step import require_on, require_whole
from elasticflow.runtime.training.shard_model import shard_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from elasticflow.runtime.data.order.order import Order
    from elasticflow.runtime.loop.batch import Batch
    from elasticflow.runtime.loop.hooks import Hooks
    from elasticflow.runtime.loop.kept import KeptValues
    from elasticflow.runtime.loop.passes import Batches
    from elasticflow.runtime.loop.training_loop import TrainingLoop
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.state.state import State


class Run:
    """A run that this process takes part in, as `elasticflow.join` returned it.

    All ranks call the same methods in the same order. A method marked "Collective" returns once every rank has called it.

    Attributes:
        rank: Number of this process, from 0.
        local_rank: Number of this process on its machine, from 0.
        world_size: Number of processes.
        device: Device of the model and the batches: a GPU of this rank's own, or the CPU.
        worker: This process as a member of its group; for the objects of a train.py that the compiler writes.
        schedule: Schedule that positions refer to; for the same objects.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop, self.worker, self.schedule = loop, loop.worker, loop.schedule
        self.rank, self.local_rank = self.worker.rank, self.worker.local_rank
        self.world_size, self.device = self.worker.world_size, self.worker.device

    @property
    def position(self) -> Position:
        """Position after the last finished step: `step`, `epoch` and `samples` count the work of all launches."""
        self._loop.note_reader(sys._getframe(1))  # noqa: SLF001
        return self._loop.position

    @property
    def is_main(self) -> bool:
        """True on rank 0: for work that a single process does, such as printing."""
        return self.rank == 0

    @property
    def is_finished(self) -> bool:
        """True if training has ended, and not only this launch: for work that is done once, after the loop.

        Training has ended if no step is left, the ranks agreed on `stop`, or the loop was left by break. `finish`, the exit code
        and the next start go by this property. A loop without `batches`, `epochs` and `steps` has ended for code that is in no
        loop, unless the ranks were asked to exit.
        """
        frame = sys._getframe(1)  # noqa: SLF001
        self._loop.note_reader(frame)
        return self._loop.is_finished or self._loop.is_past_own_loop(frame)

    @property
    def should_leave(self) -> bool:
        """True if all ranks agreed in the last `step` to make no further step; a loop over `batches` ends by itself then."""
        self._loop.note_reader(sys._getframe(1))  # noqa: SLF001
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
            StateError: `keep` was called before, no model or no optimizer was given, a snapshot cannot hold an object, or the
                newest snapshot holds other objects; or a parameter is sharded, but not by `fully_shard` of torch.distributed.fsdp.
            SnapshotError: the store cannot be read.
        """
        self._loop.keep(objects, sys._getframe(1))  # noqa: SLF001

    def finds_snapshot(self) -> bool:
        """Return whether the store lists a snapshot, so that initial values may be left out: `keep` loads one. Collective: every rank.

        Raises:
            SnapshotError: the store cannot be read.
        """
        return self._loop.finds_snapshot()

    def wrap(
        self, model: nn.Module, *, blocks: Iterable[nn.Module] | None = None, **options: Any
    ) -> nn.Module:
        """Return *model* with its gradients exchanged between ranks in each backward pass. Collective: every rank.

        With `join(shard=...)` the model is sharded among the ranks of each replica, in place, and returned;
        `Run.gradients` exchanges the gradients. Call it before the optimizer is made. Otherwise, with several ranks the
        result is DistributedDataParallel, and every rank has rank 0's weights; with a single rank it is *model* itself.
        `keep` takes the model or the result. In the loop, call the result and multiply the loss by `batch.share`.

        Args:
            model: Model on `device`; one that is to be offloaded may be on the CPU.
            blocks: With `join(shard=...)`: modules to gather one at a time, such as the layers of a transformer. None: the elements
                of the model's longest ModuleList.
            options: Options of DistributedDataParallel, such as find_unused_parameters.

        Raises:
            StateError: the run computes the gradients itself (`gradients`) or the model is wrapped already, so that gradients
                would be exchanged twice; or the model is sharded, or on another device; or there is no such option.
        """
        if self.worker.sharding is not None:
            if options:
                raise StateError(
                    f"run.wrap has no option {next(iter(options))} for a model that workers share"
                )
            # A model that is to be offloaded may be larger than the device: sharding moves its blocks there one after the other.
            if not (self.worker.layout.is_offloaded and all(p.is_cpu for p in model.parameters())):
                require_on(model, self.device)
            shard_model(self.worker, model, self.worker.sharding, blocks)
            return model
        if self._loop.gradients is not None:
            raise StateError(
                "run.wrap exchanges gradients, and so does run.gradients: they would be exchanged twice",
                "call the model bare in the function that run.gradients is given",
            )
        if isinstance(model, DistributedDataParallel):
            raise StateError(
                "run.wrap was given a model that DistributedDataParallel has wrapped already: gradients would be exchanged twice",
                "wrap the model once, by run.wrap or by DistributedDataParallel",
            )
        ddp.require_options(options)
        require_whole(model)
        require_on(model, self.device)
        with self._loop.wrapping(model):
            return model if self.world_size == 1 else ddp.wrap(model, self.device, **options)

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the number of each remaining epoch, from 0: `for epoch in run.epochs(10)`. Every rank.

        Inside the loop, `batches` without *epochs* and *steps* gives the batches of the epoch. The code after the batches belongs
        to the epoch: the snapshot of the epoch's last step is taken after that code, so that a restart neither skips nor
        repeats it. The generators are seeded before each epoch but the first, from the seed and the epoch's number. A run that
        resumes in the middle of an epoch runs the code before `batches` again; then kept state is restored from the snapshot. If
        all ranks exit in the middle of an epoch, this process ends as by `finish`. A script that reads its own data resumes from
        the beginning of the epoch, unless `keep` was given a loader: an object that can be iterated over and has a state.

        Raises:
            StateError: `keep` was not called, an epoch made no step, or its batches were left by break.
        """
        self._loop.require_keep("epochs")
        if type(number) is not int or number < 1:
            raise StateError(f"run.epochs({number!r}): the number of epochs is a whole number from 1")
        return self._loop.epochs(number)

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
        self._loop.require_keep("steps")
        if type(number) is not int or number < 1:
            raise StateError(f"run.steps({number!r}): the number of steps is a whole number from 1")
        if self._loop.stages.epochs is not None:
            raise StateError("run.steps was called inside of run.epochs", "count either steps or epochs")
        self._loop.require_steps_left(number)
        return self._loop.steps(number)

    @property
    def kept(self) -> KeptValues:
        """Plain values given to `keep`, by name: `run.kept["best"] = 0.9`. Snapshots hold them.

        Raises:
            StateError: `keep` was not called.
        """
        _, state = self._loop.require_keep("kept")
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
        given = {"size": size, "epochs": epochs, "steps": steps, "tail": tail, "shards": shards}
        options = {"num_workers": num_workers, "collate": collate}
        return self._loop.batches(
            dataset,
            given,
            options,
            micro_batch_size=micro_batch_size,
            order=order,
            caller=sys._getframe(1),  # noqa: SLF001
        )

    def gradients(self, fn: Callable[[Batch], Any], batch: Batch) -> float:
        """Add the global batch's gradients to the parameters' `grad`; return the batch's mean loss. Collective: every rank.

        `grad` keeps gradients of earlier calls until an optimizer has used them.
        With virtual shards the result has the same bits at any number of ranks: *fn* is called with each shard of the batch
        in turn, and the gradients are added up in a fixed order. Otherwise *fn* is called with each micro-batch, and
        DistributedDataParallel adds up the gradients. *fn* calls the bare model: nothing else may exchange gradients. If *fn* raises
        StopTraining, or a rank was asked to exit, this process ends as by `finish`, and the step changes nothing.

        Args:
            fn: Function of a `Batch`, called for each part of this rank. It returns the mean loss, or a pair: the sum of the
                losses, and this part's contribution to the number by which the global sum is divided.
            batch: Batch that `batches` yielded.

        Raises:
            NonFiniteLossError: the loss is not finite; raised on every rank.
            StateError: `join` was given neither *gradients* nor *virtual_shards*, the gradients of *batch* were computed before, or
                an operation has no deterministic form here.
        """
        return self._loop.make_gradients(fn, batch)

    def log(self, **scalars: Any) -> None:
        """Add *scalars* to the step's line in metrics.jsonl, on the console and in the sinks; call this before `step`.

        Each scalar is a number or a tensor without dimensions, and a mean over this rank's samples; the line shows the mean over
        the global batch.

        Raises:
            StateError: the run uses `gradients`, whose function returns scalars beside its loss.
            StepResultError: a scalar cannot have its name, or there are too many scalars.
        """
        if self._loop.gradients is not None:
            raise StateError(
                "run.log does not know over which part of the batch a scalar is a mean",
                'return it beside the loss from the function that run.gradients calls: {"loss": loss, "name": value}',
            )
        self._loop.ballot.note(scalars)

    def step(self, *, loss: Any = None, samples: int | None = None) -> None:
        """Finish a step: report it, take a snapshot if one is due, and learn whether the ranks are asked to exit. Collective.

        Every rank calls this at the end of each pass through the loop, after optimizer and scheduler have stepped. A kept
        `Evaluation` and hooks that are due run before the snapshot. In a loop over `batches` or `steps` the script's code after this
        call belongs to the step: the snapshot is taken once the pass has ended. Ranks exchange messages every tenth of a second
        only, so short steps wait neither for the GPU nor for other ranks here. No snapshot is taken after a pass that only
        accumulated gradients: it belongs to the next step of the optimizer.

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
        self._loop.step(loss, samples)

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

        The log records the means at `position`, like an evaluation of a job file. The model runs in evaluation mode and without
        gradients. If all ranks were asked to exit, the evaluation is cut short, and this process ends as by `finish`. The evaluation is
        finished first between the optimizer's step and `step`, while gradients wait for the optimizer, in an epoch that a restart
        begins again, and in a pass if objects other than models, optimizers and schedules are kept.

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
        if loss is not None and step is not None:
            raise StateError(
                "run.evaluate was given loss and step",
                "leave loss out: a metric measures it from the outputs of step",
            )

        def make(state: State) -> Evaluation:
            opened = index_loader.open_dataset(
                self.worker, lambda: dataset, name or "evaluation", given_to="run.evaluate"
            )
            return Evaluation(
                self.worker, kept.bare(model) if model is not None else state.model,
                None if loss is None else lambda model, batch: loss(model(batch[0]), batch[1]),
                opened, self.schedule, metrics=metrics, step=step, batch_size=size, samples=samples, collate=collate,
            )  # fmt: skip

        return self._loop.evaluate(name, make)

    def call(self, hooks: Hooks) -> None:
        """Register *hooks*, which are called when training begins and after each step. Call this before `batches` and `keep`."""
        self._loop.hooks = hooks

    def stop(self, reason: str) -> None:
        """End training on all ranks; the run counts as finished. Any rank may call this, inside the loop.

        The loop ends after the same step at every speed and number of ranks: after the next step that is a multiple of 8 or the
        last of an epoch; with `gradients`, or if the script reads its own data, after the current step. If all ranks have
        called `evaluate` since the last step, no further step is made.
        """
        self._loop.ballot.request_end(reason)

    def finish(self) -> NoReturn:
        """Take the last snapshot, wait until it is committed, and end this process. Collective: every rank, at the script's end.

        The run counts as finished if `is_finished` is true. Otherwise it is interrupted (exit code 75 under plain python), and
        the same command continues it. Functions registered with `atexit` are called before the process ends. A script that ends
        after its loop without this call has finished, unless it ends by `sys.exit` or `exit` with a code; under plain python and
        torchrun the code of `raise SystemExit(1)` cannot be seen.

        Raises:
            BaseException: the exception that the script is handling, as in `finally`, if it was raised after `join`.
            StateError: the loop was left in a pass in which an optimizer had stepped, the loop is not over, or the ranks left it
                after different steps.
            SnapshotError: the last snapshot could not be written.
        """
        self._loop.finish()
