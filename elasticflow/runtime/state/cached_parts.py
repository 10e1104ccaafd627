"""The stateful parts of a job, each of which is walked through again only when it has changed.

A snapshot in memory may be due at every step of a few milliseconds, and `state_dict` of a small model takes as long
as copying it. From step to step a module or an optimizer holds the same tensors in the same memory. So their
identities are compared, and the walk is repeated only when one of them has been replaced.

Optimizer state is keyed as `Optimizer.state_dict` keys it, by numbers, with the parameters' names beside them (see
`State`). Torch's `get_optimizer_state_dict` and `set_optimizer_state_dict`, which key by name, would be no improvement
(tried with torch 2.13): they make a step of an optimizer without state, which moves the weights if the optimizer is not
torch's own and needs a closure for LBFGS; they refuse parameters that are not the model's, leave out what an optimizer
adds to its `state_dict`, cast NAdam's float32 `mu_product` to a bfloat16 parameter's dtype, and take 18 times as
long as capturing model and optimizer together does here (100 parameters of 64 x 64, one core: 2.6 ms).
"""

from __future__ import annotations

import marshal
import operator
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from elasticflow.runtime.process.sharded_tensors import is_sharded, local_of
from elasticflow.runtime.process.torch_private import (
    has_plain_state,
    local_tensor_of,
    scale_of,
    state_hooks_of,
    tables_of,
)
from elasticflow.runtime.state.codec import Encoder
from elasticflow.runtime.state.tensors import Copies, identity_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.process.sharded_tensors import Box


@dataclass(frozen=True, eq=False)
class TensorSet:
    """The tensors of a part.

    Attributes:
        tensors: Live tensors by key; packed scalars as they were when last refreshed.
        aliases: Tied tensors: key to the key that is stored.
        scalars: The tensors that each packed tensor is made of, by its key.
        frozen: Keys of parameters that take no gradient.
        boxes: Rows that this rank holds of the sharded tensors, by key; `tensors` has the local parts.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    memory_formats: dict[str, str]
    scalars: dict[str, list[Tensor]]
    frozen: frozenset[str] = frozenset()
    boxes: dict[str, Box] = field(default_factory=dict)

    def refresh(self) -> None:
        """Pack the scalars anew."""
        self._packing.make()

    def locations(self) -> tuple[Any, ...]:
        """Return where everything lies: two sets with the same locations hold the same tensors."""
        tensors = {
            key: identity_of(tensor) for key, tensor in self.tensors.items() if key not in self.scalars
        }
        scalars = {key: list(map(identity_of, scalars)) for key, scalars in self.scalars.items()}
        return tensors, scalars, self.aliases, self.memory_formats, self.frozen, self.boxes

    @cached_property
    def _packing(self) -> Copies:
        return Copies(
            pair
            for key, scalars in self.scalars.items()
            for pair in zip(self.tensors[key].unbind(), scalars, strict=True)
        )


_NO_TENSORS = TensorSet({}, {}, {}, {})


def part_of(name: str, stateful: Any) -> StatefulPart:
    """Return *stateful* as a part of a job's state."""
    if isinstance(stateful, nn.Module):
        return ModulePart(name, stateful)
    if isinstance(stateful, Optimizer):
        return OptimizerPart(name, stateful)
    if isinstance(stateful, GradScaler) and type(stateful).state_dict is GradScaler.state_dict:
        return ScalerPart(name, stateful)
    return StatefulPart(name, stateful)


class StatefulPart:
    """An object with `state_dict` and `load_state_dict`, whose `state_dict` is called each time."""

    def __init__(self, name: str, stateful: Any) -> None:
        self.name, self.stateful = name, stateful
        self._fingerprint: bytes | None = None
        self._locations: Any = None
        self._read: tuple[Any, TensorSet] | None = None

    def read(self) -> tuple[Any, TensorSet]:
        """Return the object's state now as JSON and tensors; the same two objects as before as long as nothing changed.

        Raises:
            StateError: the state holds something that neither JSON nor safetensors can express; the message names it.
        """
        state = self._state()
        fingerprint = _fingerprint_of(state)
        if self._read is None or fingerprint is None or fingerprint != self._fingerprint:
            self._read, self._fingerprint = self._as_before(*self._encode(state)), fingerprint
        return self._read

    def _state(self) -> Any:
        return self.stateful.state_dict()

    def _as_before(self, tree: Any, tensor_set: TensorSet, *more: Any) -> tuple[Any, TensorSet]:
        """Return *tree*, and the set of before if its tensors lie where they lay and *more* is equal.

        Shards and sums are worked out again only for another set.
        """
        locations = (tensor_set.locations(), more)
        if self._read is not None and locations == self._locations:
            tensor_set = self._read[1]
            tensor_set.refresh()
        self._locations = locations
        return tree, tensor_set

    def _encode(self, value: Any, *, in_place: bool = False) -> tuple[Any, TensorSet]:
        encoder = Encoder(in_place=in_place)
        # A module's own state is an OrderedDict, by torch's way: what reads it takes any dict.
        tree = encoder.encode(dict(value) if type(value) is OrderedDict else value, self.name)
        encoder.finish()
        if not encoder.tensors:
            return tree, _NO_TENSORS
        found = encoder.tensors, encoder.aliases, encoder.memory_formats, encoder.scalars
        return tree, TensorSet(*found, boxes=encoder.boxes)


class ScalerPart(StatefulPart):
    """A gradient scaler: numbers that lie on a device are captured as tensors, since `state_dict` waits for the device."""

    def _state(self) -> Any:
        scale, growth_tracker = scale_of(self.stateful)
        if scale is None or growth_tracker is None or scale.device.type == "cpu":
            return self.stateful.state_dict()
        scaler = self.stateful
        return {
            "scale": scale,
            "growth_factor": scaler.get_growth_factor(),
            "backoff_factor": scaler.get_backoff_factor(),
            "growth_interval": scaler.get_growth_interval(),
            "_growth_tracker": growth_tracker,
        }


class ModulePart(StatefulPart):
    """A module: walked through again when a parameter, buffer or submodule has been replaced."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self._tables: list[dict[Any, Any]] = []
        self._empty_tables: list[dict[Any, Any]] = []
        self._identity_check: IdentityCheck | None = None

    def read(self) -> tuple[Any, TensorSet]:
        """Return the module's state now; see `StatefulPart`."""
        if self._read is not None and self._identity_check is not None and self._identity_check.passes():
            self._read[1].refresh()
            return self._read
        modules = list(self.stateful.modules())
        tables = [table for module in modules for table in tables_of(module)]
        self._tables = [table for table in tables if table]
        self._empty_tables = [table for table in tables if not table]
        tree, tensor_set = self._encode(self.stateful.state_dict(), in_place=True)
        frozen = {f"{self.name}/{key}" for key, p in self.stateful.named_parameters() if not p.requires_grad}
        tensor_set = replace(tensor_set, frozen=frozenset(frozen & tensor_set.tensors.keys()))
        self._read = self._as_before(tree, tensor_set)
        is_plain = all(map(has_plain_state, modules))
        self._identity_check = IdentityCheck(self._objects, has_forms=True) if is_plain else None
        return self._read

    def _objects(self) -> list[Any]:
        objects: list[Any] = list(chain.from_iterable(map(dict.values, self._tables)))
        objects.append(any(self._empty_tables))
        return objects


class OptimizerPart(StatefulPart):
    """An optimizer: its options are read each time, its tensors walked through again when one has been replaced."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name, optimizer)
        self._identity_check: IdentityCheck | None = None

    def read(self) -> tuple[Any, TensorSet]:
        """Return the optimizer's state now; see `StatefulPart`."""
        if self._read is not None and self._identity_check is not None and self._identity_check.passes():
            tree, tensor_set = self._read
            groups, of_groups = self._groups(tree["param_groups"])
            if not of_groups.tensors:
                tensor_set.refresh()
                if groups is not tree["param_groups"]:
                    self._read = {**tree, "param_groups": groups}, tensor_set
                return self._read
        tree, tensor_set = self._encode(self._state())
        # From here on the fingerprint is of the groups' options alone.
        self._fingerprint = None
        # A set of its own: it stands for the groups, too.
        parameters = [list(map(id, group["params"])) for group in self.stateful.param_groups]
        self._read = self._as_before(tree, replace(tensor_set), parameters)
        self._identity_check = IdentityCheck(self._objects) if self._is_plain() else None
        return self._read

    def _state(self) -> Any:
        state = self.stateful.state_dict()
        groups = state.get("param_groups") if isinstance(state, dict) else None
        return state if groups is None else {**state, "param_groups": list(map(_without_functions, groups))}

    def _groups(self, before: list[dict[str, Any]]) -> tuple[Any, TensorSet]:
        options = [
            {k: v for k, v in _without_functions(group).items() if k != "params"}
            for group in self.stateful.param_groups
        ]
        fingerprint = _fingerprint_of(options)
        if fingerprint is not None and fingerprint == self._fingerprint:
            return before, _NO_TENSORS
        encoded, tensor_set = self._encode(options)
        self._fingerprint = fingerprint
        groups = [{**group, "params": old["params"]} for group, old in zip(encoded, before, strict=True)]
        return groups, tensor_set

    def _is_plain(self) -> bool:
        optimizer = self.stateful
        return type(optimizer).state_dict is Optimizer.state_dict and all(
            isinstance(state, dict) and all(isinstance(value, Tensor | None) for value in state.values())
            for state in optimizer.state.values()
        )

    def _objects(self) -> list[Any]:
        optimizer = self.stateful
        try:
            values = [*chain.from_iterable(map(dict.values, optimizer.state.values()))]
        except TypeError:  # a value beside the states of parameters: never the same as before
            values = [object()]
        return [
            *chain.from_iterable(map(dict.values, state_hooks_of(optimizer))),
            # A group ends its parameters: one of them may move to the next group.
            *chain.from_iterable((*group["params"], group) for group in optimizer.param_groups),
            *optimizer.state,
            *values,
        ]


def _without_functions(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without functions among its options, as LARS has: code is the script's, not state."""
    return {key: value for key, value in group.items() if not isinstance(value, FunctionType)}


_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class IdentityCheck:
    """Compares objects with those of before: the same objects, and the tensors among them in the same memory.

    Args:
        has_forms: Shape, strides and `requires_grad` are compared, too.
    """

    def __init__(self, find: Callable[[], list[Any]], *, has_forms: bool = False) -> None:
        self._find, self._has_forms = find, has_forms
        self._objects = find()
        self._tensors = [item for item in self._objects if isinstance(item, Tensor)]
        self._sharded = [tensor for tensor in self._tensors if is_sharded(tensor)]
        self._local = list(map(local_tensor_of, self._sharded))
        self._parts = list(map(local_of, self._tensors))
        self._locations = self._locate()

    def passes(self) -> bool:
        """True if nothing changed but the values of tensors."""
        objects = self._find()
        return (
            len(objects) == len(self._objects)
            and all(map(operator.is_, objects, self._objects))
            and all(map(operator.is_, map(local_tensor_of, self._sharded), self._local))
            and self._locate() == self._locations
        )

    def _locate(self) -> list[Any]:
        """Return where tensors lie: their `.data` can be given other memory, which nothing else shows; and their forms."""
        # Loops without Python in them: a step has driven all of this out of the processor's caches.
        facts = list(map(Tensor.data_ptr, self._parts))
        if not self._has_forms:
            return facts
        # The local part of a DTensor takes no gradient, whether the DTensor does or not.
        forms = (
            map(Tensor.size, self._parts),
            map(Tensor.stride, self._parts),
            map(_REQUIRES_GRAD, self._tensors),
        )
        return [*facts, *chain.from_iterable(forms)]


def _fingerprint_of(value: Any) -> bytes | None:
    """Return bytes that are equal for two values if and only if their JSON is the same; None for values that are not plain."""
    try:
        # Plain types only, by value: a quarter of the time of encoding.
        return marshal.dumps(value, 2)
    except ValueError:
        return None
