"""The parts of a job's state, each walked through again only when it changed.

A snapshot in memory may be due at every step of a few milliseconds, and `state_dict` of a small model takes as long
as copying it. What a module or an optimizer holds is the same from step to step: the same tensors over the same
memory. So those are looked at, and the walk is repeated when one of them is another.
"""

from __future__ import annotations

import marshal
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elasticflow.errors import StateError
from elasticflow.runtime.state.codec import Encoder
from elasticflow.runtime.state.copies import Copies
from elasticflow.runtime.state.tensors import identity_of
from elasticflow.runtime.torch_private import has_plain_state, state_hooks_of, tables_of

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, eq=False)
class Stock:
    """The tensors of a part.

    Attributes:
        tensors: Live tensors by key; packed scalars as they were when last refreshed.
        aliases: Tied tensors: key to the key that is stored.
        memory_formats: How tensors that are not contiguous lie.
        scalars: What packed tensors are made of, by key.
        frozen: Keys of parameters that take no gradient.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    memory_formats: dict[str, str]
    scalars: dict[str, list[Tensor]]
    frozen: frozenset[str] = frozenset()

    def refresh(self) -> None:
        """Pack the scalars anew."""
        self._packing.make()

    def places(self) -> tuple[Any, ...]:
        """Return where everything lies: of two stocks with the same places either may stand for the other."""
        tensors = {
            key: identity_of(tensor) for key, tensor in self.tensors.items() if key not in self.scalars
        }
        scalars = {key: list(map(identity_of, scalars)) for key, scalars in self.scalars.items()}
        return tensors, scalars, self.aliases, self.memory_formats

    @cached_property
    def _packing(self) -> Copies:
        return Copies(
            pair
            for key, scalars in self.scalars.items()
            for pair in zip(self.tensors[key].unbind(), scalars, strict=True)
        )


_NO_TENSORS = Stock({}, {}, {}, {})


def part_of(name: str, thing: Any) -> Part:
    """Return *thing* as a part of a job's state."""
    if isinstance(thing, nn.Module):
        return ModulePart(name, thing)
    return OptimizerPart(name, thing) if isinstance(thing, Optimizer) else Part(name, thing)


class Part:
    """Something with `state_dict` and `load_state_dict`, which is asked each time.

    Attributes:
        name: What it is called in snapshots and messages.
        thing: The object.
    """

    def __init__(self, name: str, thing: Any) -> None:
        self.name, self.thing = name, thing
        self._mark: bytes | None = None
        self._places: Any = None
        self._read: tuple[Any, Stock] | None = None

    def read(self) -> tuple[Any, Stock]:
        """Return its state now as JSON and tensors; the same objects as before as long as they say the same.

        Raises:
            StateError: it holds something that neither JSON nor safetensors can express; named.
        """
        state = self.thing.state_dict()
        mark = _mark_of(state)
        if self._read is None or mark is None or mark != self._mark:
            tree, stock = self._encode(state)
            places = stock.places()
            if self._read is not None and places == self._places:
                stock = self._read[1]
                stock.refresh()
            self._read, self._mark, self._places = (tree, stock), mark, places
        return self._read

    def _encode(self, value: Any, *, in_place: bool = False) -> tuple[Any, Stock]:
        encoder = Encoder(in_place=in_place)
        try:
            tree = encoder.encode(value, self.name)
        except RecursionError:
            raise StateError(f"{self.name} is nested too deeply, or holds itself") from None
        encoder.finish()
        if not encoder.tensors:
            return tree, _NO_TENSORS
        return tree, Stock(encoder.tensors, encoder.aliases, encoder.memory_formats, encoder.scalars)


class ModulePart(Part):
    """A module: walked through again when a parameter, buffer or submodule is another."""

    def __init__(self, name: str, thing: nn.Module) -> None:
        super().__init__(name, thing)
        self._tables: list[dict[Any, Any]] = []
        self._empty_tables: list[dict[Any, Any]] = []
        self._watch: Watch | None = None

    def read(self) -> tuple[Any, Stock]:
        """Return its state now; see `Part`."""
        if self._read is not None and self._watch is not None and self._watch.sees_the_same():
            self._read[1].refresh()
            return self._read
        modules = list(self.thing.modules())
        tables = [table for module in modules for table in tables_of(module)]
        self._tables = [table for table in tables if table]
        self._empty_tables = [table for table in tables if not table]
        tree, stock = self._encode(self.thing.state_dict(), in_place=True)
        frozen = {f"{self.name}/{key}" for key, p in self.thing.named_parameters() if not p.requires_grad}
        self._read = tree, replace(stock, frozen=frozenset(frozen & stock.tensors.keys()))
        is_plain = all(map(has_plain_state, modules))
        self._watch = Watch(self._things, _places_and_forms) if is_plain else None
        return self._read

    def _things(self) -> list[Any]:
        things: list[Any] = list(chain.from_iterable(map(dict.values, self._tables)))
        things.append(any(self._empty_tables))
        return things


class OptimizerPart(Part):
    """An optimizer: its options are read each time, its tensors walked through again when one is another."""

    def __init__(self, name: str, thing: Optimizer) -> None:
        super().__init__(name, thing)
        self._watch: Watch | None = None

    def read(self) -> tuple[Any, Stock]:
        """Return its state now; see `Part`."""
        if self._read is not None and self._watch is not None and self._watch.sees_the_same():
            tree, stock = self._read
            groups, of_groups = self._groups(tree["param_groups"])
            if not of_groups.tensors:
                stock.refresh()
                if groups is not tree["param_groups"]:
                    self._read = {**tree, "param_groups": groups}, stock
                return self._read
        tree, stock = self._encode(self.thing.state_dict())
        self._mark = None  # of the groups' options
        self._read = tree, replace(stock)  # one of its own: it stands for the groups, too
        self._watch = Watch(self._things, _places) if self._is_plain() else None
        return self._read

    def _groups(self, before: list[dict[str, Any]]) -> tuple[Any, Stock]:
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.thing.param_groups]
        mark = _mark_of(options)
        if mark is not None and mark == self._mark:
            return before, _NO_TENSORS
        found, stock = self._encode(options)
        self._mark = mark
        return [{**group, "params": old["params"]} for group, old in zip(found, before, strict=True)], stock

    def _is_plain(self) -> bool:
        optimizer = self.thing
        return type(optimizer).state_dict is Optimizer.state_dict and all(
            isinstance(value, Tensor | None) for state in optimizer.state.values() for value in state.values()
        )

    def _things(self) -> list[Any]:
        optimizer = self.thing
        return [
            *chain.from_iterable(map(dict.values, state_hooks_of(optimizer))),
            *chain.from_iterable(group["params"] for group in optimizer.param_groups),
            *optimizer.state,
            *chain.from_iterable(map(dict.values, optimizer.state.values())),
        ]


class Watch:
    """Tells whether things are what they were: the same objects, and the tensors among them in the same places.

    Args:
        find: Returns the things.
        look: Returns where tensors are; their `.data` can be given other memory without anything else to tell it.
    """

    def __init__(self, find: Callable[[], list[Any]], look: Callable[[list[Tensor]], list[Any]]) -> None:
        self._find, self._look = find, look
        self._things = find()
        self._tensors = [thing for thing in self._things if isinstance(thing, Tensor)]
        self._seen = look(self._tensors)

    def sees_the_same(self) -> bool:
        """True if nothing changed but the values of tensors."""
        things = self._find()
        return (
            len(things) == len(self._things)
            and all(map(operator.is_, things, self._things))
            and self._look(self._tensors) == self._seen
        )


_REQUIRES_GRAD = operator.attrgetter("requires_grad")


# Loops without Python in them: a step has driven all of this out of the processor's caches.
def _places(tensors: list[Tensor]) -> list[Any]:
    return list(map(Tensor.data_ptr, tensors))


def _places_and_forms(tensors: list[Tensor]) -> list[Any]:
    looks = Tensor.data_ptr, Tensor.size, Tensor.stride, _REQUIRES_GRAD
    return [found for look in looks for found in map(look, tensors)]


def _mark_of(value: Any) -> bytes | None:
    """Return what two values have in common if and only if their JSON is the same; None if that cannot be told."""
    try:
        return marshal.dumps(
            value, 2
        )  # of plain types only, by value; a quarter of the time that encoding takes
    except ValueError:
        return None
