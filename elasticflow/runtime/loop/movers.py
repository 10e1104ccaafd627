"""Finds optimizers that move in a script's steps and were not given to `run.keep`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elasticflow.errors import StateError
from elasticflow.runtime.process.torch_private import version_of
from elasticflow.runtime.training.several_optimizers import parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.runtime.state.state import State

_REMEDY = "make models and optimizers once, before run.keep, and give it all of them: run.keep(model=model, optimizer=optimizer)"
_BOUND_ANEW = "made anew after run.keep"


class _Other(NamedTuple):
    """A step of an optimizer that was not kept."""

    kind: str
    moves_model: bool
    has_state: bool
    is_alike: bool


class Movers:
    """Sees each optimizer of this process that takes a step."""

    def __init__(self, state: State) -> None:
        self._model, self._optimizers = state.model, state.optimizers
        self._kept = {id(each) for optimizer in state.optimizers.values() for each in _with_inner(optimizer)}
        modules = [value for value in state.objects.values() if isinstance(value, nn.Module)]
        moved = {id(p) for p in parameters_of(state.optimizers.values())}
        self._trained = moved | {id(p) for module in modules for p in module.parameters()}
        # The parameters live as long as the optimizers, so that an `id` stays theirs.
        self._names = {id(p): name for name, p in state.model.named_parameters() if id(p) in moved}
        self._shapes = [[p.shape for p in parameters_of([each])] for each in state.optimizers.values()]
        self._depth = 0
        self._has_moved = self._has_gradient = self._is_settled = False
        self._others: set[_Other] = set()
        self._versions_before = self._versions()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def require_kept(self) -> None:
        """Look at what moved since the last call: at the end of each pass through the loop.

        Raises:
            StateError: an optimizer moved that is not kept, or a kept optimizer moved nothing of the model; the message names it.
        """
        self._depth = 0
        others, self._others = self._others, set()
        for other in others:
            self._require_harmless(other)
        if not self._has_moved:
            self._versions_before = self._versions()
        elif not self._is_settled:
            self._require_whole()
            self._is_settled = True

    def _versions(self) -> int:
        return sum(version_of(parameter) for parameter in self._model.parameters())

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in self._kept:
            self._depth += 1
            self._note_gradients(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in self._kept:
            self._depth = max(0, self._depth - 1)
            self._has_moved = True
            self._note_gradients(optimizer)
        elif not self._depth:
            kind, parameters = type(optimizer), list(parameters_of([optimizer]))
            moves_model = any(id(p) in self._trained for p in parameters)
            is_alike = [p.shape for p in parameters] in self._shapes
            name = f"{kind.__module__}.{kind.__qualname__}"
            self._others.add(_Other(name, moves_model, bool(optimizer.state), is_alike))

    def _note_gradients(self, optimizer: Optimizer) -> None:
        if not self._has_gradient:
            self._has_gradient = any(p.grad is not None for p in parameters_of([optimizer]))

    def _require_harmless(self, other: _Other) -> None:
        # An optimizer without state, made for some steps only, holds nothing that a restart would lose.
        if other.moves_model and (other.has_state or not self._has_moved):
            raise StateError(
                f"the model is moved by an optimizer that run.keep was not given, a {other.kind}: no snapshot holds its state",
                _REMEDY,
            )
        # A script that writes the kept model's weights itself, as federated averaging does, has not made it anew.
        is_alone = not other.moves_model and not self._has_moved and self._versions() == self._versions_before
        if other.is_alike and is_alone:
            raise StateError(
                f"the kept optimizer did not move, and another one did, a {other.kind}, on parameters of the same shapes: "
                f"model and optimizer were {_BOUND_ANEW}",
                _REMEDY,
            )

    def _require_whole(self) -> None:
        now = {id(p) for p in self._model.parameters()}
        gone = [name for number, name in self._names.items() if number not in now]
        if gone:
            raise StateError(
                f"model.{gone[0]} was replaced after run.keep, and the kept optimizer moves the parameter that was there",
                f"assign its values in place, as by parameter.data.copy_(...), or {_REMEDY}",
            )
        if not self._has_gradient:
            names = " and ".join(self._optimizers)
            raise StateError(
                f"the kept {names} took a step, and no parameter of the kept model had a gradient: the model was {_BOUND_ANEW}",
                _REMEDY,
            )


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield an optimizer and those that it holds, as a lookahead does."""
    waiting: deque[Any] = deque([optimizer])
    seen: set[int] = set()
    while waiting:
        value = waiting.popleft()
        if isinstance(value, Optimizer) and id(value) not in seen:
            seen.add(id(value))
            yield value
            for held in vars(value).values():
                several = held.values() if isinstance(held, Mapping) else held
                waiting.extend([held] if not isinstance(held, Mapping | list | tuple) else list(several))
