"""State that a script holds beside its kept state: reported by name when found, an error once it changes.

The search covers the variables of the function that called `run.keep` and of the functions that call `run.step`, one or two
levels deep: attributes of `self` and other objects, items of lists, tuples and dicts, closures of functions.
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from functools import cache
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticflow.errors import StateError
from elasticflow.runtime.loop import carried_values, kept, liveness, script_loops
from elasticflow.runtime.process import random_streams, reachable, torch_private
from elasticflow.runtime.process.sharded_tensors import local_of
from elasticflow.runtime.snapshot import unsaved
from elasticflow.system.exceptions import is_own_code
from elasticflow.system.installation import is_of_installed_package

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from collections.abc import Set as AbstractSet
    from types import FrameType

    from elasticflow.runtime.state.state import State

_METHODS = ("state_dict", "load_state_dict")
_DEEPEST = 2
_MOST_ITEMS = 1000
"""Items of a container; a longer one is data."""
_MOST_ENDS = 9
"""Items of a record that are compared, at its beginning and at its end."""
_MOST_NUMBERS = 100_000
"""Numbers of an array that are compared."""
_OURS = "elasticflow."
_SIMPLE = (bool, int, float, str)
# Other iterators may read the run's batches.
_SEQUENCES: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
)
COUNTER = "number that changes with the steps"
DECIDER = "holder of numbers that change with the steps"
RECORD = "record that changes with the steps"
CARRIED = "value that one pass leaves to the next"
POOL = "collection of tensors that changes with the steps"
BUFFER = "buffer that takes samples in with the steps"
RUNNING = "holder of sums or means that change with the steps"
READER = "DataLoader's iterator"
GENERATOR = "generator that continues with the steps"
SEQUENCE = "sequence of values that continues with the steps"
COPY = "copy of the model's weights"
AVERAGE = "list of tensors like the model's weights, which changes with the steps"
_ITERATORS = (GeneratorType, enumerate, map, zip, itertools.chain, itertools.cycle, itertools.islice, tuple)


class Found(NamedTuple):
    """An object of the script that has state of its own, and is not kept.

    Attributes:
        path: Expression for the object in the script: `self.ema`.
        is_told: It is told as soon as it is found, not only once it changes.
        role: BUFFER for an object with arrays, COPY for a dict of the model's weights, such as the best of the run (a copy from before `run.keep` is made again at each
            start), POOL for a list, deque or dict of tensors or arrays, READER for an iterator over a DataLoader, or a generator
            that holds one, GENERATOR for another generator, AVERAGE for a list of tensors with the shapes of the model's parameters.
            None for all else.
    """

    path: str
    value: Any
    is_told: bool
    role: str | None = None

    @property
    def kind(self) -> str:
        """The role, or the name of its class."""
        return self.role or f"{type(self.value).__module__}.{type(self.value).__qualname__}"


class _Seen(NamedTuple):
    """An object that was looked at, and what it held."""

    value: Callable[[], Any]
    mark: Any


class ScriptState:
    """Looks at the objects of the script, in the first steps and before snapshots. Every rank.

    Args:
        frame: Frame of the function that called `run.keep`.
        ignored: Paths that are no state, as a refusal names them.
        tell: Called with name and kind of what no snapshot holds.
        repeats_epochs: Tells whether a restart begins the epoch anew, so that passes inside it carry nothing over a restart.
    """

    def __init__(
        self,
        state: State,
        frame: FrameType,
        passed: Mapping[str, Any],
        ignored: Sequence[str],
        tell: Callable[[str, str], None],
        repeats_epochs: Callable[[], bool] = lambda: False,
    ) -> None:
        self._repeats_epochs = repeats_epochs
        self._state, self._ignored, self._tell = state, tuple(ignored), tell
        self._code, self._globals = frame.f_code, frame.f_globals
        self._told: set[str | int] = set()
        self._made_anew: set[str] = set()
        # An object has the path that it was found by first, whichever function looks at it later.
        self._paths: dict[int, str] = {}
        self._seen: dict[str | int, _Seen] = {}
        self._values = kept.values_of(state)
        variables = {**frame.f_globals, **frame.f_locals}
        # Numbers and text of the script under the names that they were kept by.
        self._passed = {
            name: passed[name]
            for name in self._values
            if isinstance(passed[name], _SIMPLE) and variables.get(name) is passed[name]
        }
        self._at_first = dict(self._values)
        # Numbers of the script, and of batches that its iterators have given, at the last look.
        self._numbers: dict[str, int | float] = {}
        self._made: dict[str, Any] = {}
        # The tensors of each collection at the last look, and whether each had come since the look before.
        self._pools: dict[str, list[tuple[weakref.ref[Any], bool]]] = {}
        # The arrays of each object at the last look, and where they had changed since the look before.
        self._buffers: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        found = self._found(variables)
        self._copies_at_first = {id(each.value): each.value for each in found if each.role == COPY}
        # An environment may be begun anew, by a seed, in each pass.
        self._tell_of([each for each in found if not _is_environment(each.value)])

    def look(self, *, is_thorough: bool) -> None:
        """Look at what the script holds now.

        Args:
            is_thorough: At models and optimizers, too, bit by bit.

        Raises:
            StateError: state changed that no snapshot holds; the message names it.
        """
        frames = list(self._frames())
        variables = dict(self._globals)
        made_anew: set[str] = set()
        for frame in reversed(frames):
            variables |= frame.f_locals
            made = carried_values.made_in_each_pass(frame.f_code.co_filename, frame.f_lineno)
            made_anew = made_anew - frame.f_locals.keys() | made
        # Behind the loop nothing tells of its passes any more.
        self._made_anew = made_anew = made_anew or self._made_anew
        found = self._found({name: value for name, value in variables.items() if name not in made_anew})
        self._tell_of(found)
        places = _places_of(list(_kept(self._state)))
        for each in found:
            if each.role == POOL:
                self._tell_of_pool(each)
            elif each.role == BUFFER:
                self._tell_of_buffer(each)
            elif each.role in {READER, GENERATOR}:
                if self._has_moved(each.path, _place_of(each.value)) and not self._repeats_epochs():
                    self._tell_once(each.path, each.path, each.kind)
            elif each.role == AVERAGE:
                if is_thorough and self._has_moved(each.path, hash(repr(_mark_of(each.value, set())))):
                    self._tell_once(each.path, each.path, AVERAGE)
            elif is_thorough or not isinstance(each.value, nn.Module | Optimizer | Tensor):
                self._compare(each, places)
        self._compare_rates()
        self._compare_values(variables)
        self._tell_of_counters(variables, {frame.f_code.co_filename for frame in frames})
        self._tell_of_carried(frames)

    def _found(self, variables: Mapping[str, Any]) -> list[Found]:
        return [
            each._replace(path=self._paths.setdefault(id(each.value), each.path))
            for each in found_in(self._state, variables)
        ]

    def _frames(self) -> Iterator[FrameType]:
        """Yield the frames of the script's functions on the call stack, innermost first."""
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
        is_first = True
        while frame is not None:
            is_ours = frame.f_globals.get("__name__", "").startswith(_OURS)
            is_scripts = frame.f_globals is self._globals or is_own_code(frame.f_code.co_filename)
            if not is_ours and (is_first or is_scripts):
                is_first = False
                yield frame
            frame = frame.f_back

    def _tell_of(self, found: Sequence[Found]) -> None:
        scheduled: set[int] = set()
        for each in found:
            scheduled |= _groups_of(_optimizer_of(each.value))
            if each.is_told:
                self._tell_once(id(each.value), each.path, each.kind)
            if each.role == COPY and id(each.value) not in self._copies_at_first:
                # A list of copies gets one message.
                self._tell_once(re.sub(r"\[\d+\]", "[]", each.path), each.path, each.kind)
        for name, optimizer in self._unscheduled():
            if not scheduled & _groups_of(optimizer):
                self._tell_once(name, "scheduler", f"learning-rate schedule that was made for {name}")

    def _tell_once(self, key: str | int, path: str, kind: str) -> None:
        if not {key, path} & self._told and not unsaved.is_ignored(path, self._ignored):
            self._told |= {key, path}
            self._tell(path, kind)

    def _compare(self, each: Found, places: AbstractSet[int]) -> None:
        mark = _mark_of(each.value, places)
        key = id(each.value)
        before, self._seen[key] = self._seen.get(key), _Seen(_reference_to(each.value), mark)
        has_changed = before is not None and before.value() is each.value and before.mark != mark
        if has_changed and not unsaved.is_ignored(each.path, self._ignored):
            raise refusal(each.path, each.kind)

    def _tell_of_pool(self, pool: Found) -> None:
        """Tell of *pool* if it takes tensors in and keeps others: a replay buffer, a pool of images.

        A batch that each pass makes anew may have the same mask each time: it neither grows nor keeps what came later.
        """
        held = self._pools.get(pool.path, [])
        before = {id(reference()): has_come for reference, has_come in held}
        now = {id(each): each for each in _tensors_among(pool.value)}
        takes_in, keeps = not now.keys() <= before.keys(), [before[key] for key in now if key in before]
        if takes_in and keeps and (len(now) > len(held) or any(keeps)):
            self._tell_once(pool.path, pool.path, pool.kind)
        self._pools[pool.path] = [
            (weakref.ref(each), bool(held) and key not in before) for key, each in now.items()
        ]

    def _tell_of_buffer(self, buffer: Found) -> None:
        """Tell of *buffer* if its arrays take rows in at other places than before, as a replay buffer does, or are computed from themselves.

        The storage of a rollout is filled anew in each step, and a single row of numbers is a record to be shown.
        """
        kept_ids = {id(each) for each in _kept(self._state)}
        now = _heads_of(
            {key: each for key, each in _arrays_of(buffer.value).items() if id(each) not in kept_ids}
        )
        held, before = self._buffers.get(buffer.path, ({}, {}))
        changed = {
            name: head != held[name]
            for name, head in now.items()
            if name in held and held[name].shape == head.shape
        }
        takes_in = any(places.any() and places.ndim > 1 for places in changed.values())
        had_taken_in = any(places.any() for places in before.values())
        # The root of a tree of priorities changes in each step.
        is_elsewhere = not any(
            torch.logical_and(places, before[name]).any()
            for name, places in changed.items()
            if places.ndim > 1 and name in before and before[name].shape == places.shape
        )
        if takes_in and had_taken_in and is_elsewhere:
            self._tell_once(buffer.path, buffer.path, buffer.kind)
        elif any(changed[name].any() for name in _accumulated_in(buffer.value) & changed.keys()):
            self._tell_once(buffer.path, buffer.path, RUNNING)
        self._buffers[buffer.path] = now, changed

    def _has_moved(self, path: str, number: float | None) -> bool:
        before, self._numbers[path] = self._numbers.get(path, number or 0), number or 0
        return before != (number or 0)

    def _unscheduled(self) -> Iterator[tuple[str, Optimizer]]:
        """Yield the kept optimizers that a schedule was made for which is not kept."""
        scheduled = {group for value in _kept(self._state) for group in _groups_of(_optimizer_of(value))}
        for name, optimizer in self._state.optimizers.items():
            is_wrapped = hasattr(optimizer.step, "_wrapped_by_lr_sched")
            has_schedule = is_wrapped or any("initial_lr" in group for group in optimizer.param_groups)
            is_kept = bool(scheduled & _groups_of(optimizer))
            if has_schedule and not is_kept and not (is_wrapped and _is_left(optimizer)):
                yield name, optimizer

    def _compare_rates(self) -> None:
        for name, optimizer in self._unscheduled():
            path, rates = f"{name}.lr", repr([group.get("lr") for group in optimizer.param_groups])
            before, self._seen[path] = self._seen.get(path), _Seen(lambda: None, rates)
            if before is not None and before.mark != rates and not unsaved.is_ignored(path, self._ignored):
                raise StateError(
                    f"{path} is set by a schedule that no snapshot holds: a restart would begin it anew",
                    f"make it before run.keep, and run.keep(scheduler=scheduler); {unsaved.unless(path)}",
                )

    def _tell_of_counters(self, variables: Mapping[str, Any], files: set[str]) -> None:
        """Tell of numbers that change with the steps in objects around the model or a kept optimizer: a trainer, a schedule made by hand."""
        kept_ids = {id(each) for each in (self._state.model, *self._state.optimizers.values())}
        own = {id(value) for value in self._state.objects.values()}  # these have a state of their own
        known = {self._code.co_filename, *files}
        readers = cache(lambda: known | carried_values.own_files())
        for name, holder in _holders_of(kept_ids, own, variables):
            # `self` is the script's `trainer`.
            path = self._paths.setdefault(id(holder), name)
            for key, value, owner in _numbers_of(path, holder, kept_ids | own):
                is_anew = carried_values.is_made_anew(key, owner, known)
                # A tensor is often a loss.
                is_carried = is_anew is False or (is_anew is None and not isinstance(value, Tensor))
                if is_carried and not carried_values.is_only_shown(key, readers()):
                    self._tell_of_attribute(key, float(value))

    def _tell_of_carried(self, frames: Sequence[FrameType]) -> None:
        """Tell of tensors and arrays that the loop carries from pass to pass and no kept object holds."""
        own = cache(lambda: set(map(id, _kept(self._state))))
        lines = [(frame, frame.f_lineno) for frame in frames]
        if self._repeats_epochs():
            # The epoch makes again what passes inside it carry.
            starts = [script_loops.line_of_epochs(frame) for frame in frames]
            first = next((number for number, start in enumerate(starts) if start is not None), 0)
            lines = [(frame, start or line) for (frame, line), start in zip(lines, starts, strict=True)][
                first:
            ]
        for frame, line in lines:
            for name, value in carried_values.carried_in(frame, line):
                if id(value) not in own():
                    self._tell_once(name, name, CARRIED)
            for name, number in carried_values.counted_in(frame, line):
                self._tell_of_counter(name, number)
            made = carried_values.made_for_inner_loops(frame.f_code.co_filename, line)
            for place, value, owner in carried_values.deciders_in(frame, line):
                if place in made and self._made.get(place) is not value:
                    # Another object, as each fold makes its list of samples.
                    self._made[place] = value
                    self._numbers.pop(place, None)
                # `self` is the script's `trainer`.
                known = self._paths.get(id(owner))
                inside = place.removeprefix(liveness.owner_of(place))
                path = place if known is None or owner is None else f"{known}{inside}"
                for inner, each in _setters_of(path, owner) if isinstance(value, bool) else [(path, value)]:
                    if not {id(each), id(owner)} & own():
                        self._tell_of_decider(inner, each)
            self._tell_of_functions(frame, line, own)

    def _tell_of_functions(self, frame: FrameType, line: int, own: Callable[[], set[int]]) -> None:
        for path, value, owner in carried_values.carried_by_functions(frame, line):
            if id(owner) in own():
                continue
            if (number := carried_values.as_number(value)) is not None:
                self._tell_of_attribute(path, number)
            elif carried_values.is_several_numbers(value) and id(value) not in own():
                self._tell_once(path, path, CARRIED)

    def _tell_of_attribute(self, path: str, value: float) -> None:
        if liveness.end_of(path) not in carried_values.set_by_the_run(self._code.co_filename):
            self._tell_of_counter(path, value)

    def _tell_of_counter(self, path: str, value: float) -> None:
        if self._has_moved(path, value) and dict(self._values).get(argument_for(path)) != value:
            self._tell_once(path, path, COUNTER)

    def _tell_of_decider(self, path: str, value: Any) -> None:
        """Tell of an attribute, a list or dict, or an object without a model, such as an early stopping, once its numbers change."""
        number = None if getattr(value, "requires_grad", False) else carried_values.as_number(value)
        if number is not None:
            # `counted_in` has plain variables.
            if not path.isidentifier():
                self._tell_of_attribute(path, number)
            return
        if isinstance(value, _SEQUENCES):
            self._tell_once(path, path, SEQUENCE)
            return
        if isinstance(value, list | tuple | deque | dict):
            kind, held = RECORD, list(value.values() if isinstance(value, dict) else value)
            held = [len(held), *held[:_MOST_ENDS], *held[-_MOST_ENDS:]]
            if not all(isinstance(each, (*_SIMPLE, np.number)) for each in held):
                return
        else:
            kind, held = DECIDER, list(_attributes_of(value).values())
            module = sys.modules.get(type(value).__module__)
            # A library's object, such as an Accelerator, is asked for its rank, too.
            is_installed = is_of_installed_package(str(getattr(module, "__file__", "")))
            if is_installed or any(isinstance(each, nn.Module | Optimizer) for each in held):
                return
            held = [each for each in held if each is None or isinstance(each, (*_SIMPLE, np.number))]
        if held and self._has_moved(path, hash(repr(held))):
            self._tell_once(path, path, kind)

    def _compare_values(self, variables: Mapping[str, Any]) -> None:
        for name, first in self._passed.items():
            now, held = variables.get(name, first), self._values[name]
            is_other = isinstance(now, _SIMPLE) and repr(now) not in {repr(first), repr(held)}
            if is_other and repr(held) == repr(self._at_first[name]):
                raise StateError(
                    f"{name} is {now!r} in the script, and run.kept[{name!r}] is {held!r}, as it was: a restart would lose it",
                    f"run.kept[{name!r}] = {name} where it changes, and {name} = run.kept[{name!r}] after run.keep",
                )


def _setters_of(path: str, owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects inside *owner* whose methods set its flag at *path*: a callback that ends training."""
    place, _, flag = path.rpartition(".")
    for inner, value, _ in reachable.objects(
        {place: owner}, lambda value, depth: depth <= _DEEPEST and _is_followed(value)
    ):
        methods = [each for each in vars(type(value)).values() if isinstance(each, FunctionType)]
        if value is not owner and any(flag in each.__code__.co_names for each in methods):
            yield inner, value


def _is_left(optimizer: Optimizer) -> bool:
    """Return True if torch's schedules of *optimizer* are gone, as those of a search for the learning rate."""
    return all(_optimizer_of(schedule) is not optimizer for schedule in reachable.living(LRScheduler))


def found_in(state: State, variables: Mapping[str, Any]) -> Iterator[Found]:
    """Yield what *variables* hold that has a state, and is neither kept nor a part of what is kept."""
    kept_values = list(_kept(state))
    known = {id(value) for value in kept_values}
    places, weights = _places_of(kept_values), dict(state.model.named_parameters())
    trained = _trained_alone(state, places)
    closed: set[int] = set()

    def enters(value: Any, depth: int) -> bool:
        return id(value) not in closed and depth < _DEEPEST and _is_followed(value)

    roots = {name: value for name, value in list(variables.items()) if not name.startswith("_")}
    for path, value, depth in reachable.objects(roots, enters, known):
        if isinstance(value, _SIMPLE) or id(kept.inside(value)) in known:
            closed.add(id(value))
            continue
        known.add(id(value))
        found = _as_found(path, value, places, weights, trained)
        if found is not None:
            closed.add(id(value))
            yield found
        elif enters(value, depth) and _arrays_of(value):
            yield Found(path, value, is_told=False, role=BUFFER)
    yield from trained.values()


def _as_found(
    path: str, value: Any, places: set[int], weights: Mapping[str, Tensor], trained: dict[int, Found]
) -> Found | None:
    """Return *value* as an object with state of its own; None if it has none. Tensors that it holds are removed from *trained*."""
    if isinstance(value, random_streams.GENERATORS):
        return Found(path, value, is_told=False)
    if trained.pop(id(value), None) is not None or _is_environment(value):
        return Found(path, value, is_told=True)
    if _has_state(value, places):
        parameters = list(value.parameters()) if isinstance(value, nn.Module) else []
        for parameter in parameters:
            trained.pop(id(parameter), None)
        return Found(path, value, is_told=not isinstance(value, nn.Module) or bool(parameters))
    if _holds_all(value, weights) and not any(_lies_at(each, places) for each in value.values()):
        return Found(path, value, is_told=False, role=COPY)
    if _batches_given(value) is not None:
        return Found(path, value, is_told=False, role=READER)
    if isinstance(value, GeneratorType) and not _is_of_run(value):
        return Found(path, value, is_told=False, role=GENERATOR)
    among = _tensors_among(value)
    if [trained.pop(id(each)) for each in among if id(each) in trained]:
        return Found(path, value, is_told=True)
    if _is_like(value, weights) and not any(_lies_at(each, places) for each in value):
        return Found(path, value, is_told=False, role=AVERAGE)
    return Found(path, value, is_told=False, role=POOL) if among else None


def _arrays_of(value: Any) -> dict[str, Any]:
    """Return the arrays of numbers or records that an object has as attributes, and single numbers that it averages beside a model."""
    held = {} if isinstance(value, FunctionType | MethodType) else getattr(value, "__dict__", {})
    return {
        name: each
        for name, each in list(held.items())
        if (type(each) is Tensor or (type(each) is np.ndarray and _has_numbers(each.dtype)))
        and (carried_values.is_several_numbers(each) or name in _accumulated_in(value))
    }


def _has_numbers(dtype: np.dtype[Any]) -> bool:
    """Return True for a type of numbers, or of records without references."""
    return dtype.kind in "biuf" or (dtype.fields is not None and not dtype.hasobject)


def _accumulated_in(value: Any) -> set[str]:
    """Return the arrays of an object that its methods compute from themselves; single numbers only beside a model, and in place."""
    if isinstance(value, FunctionType | MethodType | nn.Module):
        return set()
    held = getattr(value, "__dict__", {})
    has_model = any(isinstance(each, nn.Module) for each in list(held.values()))
    accumulated = carried_values.accumulated_by(cast("Hashable", type(value)))
    return {
        name
        for name, is_in_place in accumulated.items()
        if carried_values.is_several_numbers(held.get(name)) or (has_model and is_in_place)
    }


def _heads_of(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of the first rows of arrays: a buffer is filled from there, and may be larger than the memory."""
    heads = {}
    for name, array in arrays.items():
        rows = array.reshape(-1) if array.ndim == 0 else array
        head = rows[: max(1, _MOST_NUMBERS * len(rows) // math.prod(rows.shape))]
        if isinstance(head, np.ndarray) and head.dtype.kind == "V":
            head = np.ascontiguousarray(head).view(np.uint8).reshape(len(head), -1)
        heads[name] = torch.as_tensor(head).detach().clone()
    return heads


def _read_through(iterator: Any) -> Iterator[Any]:
    """Yield an iterator, and those that it reads from: of a generator, of `zip` and the like, of a progress bar of tqdm."""
    inside = [iterator]
    for _ in range(4):
        yield from inside
        inside = [
            held
            for each in inside
            for held in (
                gc.get_referents(each)
                if isinstance(each, _ITERATORS)
                else [getattr(each, "__dict__", {}).get("iterable")]
            )
        ]


def _batches_given(value: Any) -> int | None:
    """Return the number of batches that a DataLoader's iterator has given, *value* or one inside of it; None: no iterator is there."""
    given = map(torch_private.batches_given, _read_through(value))
    return next((each for each in given if each is not None), None)


def _is_of_run(generator: GeneratorType[Any, Any, Any]) -> bool:
    """Return True for a generator of elasticflow's, or one of the script's through which it reads `Run.batches`: a progress bar."""
    inside = list(_read_through(generator))
    frames = [
        each.gi_frame for each in inside if isinstance(each, GeneratorType) and each.gi_frame is not None
    ]
    modules = [type(each).__module__ for each in inside]
    modules += [str(frame.f_globals.get("__name__", "")) for frame in frames]
    return any(each.partition(".")[0] == "elasticflow" for each in modules)


def _place_of(iterator: Any) -> int | None:
    """Return a number that changes with each item that an iterator gives: of its batches, or of a generator's variables."""
    given = _batches_given(iterator)
    if given is not None or not isinstance(iterator, GeneratorType) or iterator.gi_frame is None:
        return given
    held = iterator.gi_frame.f_locals.values()
    return hash(
        (iterator.gi_frame.f_lasti, *(each if isinstance(each, _SIMPLE) else id(each) for each in held))
    )


def _trained_alone(state: State, places: AbstractSet[int]) -> dict[int, Found]:
    """Return the tensors that kept optimizers move and no kept object holds, by `id`: a learned temperature, say."""
    return {
        id(tensor): Found(
            f"{name.removeprefix('optimizer.')}.param_groups[{i}]['params'][{j}]", tensor, is_told=False
        )
        for name, optimizer in state.optimizers.items()
        if not unsaved.has_own_state(optimizer)
        for i, group in enumerate(optimizer.param_groups)
        for j, tensor in enumerate(group["params"])
        if not _lies_at(tensor, places)
    }


def _places_of(values: Sequence[Any]) -> set[int]:
    """Return the addresses of the tensors among *values*, and of the parameters and buffers of their modules."""
    tensors = [each for each in values if isinstance(each, Tensor)]
    for module in (each for each in values if isinstance(each, nn.Module)):
        tensors += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return {unsaved.address_of(local_of(each)) for each in tensors}


def _lies_at(value: Any, places: AbstractSet[int]) -> bool:
    """Return True for a tensor that has its memory at one of *places*, as those of a model's `state_dict` have, or none."""
    address = unsaved.address_of(local_of(value)) if isinstance(value, Tensor) else None
    return address == 0 or address in places


def _holds_all(value: Any, weights: Mapping[str, Tensor]) -> bool:
    """Return True if *value* is a dict with tensors of the shapes of all *weights* by name, as a model's `state_dict` is; a record of norms is not."""
    if not isinstance(value, Mapping) or not 0 < len(weights) <= len(value):
        return False
    held = {str(key).removeprefix("module."): getattr(each, "shape", None) for key, each in value.items()}
    return all(held.get(name) == weight.shape for name, weight in weights.items())


def _is_like(value: Any, weights: Mapping[str, Tensor]) -> bool:
    """Return True for a list of tensors with the shapes of all *weights*, or of those that are trained."""
    if type(value) is not list or not 0 < len(value) <= len(weights):
        return False
    shapes = [getattr(each, "shape", None) for each in value]
    trained = [each.shape for each in weights.values() if each.requires_grad]
    return shapes in (trained, [each.shape for each in weights.values()])


def _tensors_among(value: Any) -> list[Any]:
    """Return the tensors and arrays in a list, deque or dict of nothing else, or of tuples with them; of a long one those at both ends."""
    if not isinstance(value, dict | list | deque):
        return []
    items = list(value.values() if isinstance(value, dict) else value)
    ends = [*items[:_MOST_ITEMS], *items[_MOST_ITEMS:][-_MOST_ITEMS:]]
    parts = [item if isinstance(item, tuple) else (item,) for item in ends]
    among = [[each for each in part if carried_values.is_several_numbers(each)] for part in parts]
    return [each for part in among for each in part] if all(among) else []


def _holders_of(kept_ids: set[int], own: set[int], variables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the script's objects and dicts, and those in attributes, that have a kept object as an attribute or item; not those in *own*."""

    def enters(value: Any, depth: int) -> bool:
        return depth == 0 and bool(_attributes_of(value))

    roots = {path: value for path, value in variables.items() if not path.startswith("_")}
    for path, value, _ in reachable.objects(roots, enters, own):
        if any(id(held) in kept_ids for held in _parts_of(value)):
            yield path, value


def _numbers_of(path: str, holder: Any, outside: set[int]) -> Iterator[tuple[str, int | float | Tensor, Any]]:
    """Yield the numbers that *holder* holds, and those of a schedule's phases, with their owners; a trainer, which has a model, holds its meters, too."""
    is_schedule = not any(isinstance(value, nn.Module) for value in _parts_of(holder))
    owners: dict[str, Any] = {}

    def enters(value: Any, depth: int) -> bool:
        return depth == 0 or (is_schedule and depth <= _DEEPEST and _is_followed(value))

    for inner, value, _ in reachable.objects({path: holder}, enters, outside):
        owners[inner] = value
        if type(value) in (int, float) or (isinstance(value, Tensor) and value.ndim == 0):
            yield inner, value, owners.get(liveness.owner_of(inner))


def _parts_of(value: Any) -> list[Any]:
    """Return the items of a dict, such as `{"optimizer": optimizer, "step": 0}`, or what an object has as attributes."""
    is_small = type(value) is dict and not _is_long(value)
    return list((value if is_small else _attributes_of(value)).values())


def _attributes_of(value: Any) -> dict[str, Any]:
    if isinstance(value, type | ModuleType | FunctionType | MethodType) or reachable.is_machinery(value):
        return {}
    ours = type(value).__module__.startswith(("torch", "numpy", _OURS))
    return {} if ours else dict(getattr(value, "__dict__", {}))


def _kept(state: State) -> Iterator[Any]:
    """Yield what is kept, and what it holds: a snapshot has that, or `Unsaved` looks at it."""

    def enters(value: Any, depth: int) -> bool:
        is_closed = isinstance(value, type | ModuleType | FunctionType | MethodType | nn.Module)
        return depth <= _DEEPEST and not (is_closed or _is_long(value))

    for _, value, _ in reachable.objects(state.objects, enters):
        # Not by the walk, which would take a second for a thousand layers.
        modules = list(value.modules()) if isinstance(value, nn.Module) else []
        held = (each for module in modules for each in vars(module).values())
        # Python has each small number but once.
        yield from (e for e in (value, *modules, *held) if e is not None and not isinstance(e, _SIMPLE))


def _is_followed(value: Any) -> bool:
    kinds = type | ModuleType | nn.Module | Optimizer | LRScheduler
    if isinstance(value, kinds) or reachable.is_machinery(value) or _is_long(value):
        return False
    is_container = isinstance(value, Mapping | list | tuple)
    # A dataset's samples are the run's, or the loader's.
    is_data = not is_container and hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return not is_data and not type(value).__module__.startswith(("torch", "numpy"))


def _is_long(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > _MOST_ITEMS


def _optimizer_of(value: Any) -> Any:
    return getattr(value, "__dict__", {}).get("optimizer")


def _groups_of(optimizer: Any) -> set[int]:
    """Return the `id` of an optimizer's groups, in which a schedule sets the rates: an optimizer around another one shares them."""
    return {id(group) for group in optimizer.param_groups} if isinstance(optimizer, Optimizer) else set()


def _has_state(value: Any, places: set[int]) -> bool:
    """Return True if an object has a state to save and load that is not empty and is more than the state of kept models."""
    # By its class: an object may say that it has any attribute.
    if isinstance(value, type) or not all(callable(getattr(type(value), name, None)) for name in _METHODS):
        return False
    try:
        if isinstance(value, nn.Module):
            return bool(_own_state(value, places))
        return bool(value.state_dict())  # of a GradScaler that is switched off there is none
    except AttributeError:
        return False  # a wrapper of what has none: Accelerate's DataLoader (1.15)
    except Exception:  # noqa: BLE001  # whatever the script's own object raises: it is only looked for
        return True


def _is_environment(value: Any) -> bool:
    """Return True for what an agent plays in, by the names that gymnasium gave its methods: it stands in the middle of an episode."""
    kind = type(value)
    has_space = hasattr(kind, "action_space") or "action_space" in getattr(value, "__dict__", {})
    return has_space and all(callable(getattr(kind, name, None)) for name in ("reset", "step"))


def _own_state(module: nn.Module, places: AbstractSet[int]) -> dict[str, Tensor]:
    """Return a module's parameters and buffers without those of the kept models."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if not _lies_at(tensor, places)}


def _mark_of(value: Any, places: AbstractSet[int]) -> Any:
    """Return a mark that stays equal while an object does not change; None for a class that may count anything."""
    if isinstance(value, random_streams.GENERATORS):
        return random_streams.mark_of(value)
    if isinstance(value, nn.Module):
        return unsaved.marks_of(list(reachable.leaves({"": _own_state(value, places)}, {})))
    if isinstance(value, Tensor | list | dict | deque):
        return unsaved.marks_of(list(reachable.leaves({"": value}, {})))
    if isinstance(value, Optimizer | LRScheduler) or kept.is_scaler(value):
        return unsaved.marks_of(list(reachable.leaves({"": value.state_dict()}, {})))
    return None


def _reference_to(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def refusal(path: str, kind: str) -> StateError:
    """Return the error that names state of the script that no snapshot would hold."""
    name = argument_for(path)
    return StateError(
        f"{path}, a {kind}, changes with the steps, and no snapshot holds it: a restart would lose it",
        f"make it before run.keep, and run.keep({name}={path}); {unsaved.unless(path)}",
    )


def argument_for(path: str) -> str:
    """Return a name under which `run.keep` can be given what lies at *path*."""
    words = re.findall(r"[A-Za-z_]\w*", path)
    return words[-1] if words and words[-1] != "self" else "state"
