"""What `elasticflow.join` returns: a run whose training loop is the script's own, and survives what happens to it."""

from __future__ import annotations

import atexit
import math
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from elasticflow import events
from elasticflow.errors import StateError
from elasticflow.runtime import worker as life
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.evaluation import several
from elasticflow.runtime.own_loop import kept, reading
from elasticflow.runtime.own_loop.ballot import Ballot
from elasticflow.runtime.own_loop.exact_steps import ScriptExactStep, ScriptStep
from elasticflow.runtime.own_loop.leaving import EndsHereIfAsked
from elasticflow.runtime.own_loop.loop_schedule import LoopSchedule, after_own_step
from elasticflow.runtime.snapshot.snapshots import Policy, Snapshots
from elasticflow.runtime.training.evaluation import Evaluation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from torch import nn

    from elasticflow.runtime.data.index_loader import Batch as OwnPart
    from elasticflow.runtime.own_loop.batch import Batch
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.process.step_log import LateNumber
    from elasticflow.runtime.state.state import State

_MISSING = "call run.step(loss=loss) once at the end of each pass through the loop"


class Run:
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
    """

    def __init__(self, worker: Worker, policy: Policy, *, virtual_shards: int | None, log_every: int) -> None:
        self._worker, self._policy = worker, policy
        self._virtual_shards, self._log_every = virtual_shards, log_every
        self.rank, self.local_rank, self.world_size = worker.rank, worker.local_rank, worker.world_size
        self.device: torch.device = worker.device
        # A rank that is asked to leave takes part in its steps until all have agreed.
        worker.vote.may_skip = False
        self._ballot = Ballot(worker)
        self._schedule = LoopSchedule()
        self.position: Position = self._schedule.start
        self._state: State | None = None
        self._snapshots: Snapshots | None = None
        self._batch: Batch | None = None
        self._exact: ScriptExactStep | None = None
        self._is_training = self._is_over = False
        self._why_stop: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the loop has come to its end."""
        has_stopped = self._worker.should_leave and self._why_stop is not None
        return has_stopped or self._schedule.is_end(self.position)

    @property
    def should_leave(self) -> bool:
        """Whether all ranks have agreed, in the last `step`, to make no further one: a loop of `batches` ends by itself."""
        return self._worker.should_leave

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
        worker = self._worker
        self._state = state = kept.state_of(objects)
        if worker.rank == 0:
            frame = sys._getframe(1)  # noqa: SLF001  # the script's own variables, to name those that were forgotten
            for name, kind in kept.left_out(state, {**frame.f_globals, **frame.f_locals}).items():
                worker.event(events.STATE_LEFT_OUT, name=name, type=kind)
                self._tell(
                    f"no snapshot holds {name}, a {kind}: run.keep({name}={name}) if a step depends on it"
                )
        for optimizer in state.optimizers.values():
            # A schedule sets the rates of the next step before `step` is called.
            optimizer.register_step_post_hook(lambda *_: worker.progress.note_rates(state.optimizers))
        step = ScriptStep(is_exact=self._virtual_shards is not None)
        self._snapshots = Snapshots(worker, state, step, self._schedule, None, self._policy)  # type: ignore[arg-type]
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
    ) -> Iterator[Batch]:
        """Yield this rank's part of each global batch, from `position` to the end. Collective: every rank, once.

        Every sample comes once per epoch, shuffled by the seed and the epoch, at any number of ranks and over all
        restarts. What is drawn at random while a sample is read, and while the model runs, follows from the seed, too.
        The loop ends early, after the same step on all ranks, where they were asked to leave: `is_finished` tells.

        Args:
            dataset: With `__len__` and `__getitem__`; the same on every rank.
            size: Samples of a global batch; of a rank, its part. Need not divide by the number of ranks.
            epochs: Passes over the dataset; or
            steps: Steps of the whole run.
            tail: What becomes of samples at an epoch's end that fill no batch: "spill" (the batch goes on in the next
                epoch), "short" (a smaller batch) or "drop".
            num_workers: Loader processes of each rank; 0 reads in this process.
            collate: Makes a batch of a list of samples; None for torch's.

        Raises:
            DatasetError: the data cannot be read by index, differs between ranks, or is not the snapshot's.
            StateError: `keep` was not called, or the loop left out `step`.
        """
        worker, snapshots, state = self._worker, *self._kept("batches")
        with EndsHereIfAsked(worker):
            opened = index_loader.open_dataset(worker, lambda: dataset, "train")
            self._schedule.steps = IndexSchedule(
                len(opened), size, epochs=epochs, steps=steps, tail=tail, seed=worker.seed
            )
            snapshots.use_data(opened)
            if self._virtual_shards is not None:
                self._exact = ScriptExactStep(worker, state.model, self._virtual_shards)
            self._begin()
        loader = index_loader.IndexLoader(
            worker, opened, self._schedule.steps, None, num_workers=num_workers, collate=collate,
            virtual_shards=self._virtual_shards,
        )  # fmt: skip
        if self._virtual_shards is not None:
            return self._loop(loader, reading.in_shards)
        return self._loop(loader, reading.Reader(worker, opened, self._schedule.steps, collate).batch)

    def gradients(self, fn: Callable[[Batch], Any], batch: Batch) -> float:
        """Leave the global batch's gradients in the parameters; return its mean loss. Collective: every rank.

        The same bits at any number of ranks: the batch is cut into the run's virtual shards, *fn* is called with one
        after the other, and what they give is added up in a fixed order. Nothing else exchanges gradients: the model is
        called bare.

        Args:
            fn: Takes a `Batch` and returns its mean loss, or a pair of the sum of its losses and what to divide the
                global batch's by. Called for each shard of this rank.
            batch: As `batches` yielded it.

        Raises:
            NonFiniteLossError: the loss is not finite, on every rank.
            StateError: the run has no virtual shards, or an operation has no deterministic form here.
        """
        if self._exact is None or batch.shards is None:
            raise StateError(
                "run.gradients needs virtual shards, by whose sums the bits are the same at any number of workers",
                "elasticflow.join(virtual_shards=16): at least as many as there will ever be workers",
            )
        loss = self._exact.forward_backward(fn, batch.shards)
        if self._worker.stopped is not None:  # raised in *fn*: this step changes nothing
            self._end()
        return loss

    def log(self, **scalars: Any) -> None:
        """Have the step's line in metrics.jsonl, the console and the sinks say *scalars*, before `step`.

        Each is a number or a tensor without dimensions, a mean over this rank's samples; the line says the mean over
        the global batch.

        Raises:
            StateError: in a run with virtual shards: what `gradients` calls returns them, beside its loss.
            StepResultError: a scalar cannot have its name, or they are too many.
        """
        if self._virtual_shards is not None:
            raise StateError(
                "run.log does not know over which shard a scalar is a mean",
                'return it beside the loss from the function that run.gradients calls: {"loss": loss, "name": value}',
            )
        self._ballot.note(scalars)

    def step(self, *, loss: Any = None, samples: int | None = None) -> None:
        """Finish a step: report it, take a snapshot if one is due, and learn whether all are to leave. Collective.

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
        worker, snapshots, state = self._worker, *self._kept("step")
        batch, self._batch = self._batch, None
        if batch is None and self._schedule.steps is not None:
            raise StateError("run.step was called twice in one pass through the loop", _MISSING)
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
        if self._exact is not None and batch is not None:  # who told each other everything by the gradients
            self._finish_step(batch.end, math.nan if loss is None else float(loss))
        else:
            self._tell_step(loss, batch, int(samples or 0))
        snapshots.after_step(self.position)
        if worker.should_leave:
            reasons = worker.gather_text(self._why_stop or "")
            self._why_stop = next(filter(None, reasons), None)
            if self._why_stop is not None:
                worker.vote.leave_wanted = False  # what follows the loop is not cut short
            snapshots.finish(self.position)

    def _tell_step(self, loss: Any, batch: Batch | None, samples: int) -> None:
        """Report a step whose gradients say nothing to other ranks, and tell them if it is time to."""
        worker, snapshots, _ = self._worker, *self._kept("step")
        mean, scalars = self._ballot.add(loss, samples if batch is None else batch.samples)
        worker.progress.note_step(0, scalars)
        if batch is None:
            self._finish_step(after_own_step(self.position, self._ballot.meet()), mean)
            return
        # What is recorded, or held, after each step is of a step that is told.
        is_now = worker.trajectory_recorder is not None or snapshots.is_due(batch.end)
        if is_now or self._ballot.is_full or self._schedule.is_end(batch.end):
            self._ballot.meet()
        self._finish_step(batch.end, mean)

    def _finish_step(self, position: Position, loss: float | LateNumber) -> None:
        _, state = self._kept("step")
        self.position = position
        self._worker.log_step(position, loss, state.optimizers)

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
        worker, _, state = self._worker, *self._kept("evaluate")
        self._ballot.meet()
        opened = index_loader.open_dataset(worker, lambda: dataset, name or "evaluation")
        evaluation = Evaluation(
            worker, kept.bare(model) if model is not None else state.model,
            None if loss is None else lambda model, batch: loss(model(batch[0]), batch[1]),
            opened, self._schedule, metrics=metrics, batch_size=size, samples=samples, collate=collate,
        )  # fmt: skip
        measured = several.run_sets(worker, {name: evaluation}, self.position, ranked=None, stop_when=None)
        if measured is None:
            self._end()
        return {key.removeprefix(f"{name}."): value for key, value in measured.items()}

    def stop(self, reason: str) -> None:
        """End training on all ranks, and count as finished; called by any rank before `step`.

        The loop ends after the same step everywhere, a tenth of a second later at most.
        """
        self._why_stop = reason
        self._worker.vote.leave_wanted = True

    def finish(self) -> NoReturn:
        """Take the last snapshot, wait until it is committed, and end this process. Collective: every rank, last of all.

        The run counts as finished if the loop has come to its end, else as interrupted (exit code 75 under plain python):
        the same command goes on. What is registered with `atexit` is called before.

        Raises:
            SnapshotError: the last snapshot could not be written.
        """
        self._kept("finish")
        self._end()

    def _tell(self, text: str) -> None:
        """Say on standard error what nobody else would: no supervisor follows the log."""
        if self.rank == 0 and self._worker.identity.started_by != "launcher":
            sys.stderr.write(f"elasticflow: {text}\n")
            sys.stderr.flush()

    def _catalog_uri(self) -> str:
        return self._policy.uri or os.path.relpath(self._worker.run_folder.path)

    def _kept(self, caller: str) -> tuple[Snapshots, State]:
        if self._snapshots is None or self._state is None:
            raise StateError(
                f"run.{caller} was called before run.keep",
                "run.keep(model=model, optimizer=optimizer) says what a run goes on with",
            )
        return self._snapshots, self._state

    def _begin(self) -> None:
        worker, snapshots, state = self._worker, *self._kept("step")
        was_training = state.model.training
        worker.start_training(
            self.position, self._schedule, state.model, restored=snapshots.restored, log_every=self._log_every
        )
        state.model.train(was_training)
        self._is_training = True

    def _loop(
        self, loader: index_loader.IndexLoader, batch_of: Callable[[OwnPart], Batch]
    ) -> Iterator[Batch]:
        for part in loader.batches(self.position):
            self._batch = batch = batch_of(part)
            if part.model_keys:
                self._worker.generators.seed_model(part.model_keys[0])
            yield batch
            if self._batch is not None:
                raise StateError(f"run.step was not called in step {part.end.step}", _MISSING)
            if self._worker.should_leave:
                return

    def _end(self) -> NoReturn:
        self._is_over = True
        worker, snapshots, _ = self._worker, *self._kept("finish")
        self._ballot.meet()
        if not worker.should_leave:
            self._schedule.has_ended = True
        snapshots.finish(self.position)
        done = f"after step {self.position.step}, snapshots in {self._catalog_uri()}"
        self._tell(f"finished {done}" if self.is_finished else f"leaves {done}: the same command goes on")
        if worker.should_leave and self._why_stop is not None:
            worker.vote.stop_wanted = self._why_stop
        worker.at_leave.append(atexit._run_exitfuncs)  # noqa: SLF001  # wandb and others end there
        life.leave(worker, self.position, self._schedule)

    def end_if_forgotten(self) -> None:
        """Do what `finish` does, where the script has ended without it and its loop was over; else nothing."""
        loop_is_over = self._is_training and (
            self._worker.should_leave or self._schedule.is_end(self.position)
        )
        if not self._is_over and loop_is_over and self._batch is None:
            self._end()
