"""Refuses an optimizer's move by gradients of an earlier step, since no snapshot holds gradients.

A pass in which no optimizer moves belongs to the next step. But once an optimizer has moved, `Run.step` ends a step, a snapshot
may be taken, and a restart begins without gradients. It would lose what an optimizer adds up over four passes while another
optimizer moves in each, and gradients that no `zero_grad` removed.

Gradients may also be removed before use: a GAN's generator leaves some in the discriminator. So nothing is refused before an
optimizer moves.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from elasticflow.errors import StateError
from elasticflow.runtime.process.sharded_tensors import is_sharded, local_of
from elasticflow.runtime.process.torch_private import version_of
from elasticflow.runtime.training.several_optimizers import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

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
        left = [(p, grad.detach().clone()) for p, grad in self._with_gradients() if id(p) in self._unused]
        if self._carried or self._mixed:
            there = {id(parameter) for parameter, gradient in left if gradient.any()}
            self._carried &= there
            self._mixed &= there
        for parameter, _ in (*left, *others):
            parameter.grad = None
        # Not held: a gradient that is removed within is free at once, and a new one may get its `id`.
        before = {id(p): (ref(grad), version_of(local_of(grad))) for p, grad in self._with_gradients()}
        yield
        for parameter, gradient in left:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        # A backward of the script may have made the others, which are as they were.
        self._unused = {
            id(p) for p, grad in self._with_gradients() if not _is_as_marked(grad, before.get(id(p)))
        }
        self._mixed |= {id(parameter) for parameter, _ in others} & self._unused
        for parameter, gradient in others:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _with_gradients(self) -> list[tuple[Tensor, Tensor]]:
        return [(p, p.grad) for p in parameters_of(self._optimizers.values()) if p.grad is not None]

    def _others(self) -> list[tuple[Tensor, Tensor]]:
        """Return parameter and gradient where that is neither zero nor waiting for an optimizer; none after some looks."""
        if not self._looks_left:
            return []
        found = [(p, grad) for p, grad in self._with_gradients() if id(p) not in self._unused]
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


def _is_as_marked(gradient: Tensor, mark: tuple[ref[Tensor], int] | None) -> bool:
    return mark is not None and mark[0]() is gradient and version_of(local_of(gradient)) == mark[1]


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
