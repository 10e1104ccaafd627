"""One pass through the script's loop: its batch, the optimizers that moved in it, and whether it left the loop.

A snapshot holds the state after whole steps. So a pass that moved the optimizer has to end with `Run.step`, a pass that
only accumulated gradients belongs to the step in which the optimizer moves, and a pass that moved nothing can be left out.

No snapshot holds gradients. So an optimizer's move by those of a step that is over is refused: one optimizer adds up over four
passes while another one moves in each, or no `zero_grad` removed the gradients. Gradients may also be removed before use: a GAN's
generator leaves some in the discriminator. So nothing is refused before an optimizer moves.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.utils.prune import is_pruned

from elasticflow.errors import StateError
from elasticflow.runtime.loop.kept import is_scaler
from elasticflow.runtime.loop.movers import Movers
from elasticflow.runtime.process.sharded_tensors import is_sharded
from elasticflow.runtime.process.torch_private import has_gathered_gradients, version_of
from elasticflow.runtime.state.loading import prune_again
from elasticflow.runtime.training.several_optimizers import parameters_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

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


# Moves of an optimizer in each launch that are looked at: a loop that carries gradients does so from the beginning.
_MOVES = 3


class GradientsOfRun:
    """Adds up the gradients of `Run.gradients` until an optimizer uses them. Every rank."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._optimizers = optimizers
        # `id` of the parameters whose gradients no optimizer has used, and of those among them whose gradients are of a step that is over.
        self._unused: set[int] = set()
        self._carried: set[int] = set()
        # `id` of the parameters whose gradients were added to used ones, or to those of a backward of the script.
        self._mixed: set[int] = set()
        self._looks_left = _MOVES
        for name, optimizer in optimizers.items():
            optimizer.register_step_pre_hook(partial(self._before_move, name))

    def end_step(self) -> None:
        """Note that `Run.step` has ended a step in which an optimizer moved."""
        self._carried = set(self._unused)

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Within, gradients are made: they are added to those that no optimizer has used yet, as a backward does.

        The code within does not see the earlier ones: it overwrites gradients, or divides them by the number of its own items. Others,
        used ones and those of a backward of the script, are refused once an optimizer moves by them: a critic's may be removed before.
        """
        others = self._others()
        left = [
            (p, p.grad.detach().clone())
            for p in parameters_of(self._optimizers.values())
            if p.grad is not None and id(p) in self._unused
        ]
        if self._carried or self._mixed:
            there = {id(parameter) for parameter, gradient in left if gradient.any()}
            self._carried &= there
            self._mixed &= there
        for parameter, _ in (*left, *others):
            parameter.grad = None
        yield
        for parameter, gradient in left:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._unused = {id(p) for p in parameters_of(self._optimizers.values()) if p.grad is not None}
        self._mixed |= {id(parameter) for parameter, _ in others} & self._unused
        for parameter, gradient in others:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _others(self) -> list[tuple[Tensor, Tensor]]:
        """Return parameter and gradient where that is neither zero nor waiting for an optimizer; none after some looks."""
        if not self._looks_left:
            return []
        found = [
            (p, p.grad)
            for p in parameters_of(self._optimizers.values())
            if p.grad is not None and id(p) not in self._unused
        ]
        self._looks_left -= bool(found)
        return [(parameter, gradient.detach().clone()) for parameter, gradient in found if gradient.any()]

    def _before_move(self, name: str, optimizer: Optimizer, *_: object) -> None:
        if not self._unused:
            return
        moved = list(parameters_of([optimizer]))
        doubtful = self._carried | self._mixed
        there = {id(p) for p in moved if id(p) in doubtful and p.grad is not None and p.grad.any()}
        if there & self._mixed:
            raise StateError(
                f"run.gradients found gradients in the parameters of {name} that {name} has used already, or that a backward of the "
                "script has made: with virtual shards it would overwrite them, and add to them without",
                "call zero_grad() in each step, and return the whole loss from the function that run.gradients is given",
            )
        if there:
            raise _refusal(name)
        self._unused -= {id(p) for p in moved}


class CarriedGradients:
    """Looks at the first moves of each optimizer in a loop that computes gradients itself. Every rank.

    Gradients that no backward pass adds to the parameters, as those of `fully_shard` and of `torch.autograd.grad`, are not seen.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._probes = [_Probe(name, optimizer) for name, optimizer in optimizers.items()]

    def end_step(self) -> None:
        """Note that `Run.step` has ended a step in which an optimizer moved."""
        self._probes = [probe for probe in self._probes if probe.end_step()]


class _Probe:
    """One parameter of an optimizer: the first that a backward pass reaches, so that few gradients are read."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name, self._moves_left = name, _MOVES
        self._parameter: Tensor | None = None
        # Its gradient holds some of an earlier step; a backward pass of this step has added to it.
        self._is_carried = self._has_added = False
        self._at_end: tuple[Tensor, int] | None = None  # its gradient at the end of the last step
        self._hooks: list[RemovableHandle] = [
            p.register_hook(partial(self._before_adding, p))  # type: ignore[no-untyped-call]
            for p in parameters_of([optimizer])
            if p.requires_grad and not is_sharded(p)
        ]
        self._hooks.append(optimizer.register_step_pre_hook(self._before_move))

    def end_step(self) -> bool:
        """Note that a step is over; return True if some of the first moves are still to come."""
        if not self._moves_left:
            for hook in self._hooks:
                hook.remove()
            return False
        gradient = None if self._parameter is None else self._parameter.grad
        self._at_end = None if gradient is None else (gradient, version_of(gradient))
        self._has_added = False
        return True

    def _before_adding(self, parameter: Tensor, _: Tensor) -> None:
        if self._parameter is None:
            self._parameter = parameter
        if parameter is not self._parameter or not self._moves_left:
            return
        if parameter.grad is None or not parameter.grad.any():
            self._is_carried = False
        elif self._at_end is not None and not self._has_added:
            self._is_carried = True
        self._has_added = True

    def _before_move(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._parameter is None or not self._moves_left:
            return
        makes_gradients = len(args) > 1 or kwargs.get("closure") is not None  # within the move
        gradient = None if makes_gradients else self._parameter.grad
        if gradient is not None and (self._is_carried or self._is_left(gradient)) and gradient.any():
            raise _refusal(self._name)
        self._moves_left -= 1

    def _is_left(self, gradient: Tensor) -> bool:
        """Return True if *gradient* is as the last step left it."""
        at_end = None if self._has_added else self._at_end
        return at_end is not None and gradient is at_end[0] and version_of(gradient) == at_end[1]


def _refusal(name: str) -> StateError:
    return StateError(
        f"{name} moves by gradients of an earlier step, which run.step has ended: a snapshot between the two holds no gradients, "
        "and a restart would continue without them",
        "call zero_grad() in each step; where gradients are added up over several passes, let all optimizers move in the same "
        "passes, or use batch.parts(4) within one pass",
    )
