"""Finds state that training changes and a snapshot would leave out, while a job runs: a restart would lose that state.

The walk covers optimizer, schedule, scaler, averaged model and included objects, and the attributes of the model's modules
beside their parameters and buffers; `add` has the objects of a script looked at. Values that the walk reaches and no captured
state holds are looked at again after later steps: a constant, or a cache that is filled once, stays as it is, while state
changes. Values are compared by a sum over their bits, so nothing is copied. A value that a snapshot holds is recognised by
its address in memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from elasticflow import events
from elasticflow.errors import StateError
from elasticflow.runtime.process import random_streams, reachable
from elasticflow.runtime.process.checksums import crc_of, sums_of
from elasticflow.runtime.process.sharded_tensors import local_of
from elasticflow.runtime.process.torch_private import buffers_of, has_plain_state, unsaved_buffers_of
from elasticflow.runtime.snapshot.model_attributes import flags_of, goes_by, held_by, is_doubtful
from elasticflow.runtime.training import several_optimizers
from elasticflow.snapshots.format.state_json import StateMark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.snapshot.model_attributes import Attribute
    from elasticflow.runtime.state.state import State

_SMALL = 2**16
"""Largest tensor in bytes that is compared by a checksum of all its bits; larger tensors are compared by the sum."""

_SNAPSHOTS = 3
"""Snapshots, and states held in memory, before which the state is looked at again: a schedule may change once an epoch, an averager every few steps."""

# Values outside `state_dict` that torch computes anew at each step, or uses internally.
_SCRATCH = ("scaler._per_optimizer_states", "._step_count", "._opt_called")

Mark = tuple[str, Any]
"""Kind and value of a leaf; equal as long as the leaf is unchanged."""


@dataclass(frozen=True)
class _Look:
    """Result of one walk.

    Attributes:
        loose: Marks of the values that are not captured tensors, by path.
        own: Names of parts with a `state_dict` of their own, which may give a number any name.
        of_model: Attributes of the model's modules that hold loose values, by path.
    """

    loose: dict[str, Mark]
    numbers: dict[str, float]
    own: tuple[str, ...]
    of_model: dict[str, Attribute]


class Unsaved:
    """Looks for state that no snapshot would hold, in the first steps of a generation. Every rank.

    Args:
        ignored: Paths, as a refusal names them, that the job declares to be no state.
    """

    def __init__(self, me: Worker, state: State, ignored: Sequence[str] = ()) -> None:
        self._me, self._state, self._ignored = me, state, tuple(ignored)
        self._last: _Look | None = None
        self._steps = 2
        # Looks that are left before durable snapshots, and before states held in memory alone.
        self._looks = {True: _SNAPSHOTS, False: _SNAPSHOTS}
        self._warned: set[str] = set()
        self._watches: list[Callable[..., None]] = []
        self._groups: dict[str, int] = {}
        # Flags of the model's modules before the first step.
        self._flags: dict[str, tuple[bool, type]] = {}

    def add(self, watch: Callable[..., None]) -> None:
        """Have *watch* called at the times of the checks; it looks at large tensors only if its argument *is_thorough*."""
        self._watches.append(watch)

    def begin(self) -> None:
        """Fix the optimizers' groups from now on: `add_param_group` raises when it is called."""
        several_optimizers.fix_groups(self._state.optimizers)
        self._groups = {name: len(each.param_groups) for name, each in self._state.optimizers.items()}
        self._flags = flags_of(self._state.model)

    @property
    def looks_after_steps(self) -> bool:
        """True if `after_step` still has something to do."""
        return self._steps > 0

    def after_step(self) -> None:
        """Look after each of the first two steps; later this costs nothing.

        Raises:
            StateError: a snapshot would leave out state that training changes; the message names it.
        """
        if self._steps:
            if self._flags:
                self._look_at_flags()
            self._steps -= 1
            self._require_complete()

    def before_snapshot(self, *, is_durable: bool = True) -> None:
        """Look before each of the first few snapshots; before later durable snapshots, look only at small objects.

        Raises:
            StateError: the snapshot would leave out state that training changes; the message names it.
        """
        for name, count in self._groups.items():
            now = len(self._state.optimizers[name].param_groups)
            if now != count:
                raise several_optimizers.groups_refusal(
                    name, f" has {now} parameter groups, and began with {count}"
                )
        if self._looks[is_durable] and not self._steps:
            self._looks[is_durable] -= 1
            self._require_complete()
        elif is_durable:
            for watch in self._watches:
                watch(is_thorough=False)

    def _require_complete(self) -> None:
        for watch in self._watches:
            watch(is_thorough=True)
        before, self._last = self._last, look(self._state)
        if before is None:
            return
        lost, doubtful = moved(before, self._last, self._ignored)
        if lost:
            raise refusal(lost)
        for path in doubtful:
            kind = "a tensor" if self._last.loose[path][0] == "tensor" else "a number"
            self._tell(_name_among(path, doubtful), kind)

    def _look_at_flags(self) -> None:
        """Tell of flags that the first step has set: a restart begins with the old ones, and may set initial weights again."""
        before, self._flags = self._flags, {}
        for path, (value, kind) in flags_of(self._state.model).items():
            has_changed = before.get(path, (value,))[0] != value
            if has_changed and not is_ignored(path, self._ignored) and goes_by(kind, path.rpartition(".")[2]):
                self._tell(path, "a flag")

    def _tell(self, path: str, kind: str) -> None:
        # A hundred layers with the same counter get one event.
        alike = re.sub(r"\d+", "*", path)
        if self._me.rank == 0 and alike not in self._warned:
            self._warned.add(alike)
            self._me.event(events.STATE_LEFT_OUT, name=path, type=kind)


def roots_of(state: State) -> dict[str, Any]:
    """Return the objects to walk: all parts except the model and the evaluation, which elasticflow made itself."""
    return {name: value for name, value in state.objects.items() if name not in ("model", "evaluation")}


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the names of the model's parameters in paths, by `id`."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def has_own_state(root: Any) -> bool:
    """True if code other than torch's gives the state of a part."""
    if isinstance(root, nn.Module):
        return not all(map(has_plain_state, root.modules()))
    return not (getattr(type(root).state_dict, "__module__", None) or "").startswith("torch.")


def outside_of(model: nn.Module) -> set[int]:
    """Return the `id` of the model's modules, parameters, buffers and gradients."""
    tensors = [*model.parameters(), *model.buffers()]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    return {id(value) for value in (*model.modules(), *tensors, *gradients)}


def look(state: State) -> _Look:
    """Return the reachable values that are not captured tensors; changes nothing."""
    captured = state.capture()
    held = {address_of(tensor) for tensor in (*captured.tensors.values(), *state.scalars())}
    held |= {address_of(local_of(t)) for t in state.model.parameters()}
    held |= {address_of(local_of(p.grad)) for p in state.model.parameters() if p.grad is not None}
    outside = outside_of(state.model) | _taken_whole(roots_of(state).values())
    packed = {key: tensor.tolist() for key, tensor in captured.tensors.items() if "/scalars/" in key}
    numbers = dict(_numbers("", captured.tree, packed))
    saved = outside_of(state.model) - {id(tensor) for tensor in _unsaved_buffers(state.model)}
    of_model = {leaf.path: (leaf, attribute) for leaf, attribute in held_by(state.model, saved)}
    reached = [
        *reachable.leaves(roots_of(state), names_of(state.model), outside),
        *(leaf for leaf, _ in of_model.values()),
    ]
    loose = [
        leaf
        for leaf in reached
        if not (_is_real(leaf.value) and address_of(leaf.value) in held) and not is_scratch(leaf.path)
    ]
    marks = marks_of(loose)
    copies = _copies(marks, loose, captured.tensors, numbers)
    own = [name for name, root in {**roots_of(state), "model": state.model}.items() if has_own_state(root)]
    return _Look(
        {path: mark for path, mark in marks.items() if path not in copies},
        numbers,
        tuple(own),
        {path: attribute for path, (_, attribute) in of_model.items() if path in marks},
    )


def _unsaved_buffers(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        for name in unsaved_buffers_of(module):
            buffer = buffers_of(module).get(name)
            if buffer is not None:
                yield buffer


def _taken_whole(roots: Iterable[Any]) -> set[int]:
    """Return the `id` of objects that `Optimizer.state_dict` contains completely, which need no walk."""
    plain = [
        root
        for root in roots
        if isinstance(root, Optimizer) and type(root).state_dict is Optimizer.state_dict
    ]
    return {id(value) for root in plain for value in (root.state, root.param_groups)}


def marks_of(leaves: Sequence[reachable.Leaf]) -> dict[str, Mark]:
    """Return kind and value of each leaf, by path; a tensor's value is a sum over its bits."""
    tensors = {leaf.path: leaf.value.detach() for leaf in leaves if _is_real(leaf.value)}
    arrays = {leaf.path: leaf.value for leaf in leaves if isinstance(leaf.value, np.ndarray)}
    tensors |= {path: _tensor_of(array) for path, array in arrays.items() if array.dtype != object}
    shaped = {path: (tuple(t.shape), str(t.dtype)) for path, t in tensors.items()}
    sums: dict[str, Any] = sums_of({path: t for path, t in tensors.items() if t.nbytes > _SMALL})
    sums |= {path: crc_of(tensor) for path, tensor in tensors.items() if tensor.nbytes <= _SMALL}
    marks: dict[str, Mark] = {path: ("tensor", (shaped[path], sums[path])) for path in tensors}
    for leaf in leaves:
        if isinstance(leaf.value, random_streams.GENERATORS):
            marks[leaf.path] = "generator", random_streams.mark_of(leaf.value)
        elif _is_real(leaf.value) and leaf.value.numel() == 1:
            marks[leaf.path] = "scalar", repr(leaf.value.item())
        elif leaf.path not in tensors and not isinstance(leaf.value, Tensor | np.ndarray):
            kind = "whole" if isinstance(leaf.value, int | np.integer) else "number"
            marks[leaf.path] = kind, repr(leaf.value)
    return marks


def moved(before: _Look, after: _Look, ignored: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Return the paths that changed between two looks and are in no snapshot: first state, then doubtful values.

    A number with a fraction is doubtful: steps may or may not depend on it, as on the norm of the last gradient. For
    attributes of the model, see `is_doubtful`.
    """
    paths = [
        path
        for path, mark in after.loose.items()
        if path in before.loose and before.loose[path] != mark and not is_ignored(path, ignored)
    ]
    numbers = {"whole", "number", "scalar"}
    lost: list[str] = []
    doubtful: list[str] = []
    for path in paths:
        kind = after.loose[path][0]
        if kind in numbers and _is_captured_number(path, before, after):
            continue
        attribute = after.of_model.get(path)
        may_be = kind == "number" if attribute is None else is_doubtful(attribute, kind)
        (doubtful if may_be else lost).append(path)
    return lost, doubtful


def is_ignored(path: str, ignored: Sequence[str]) -> bool:
    """True if the job declares *path*, or an object that contains it, to be no state; `*` stands for a number."""
    patterns = (re.escape(whole).replace(r"\*", r"\d+") for whole in ignored)
    return any(re.match(rf"{pattern}(?:[.\[]|$)", path) for pattern in patterns)


def _name_among(path: str, paths: Sequence[str]) -> str:
    """Return *path*, with `*` for its numbers if others among *paths* differ in these alone."""
    name = re.sub(r"\d+", "*", path)
    return path if all(each == path or re.sub(r"\d+", "*", each) != name for each in paths) else name


def is_scratch(path: str) -> bool:
    """True if *path* is one of torch's values outside `state_dict`, which are not state."""
    return any(scratch in path for scratch in _SCRATCH)


def refusal(paths: Sequence[str]) -> StateError:
    """Return the error that names the state that no snapshot would hold, and the remedy."""
    first, part = paths[0], paths[0].split(".")[0].split("[")[0]
    no_state = unless(*dict.fromkeys(_name_among(path, paths) for path in paths))
    more = f" (and {len(paths) - 1} more like it)" if len(paths) > 1 else ""
    whose = {"optimizer": "the optimizer's class", "scheduler": "the schedule's class"}.get(part, "its class")
    if part == "model":
        return StateError(
            f"{first}{more} changes with the steps, and no snapshot holds it: a restart would lose it",
            "hold it in a persistent buffer (register_buffer), or let get_extra_state() and set_extra_state() of its module hold "
            f"it; {no_state}",
        )
    several = (
        "; a schedule or optimizers that it holds: give each to run.keep, or return them in a dict, for a step(model, batch, optimizers)"
        if part == "optimizer"
        else ""
    )
    return StateError(
        f"{first}{more} changes with the steps, and no snapshot holds it: a restart would lose it",
        f"let state_dict() and load_state_dict() of {whose} hold it{several}; {no_state}",
    )


def unless(*paths: str) -> str:
    """Return the setting by which a job or a script declares that no step depends on *paths*."""
    quoted = ", ".join(f'"{path}"' for path in paths)
    return (
        f"if no step depends on it: snapshots.ignore = [{quoted}] in the job file, or join(ignore=[{quoted}])"
    )


def _is_real(value: Any) -> bool:
    """True if *value* is a tensor with bytes to read."""
    return (
        isinstance(value, Tensor)
        and not value.is_meta
        and value.layout == torch.strided
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def _size_of(value: Any) -> int:
    """Return the number of elements of an array or a tensor, and 0 for an array of objects and any other value."""
    if isinstance(value, np.ndarray):
        return 0 if value.dtype == object else value.size
    return value.numel() if _is_real(value) else 0


def _tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """Return the array as a tensor, or its bytes if torch has no such type."""
    try:
        return torch.from_numpy(np.require(np.asarray(array), requirements=["C", "W"]))
    except TypeError:
        return torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8)


def address_of(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if _is_real(tensor) else 0


def _whole_numbers(generator: Any) -> set[int]:
    """Return the whole numbers in the state of a generator whose state is made of numbers."""
    numbers, waiting = set(), [random_streams.state_of(generator)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int):
            numbers.add(int(value))
        elif isinstance(value, dict | tuple | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return numbers


def _copies(
    marks: Mapping[str, Mark],
    leaves: Sequence[reachable.Leaf],
    captured: Mapping[str, Tensor],
    numbers: Mapping[str, float],
) -> set[str]:
    """Return the paths of values that a snapshot holds as copies.

    A `state_dict` may clone tensors, make tensors or lists of arrays, a tensor of an array of one element, which has the same name
    then, and store the states of generators.
    """
    wanted = {_size_of(leaf.value) for leaf in leaves} - {0}
    stored = {
        key: tensor.detach()
        for key, tensor in captured.items()
        if tensor.numel() in wanted or tensor.dtype == torch.uint8
    }
    of_stored = marks_of([reachable.Leaf(key, tensor) for key, tensor in stored.items()])
    tensors = {value for kind, value in of_stored.values() if kind == "tensor"}
    states = {str(value[1]) for key, (_, value) in of_stored.items() if stored[key].dtype == torch.uint8}
    single = {(key.rpartition("/")[2], t.item()) for key, t in stored.items() if t.numel() == 1}
    lists: dict[str, list[float]] = {}
    for key, number in numbers.items():
        lists.setdefault(re.sub(r"(/\d+)+$", "", key), []).append(number)
    lengths, known = {len(each) for each in lists.values()} - {1}, set(numbers.values())

    def is_held(leaf: reachable.Leaf) -> bool:
        kind, mark = marks[leaf.path]
        value, size = leaf.value, _size_of(leaf.value)
        if kind == "generator":
            has_numbers = not isinstance(value, torch.Generator)
            return mark in states or (has_numbers and _whole_numbers(value) <= known)
        is_listed = size in lengths and value.reshape(-1).tolist() in lists.values()
        is_named = (
            isinstance(value, np.ndarray) and size == 1 and (_name_of(leaf.path), value.item()) in single
        )
        return is_listed or is_named or (kind == "tensor" and size != 1 and mark in tensors)

    return {leaf.path for leaf in leaves if leaf.path in marks and is_held(leaf)}


def _numbers(path: str, value: Any, packed: Mapping[str, list[Any]]) -> Iterator[tuple[str, float]]:
    """Yield the numbers in captured JSON by path, also from the *packed* tensors that the JSON refers to."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield path, value
        return
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict) and StateMark.SCALAR in value:
        key, place = value[StateMark.SCALAR]
        inside = [("", packed[key][place])] if key in packed else []
    elif isinstance(value, dict):
        inside = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        inside = ((str(number), item) for number, item in enumerate(value))
    for name, item in inside:
        yield from _numbers(f"{path}/{name}".strip("/"), item, packed)


def _is_captured_number(path: str, before: _Look, after: _Look) -> bool:
    """True if a snapshot holds the number: under the same name, or as a number that has changed in the same way."""
    then, now = _as_number(before.loose[path][1]), _as_number(after.loose[path][1])
    name = _name_of(path)
    for key, value in after.numbers.items():
        # A counter of the job's own is often equal to Adam's counter of each parameter, but independent of it.
        is_of_parameter = "/state/" in key
        if (
            value == now
            and key.rpartition("/")[2].strip("_") == name
            and (".state[" in path or not is_of_parameter)
        ):
            return True
        is_of_own = key.partition("/")[0] in after.own and path.startswith(key.partition("/")[0])
        if value == now and before.numbers.get(key) == then and is_of_own and not is_of_parameter:
            return True
    return False


def _name_of(path: str) -> str:
    return path.replace("]", "").replace("[", ".").rpartition(".")[2].strip("'\"").strip("_")


def _as_number(text: str) -> float | None:
    try:
        return float(text.removeprefix("np.float64(").rstrip(")"))
    except ValueError:
        return None
