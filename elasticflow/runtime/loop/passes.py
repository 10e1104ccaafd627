"""One pass through the script's loop: its batch, the optimizers that moved in it, and whether it left the loop.

A snapshot holds the state after whole steps. So a pass that moved the optimizer has to end with `Run.step`, a pass that
only accumulated gradients belongs to the step in which the optimizer moves, and a pass that moved nothing can be left out.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.nn.utils.prune import is_pruned

from elasticflow.errors import StateError
from elasticflow.runtime.loop.carried_gradients import CarriedGradients, GradientsOfRun
from elasticflow.runtime.loop.kept import is_scaler
from elasticflow.runtime.loop.movers import Movers
from elasticflow.runtime.process.torch_private import has_gathered_gradients, version_of
from elasticflow.runtime.state.loading import prune_again
from elasticflow.runtime.training.several_optimizers import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from elasticflow.runtime.loop.batch import Batch
    from elasticflow.runtime.state.state import State

MISSING = "call run.step(loss=loss) once at the end of each pass through the loop"


class Pass:
    """The pass that is under way. Every rank has one.

    Attributes:
        batch: The script's batch; None between two passes, and where it reads its data itself.
        is_left: The loop was left by break or by an exception.
        has_moved: An optimizer moved since the last `settle`.
    """

    def __init__(self) -> None:
        self.batch: Batch | None = None
        self.is_left = self.has_moved = False
        self._has_settled = self._was_pending = self._has_gradients = False
        self._carried: CarriedGradients | GradientsOfRun | None = None
        self._buffers: list[Tensor] = []
        self._pruned: nn.Module | None = None
        self._parameters: Callable[[], Iterable[Tensor]] = tuple
        self._sharded_modules: Sequence[Any] = ()
        self._scalers: Sequence[Any] = ()
        self._movers: Movers | None = None
        self._scale_version = 0
        # As the open pass began; None: none is open.
        self._buffer_versions: int | None = None

    def watch(self, state: State, *, computes_gradients: bool = True) -> None:
        """Notice from now on when an optimizer moves, and when buffers of the model change.

        Args:
            computes_gradients: The script computes gradients itself; else `Run.gradients` does.
        """
        owners = list(state.optimizers.values())
        self._buffers = list(state.model.buffers())
        self._pruned = state.model if is_pruned(state.model) else None
        self._scalers = [each for each in state.objects.values() if is_scaler(each)]
        self._parameters = lambda: parameters_of(owners)
        self._sharded_modules = state.sharded_modules
        for optimizer in owners:
            optimizer.register_step_post_hook(self._note_move)
        self._carried = (CarriedGradients if computes_gradients else GradientsOfRun)(state.optimizers)
        self._movers = Movers(state)

    def open(self, batch: Batch) -> None:
        """Begin the pass of *batch*.

        Raises:
            StateError: an optimizer moved after `Run.step`, or before the loop.
        """
        if self.has_moved and not self._has_settled:
            raise StateError(
                "an optimizer moved between run.keep and the first pass of the loop, in steps that are not the run's",
                "a search for the learning rate and other steps of that kind come before run.keep",
            )
        self.require_still(batch.end.step - 1)
        self.batch, self._has_gradients = batch, False
        self._buffer_versions = self._sum_of_versions()

    def require_still(self, step: int) -> None:
        """Make sure that no optimizer moved after `Run.step` of *step*, which has counted the pass.

        Raises:
            StateError: an optimizer moved.
        """
        if self.has_moved:
            raise _moved_late(step)

    def close(self) -> Batch | None:
        """End the pass at `Run.step`; return its batch."""
        batch, self.batch = self.batch, None
        # A script that reads its data itself may have begun the next pass whenever it calls.
        self._buffer_versions = self._sum_of_versions() if batch is None else None
        return batch

    def require_kept(self) -> None:
        """Look at the optimizers that moved in this pass, at its end.

        Raises:
            StateError: an optimizer was not kept, or moved nothing of the model; the message names it.
        """
        if self._movers is not None:
            self._movers.require_kept()

    def settle(self, *, is_pending: bool) -> None:
        """Begin to notice anew: the step that was just finished holds all that moved until now.

        Args:
            is_pending: The step belongs to a pass that only accumulated gradients, and no optimizer has moved since.
        """
        if self._carried is not None and not is_pending:
            self._carried.end_step()
        self.has_moved, self._has_settled, self._was_pending = False, True, is_pending
        self._scale_version = self._version_of_scale()
        if self._pruned is not None:
            # As a restart does, for code that reads the weights before the next forward.
            prune_again(self._pruned)

    def is_pending(self) -> bool:
        """Return True if this pass added to gradients that no optimizer has used yet.

        A pass that a GradScaler skipped, because of an overflow, is not pending: it lowers the scale instead of moving.
        """
        if self.has_moved or self._version_of_scale() != self._scale_version:
            return False
        return any(parameter.grad is not None for parameter in self._parameters()) or any(
            map(has_gathered_gradients, self._sharded_modules)
        )

    @property
    def holds_gradients(self) -> bool:
        """True if the last finished pass only accumulated gradients, and no optimizer has moved since."""
        return self._was_pending and not self.has_moved

    @property
    def is_between_steps(self) -> bool:
        """True if the state is now that of whole steps, so that a snapshot may hold it, and a restart repeats the open pass, if any."""
        return not (self.has_moved or self._was_pending or self._have_buffers_changed())

    @property
    def is_closed(self) -> bool:
        """True if no pass is under way, and no optimizer has moved since the last one, but for gradients that it had left."""
        moved_late = self.has_moved and self._has_settled and not self._was_pending
        return self.batch is None and not moved_late

    def require_closed(self, step: int) -> None:
        """Make sure that the loop may end here: the open pass, if any, has moved nothing and is left out as a whole.

        Raises:
            StateError: the pass moved the optimizer or changed buffers without a call of `Run.step`, or the optimizer moved after
                the loop.
        """
        batch = self.batch
        if self.is_closed:
            return
        if batch is None:
            raise _moved_late(step)
        moved = "the optimizer moved" if self.has_moved else None
        if moved is None and self._have_buffers_changed():
            moved = "the model's buffers changed, as BatchNorm's do in a forward pass"
        if moved is not None:
            raise StateError(
                f"step {batch.end.step} was begun and not finished: {moved}, and run.step was not called, so that a snapshot "
                f"would count that batch as not learned from",
                "call run.step before the loop is left; this run resumes from its newest snapshot",
            )

    def note_gradients(self) -> None:
        """Note that `Run.gradients` reads the samples of this pass.

        Raises:
            StateError: it has read them.
        """
        if self._has_gradients:
            raise StateError(
                "run.gradients was called a second time in one pass, and the samples of a batch are read once",
                "let the function return the sum of the losses; where several optimizers move one after the other, "
                "join(gradients=elasticflow.Gradients(moves_optimizers=True)) and a function that moves them",
            )
        self._has_gradients = True

    def adding_gradients(self) -> AbstractContextManager[None]:
        """Return the context in which `Run.gradients` makes gradients; see `GradientsOfRun.adding`."""
        return self._carried.adding() if isinstance(self._carried, GradientsOfRun) else nullcontext()

    def _note_move(self, *_: object) -> None:
        self.has_moved = True

    def _have_buffers_changed(self) -> bool:
        return self._buffer_versions is not None and self._sum_of_versions() != self._buffer_versions

    def _sum_of_versions(self) -> int:
        return sum(map(version_of, self._buffers))

    def _version_of_scale(self) -> int:
        scales = (getattr(scaler, "_scale", None) for scaler in self._scalers)
        return sum(version_of(scale) for scale in scales if scale is not None)


def _moved_late(step: int) -> StateError:
    return StateError(
        f"an optimizer moved after run.step of step {step}, which has counted that pass without the update",
        "call optimizer.step() before run.step: run.step comes last in each pass",
    )


class Batches:
    """One loop over the run's batches, as `Run.batches` returns it.

    A `for` loop holds the only reference to its iterator, so that `break` ends that iterator at once: the run knows then
    that the loop was left.
    """

    def __init__(self, begin: Callable[[], Iterator[Batch]]) -> None:
        self._begin: Callable[[], Iterator[Batch]] | None = begin
        self._held: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        begin, self._begin = self._begin, None
        if begin is None:
            raise StateError(
                "a second loop over the same run.batches(...): its batches come once",
                "keep everything in one loop; for epoch in run.epochs(n): for batch in run.batches(...) goes through epochs",
            )
        return begin()

    def __next__(self) -> Batch:
        if self._held is None:
            self._held = iter(self)
        return next(self._held)
