"""What `elasticflow.join` returns: a run whose training loop is the script's own, and survives what happens to it."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from elasticflow import events
from elasticflow.errors import StateError
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.evaluation import several
from elasticflow.runtime.own_loop import kept
from elasticflow.runtime.own_loop.gradients import LoopStep
from elasticflow.runtime.own_loop.leaving import EndsHereIfAsked
from elasticflow.runtime.own_loop.loop import MISSING, Loop
from elasticflow.runtime.own_loop.source import Source
from elasticflow.runtime.snapshot.snapshots import Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training.evaluation import Evaluation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    from elasticflow.runtime.data.order.order import Order
    from elasticflow.runtime.hooks.hooks import Hooks
    from elasticflow.runtime.own_loop.batch import Batch


class Run(Loop):
    """A run that this process takes part in, as `elasticflow.join` returned it.

    All ranks call the same methods in the same order. A method that says so is a collective: it returns once every
    rank has called it.

    Attributes:
        rank: Of this process, from 0.
        local_rank: Among those on its machine.
        world_size: Number of processes.
        device: Where the model and the batches are: a GPU of this rank's own, or the CPU.
        position: After the last finished step: `step`, `epoch` and `samples` count what is done, over all launches.
        is_finished: The loop has come to its end, and not only this launch: for what is to be done once, after it.
        worker: This process as a member of its group, and
        schedule: what positions mean: for the other objects of an entry point that the compiler writes.
    """

    def keep(self, **objects: Any) -> None:
        """Have snapshots hold *objects*, and give them the newest snapshot's state now. Collective: every rank, once.

        Models, optimizers, schedules, a GradScaler and an AveragedModel are known by their class; anything else needs
        `state_dict` and `load_state_dict`, and rank 0's counts. A model may be wrapped before or afterwards, by
        DistributedDataParallel and torch.compile. What the script has beside them that has a state, too, is named in a
        warning. Afterwards `position` says where the run goes on; every byte was verified, on every rank.

        Raises:
            StateError: no model or no optimizer is among them, an object has no state, or the snapshot is of others.
            SnapshotError: the store cannot be read.
        """
        if self._state is not None:
            raise StateError("run.keep was called a second time", "name everything in one call")
        worker = self.worker
        parts = kept.parts_by_name(objects) if self._is_job else kept.parts_of(objects)
        self._step = LoopStep(worker, self._gradients, parts)
        self._state = state = State(**parts)
        self._optimizers = state.optimizers
        if self._is_job:  # whose log names the rates as its one optimizer, or several, have them
            self._optimizers = parts["optimizers"] if "optimizers" in parts else parts["optimizer"]
        elif worker.rank == 0:
            frame = sys._getframe(1)  # noqa: SLF001  # the script's own variables, to name those that were forgotten
            for name, kind in kept.left_out(state, {**frame.f_globals, **frame.f_locals}).items():
                worker.event(events.STATE_LEFT_OUT, name=name, type=kind)
                self._tell(
                    f"no snapshot holds {name}, a {kind}: run.keep({name}={name}) if a step depends on it"
                )
        for optimizer in state.optimizers.values():
            # A schedule sets the rates of the next step before `step` is called.
            optimizer.register_step_post_hook(lambda *_: worker.progress.note_rates(self._optimizers))
        data = None if self._source is None else self._source.opened
        self._snapshots = Snapshots(
            worker, state, self._step, self.schedule, data, self._policy, self._compare_every
        )
        with EndsHereIfAsked(worker):
            self.position = self._snapshots.restore()
        if (restored := self._snapshots.restored) is not None:
            self._tell(f"goes on after step {self.position.step}, from snapshot {restored.name}")
        worker.phase("build")

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
    ) -> Iterator[Batch]:
        """Return this rank's part of each global batch, from `position` to the end. Collective: every rank, once.

        Every sample comes once per epoch, shuffled by the seed and the epoch, at any number of ranks and over all
        restarts. What is drawn at random while a sample is read, and while the model runs, follows from the seed, too.
        The loop ends early, after the same step on all ranks, where they were asked to leave: `is_finished` tells.
        Called before `keep`, it has a snapshot of other data refused before anything is restored.

        Args:
            dataset: With `__len__` and `__getitem__`; the same on every rank.
            size: Samples of a global batch; of a rank, its part. Need not divide by the number of ranks.
            epochs: Passes over the dataset; or
            steps: Steps of the whole run.
            tail: What becomes of samples at an epoch's end that fill no batch: "spill" (the batch goes on in the next
                epoch), "short" (a smaller batch) or "drop".
            num_workers: Loader processes of each rank; 0 reads in this process.
            collate: Makes a batch of a list of samples; None for torch's.
            micro_batch_size: Most samples that `gradients` gives its function at once; None: all of the rank's.
            order: Of the samples, another than by the seed (`runtime/data/samplers.py`).
            shards: Data shards of what `open_shards` returned; each is read in order, by one rank at a time.

        Raises:
            DatasetError: the data cannot be read by index, differs between ranks, or is not the snapshot's.
            StateError: `keep` was not called, or the loop left out `step`.
        """
        with EndsHereIfAsked(self.worker):
            self._source = source = Source(
                self.worker, dataset, self._gradients, {"num_workers": num_workers, "collate": collate},
                micro_batch_size=micro_batch_size, size=size, order=order, shards=shards,
                epochs=epochs, steps=steps, tail=tail,
            )  # fmt: skip
            self.schedule.steps = source.schedule
            if self._snapshots is not None:
                self._snapshots.use_data(source.opened)
                if self._snapshots.restored is None:
                    self.position = self.schedule.start
                self._begin()
        return self._loop(source)

    def gradients(self, fn: Callable[[Batch], Any], batch: Batch) -> float:
        """Leave the global batch's gradients in the parameters; return its mean loss. Collective: every rank.

        With virtual shards the same bits at any number of ranks: the batch is cut into them, *fn* is called with one
        after the other, and what they give is added up in a fixed order. Else DistributedDataParallel adds up what *fn*
        gives for each micro-batch. Nothing else exchanges gradients: the model is called bare. Where *fn* raised
        StopTraining, or a rank was asked to leave, this process ends as by `finish`, and the step changes nothing.

        Args:
            fn: Takes a `Batch` and returns its mean loss, or a pair of the sum of its losses and what to divide the
                global batch's by. Called for each part of this rank.
            batch: As `batches` yielded it.

        Raises:
            NonFiniteLossError: the loss is not finite, on every rank.
            StateError: the run was not told how to make gradients, or an operation has no deterministic form here.
        """
        if self._step is None or batch.shards is None:
            raise StateError(
                "run.gradients needs virtual shards, by whose sums the bits are the same at any number of workers",
                "elasticflow.join(virtual_shards=16): at least as many as there will ever be workers; "
                "without them elasticflow.join(gradients=elasticflow.Gradients())",
            )
        loss = self._step.forward_backward(fn, batch.shards)
        if self.worker.stopped is not None:  # raised in *fn*: this step changes nothing
            self._end()
        return loss

    def log(self, **scalars: Any) -> None:
        """Have the step's line in metrics.jsonl, the console and the sinks say *scalars*, before `step`.

        Each is a number or a tensor without dimensions, a mean over this rank's samples; the line says the mean over
        the global batch.

        Raises:
            StateError: in a run whose gradients `gradients` makes: what it calls returns them, beside its loss.
            StepResultError: a scalar cannot have its name, or they are too many.
        """
        if self._gradients is not None:
            raise StateError(
                "run.log does not know over which part of the batch a scalar is a mean",
                'return it beside the loss from the function that run.gradients calls: {"loss": loss, "name": value}',
            )
        self._ballot.note(scalars)

    def step(self, *, loss: Any = None, samples: int | None = None) -> None:
        """Finish a step: report it, take a snapshot if one is due, and learn whether all are to leave. Collective.

        An `Evaluation` that was kept, and hooks, have their turn before the snapshot, if it is due.
        Called by every rank at the end of each pass through the loop, when optimizer and schedule have moved. What
        ranks tell each other travels every tenth of a second, so quick steps wait neither for a GPU nor for each other here.

        Args:
            loss: Mean over this rank's samples, a number or a tensor of one element; reported as the mean over all ranks.
            samples: Of this rank, where the script reads its data itself, without `batches`: which samples come after a
                restart is its own business then.

        Raises:
            StateError: a snapshot would leave out what training changes; named.
            SnapshotError: the snapshot writer has failed.
        """
        worker, snapshots, state = self.worker, *self._kept("step")
        batch, self._batch = self._batch, None
        if batch is None and self.schedule.steps is not None:
            raise StateError("run.step was called twice in one pass through the loop", MISSING)
        if batch is None and samples is None:
            raise StateError(
                "run.step does not know how many samples this step had",
                "run.step(loss=loss, samples=len(inputs)) where the script reads its data itself",
            )
        if not self._is_training:
            snapshots.use_data(OpenedDataset(None))
            self._begin()
            if self.rank == 0:
                worker.event(events.DATA_OWN, kept=kept.own_objects(state))
        if self._gradients is not None and batch is not None:  # by which all have told each other everything
            self._finish_step(batch.end, math.nan if loss is None else float(loss))
        else:
            self._tell_step(loss, batch, int(samples or 0))
        if self._hooks is not None:
            self._hooks.after_step(self.position)
        if state.evaluation is not None:
            state.evaluation.after_step(self.position)
        snapshots.after_step(self.position)
        if worker.should_leave:
            reasons = worker.gather_text(self._why_stop or "")
            self._why_stop = next(filter(None, reasons), None)
            if self._why_stop is not None:
                worker.vote.leave_wanted = False  # what follows the loop is not cut short
            snapshots.finish(self.position)

    def evaluate(
        self,
        dataset: Any,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        name: str = "",
        model: nn.Module | None = None,
        size: int = 256,
        samples: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Return the means of *loss* and *metrics* over *dataset*, each sample once at any number of ranks. Collective.

        They are the run's metrics at `position`, as an evaluation of the job file has them. The model is in evaluation
        mode meanwhile, and no gradients are made. Where all ranks were asked to leave, this process ends as by `finish`.

        Args:
            dataset: With `__len__` and `__getitem__`, of pairs of input and target; the same on every rank.
            loss: Takes outputs and targets, and returns their mean.
            metrics: By name: takes outputs and targets and returns a mean over them, or a class whose objects have
                `update(outputs, targets)` and `compute()`. Without *loss* a function takes the model and a batch.
            name: Of the set, before the names of its metrics: `val` makes `val.accuracy`.
            model: What is measured; None: the model that was kept.
            size: Samples of a batch.
            samples: Most that are measured, always the same ones; None: all.
            collate: Makes a batch of a list of samples; None for torch's.

        Raises:
            DatasetError: the data cannot be read by index, or differs between ranks.
        """
        worker, _, state = self.worker, *self._kept("evaluate")
        self._ballot.meet()
        opened = index_loader.open_dataset(
            worker, lambda: dataset, name or "evaluation", given_to="run.evaluate"
        )
        evaluation = Evaluation(
            worker, kept.bare(model) if model is not None else state.model,
            None if loss is None else lambda model, batch: loss(model(batch[0]), batch[1]),
            opened, self.schedule, metrics=metrics, batch_size=size, samples=samples, collate=collate,
        )  # fmt: skip
        measured = several.run_sets(worker, {name: evaluation}, self.position, ranked=None, stop_when=None)
        if measured is None:
            self._end()
        return {key.removeprefix(f"{name}."): value for key, value in measured.items()}

    def call(self, hooks: Hooks) -> None:
        """Have *hooks* called when training begins and after each step, before `batches` and `keep`."""
        self._hooks = hooks

    def stop(self, reason: str) -> None:
        """End training on all ranks, and count as finished; called by any rank before `step`.

        The loop ends after the same step everywhere, a tenth of a second later at most.
        """
        self._why_stop = reason
        self.worker.vote.leave_wanted = True

    def finish(self) -> NoReturn:
        """Take the last snapshot, wait until it is committed, and end this process. Collective: every rank, last of all.

        The run counts as finished if the loop has come to its end, else as interrupted (exit code 75 under plain python):
        the same command goes on. What is registered with `atexit` is called before.

        Raises:
            SnapshotError: the last snapshot could not be written.
        """
        self._kept("finish")
        self._end()
