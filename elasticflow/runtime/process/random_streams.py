"""Random streams keyed by the place of their use, so that no generator state has to be saved."""

from __future__ import annotations

import random
import sys
import zlib
from contextlib import contextmanager
from ctypes import c_uint64, string_at
from hashlib import blake2b
from struct import Struct, pack
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from elasticflow.runtime.process import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SAMPLE, _MODEL, _BATCH, _REST, _FACTORY, _HOOK = 1, 2, 3, 4, 5, 6
VERSION = 2  # of these rules, in snapshots
_pack = Struct("<5Q").pack

_TRIAL = 0x1D4A62F9B7C835E0

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

_seed_python = random.seed
_seed_torch = torch.default_generator.manual_seed  # 1 us; torch.manual_seed takes 87


def _seed_numpy(key: int) -> None:
    # Other bits than torch gets: both are Mersenne twisters, and would draw the same numbers.
    np.random.seed(key >> 31)  # noqa: NPY002  # datasets draw from the global generator


def seed_all(key: int) -> None:
    """Seed the generators that a dataset may draw from: python's, numpy's global generator, torch's on the CPU."""
    _seed_python(key)
    _seed_numpy(key)
    _seed_torch(key)


def seed_two(of_python: int, of_numpy: int) -> None:
    """Seed python's generator and numpy's global one, each by a key of its own."""
    _seed_python(of_python)
    _seed_numpy(of_numpy)


def sample_key(seed: int, epoch: int, sample: int, use: int = 0) -> int:
    """Return the seed under which *sample* is read in *epoch*; *use* tells datasets of one job apart."""
    return _key(_SAMPLE, seed, epoch, sample, use)


def batch_key(seed: int, place: int, count: int, use: int = 0) -> int:
    """Return the seed under which a batch is made of *count* samples, the first at *place* in the stream."""
    return _key(_BATCH, seed, place, count, use)


def model_key(seed: int, step: int, rank: int, piece: int) -> int:
    """Return the seed under which a rank runs the model on micro-batch *piece* of *step*."""
    return _key(_MODEL, seed, step, rank, piece)


def hook_key(seed: int, step: int, rank: int, hook: str) -> int:
    """Return the seed under which *hook* is called after *step*."""
    return _key(_HOOK, seed, step, rank, _number_of(hook.encode()))


def _key(*parts: int) -> int:
    return _number_of(_pack(*parts)) >> 1


def _number_of(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class Held(NamedTuple):
    """A generator that a dataset holds.

    Attributes:
        is_of_library: An object of a known library holds it, and the run seeds it for each sample.
    """

    path: str
    generator: Any
    is_of_library: bool

    def seed(self, key: int) -> None:
        """Put the generator, in place, into a state that follows from *key* and its path."""
        digest = blake2b(f"{key} {self.path}".encode(), digest_size=32).digest()
        number = int.from_bytes(digest[:8], "little") >> 1
        if isinstance(self.generator, random.Random):
            self.generator.seed(number)
        elif isinstance(self.generator, np.random.RandomState):
            self.generator.seed(number & 0xFFFFFFFF)
        elif isinstance(self.generator, torch.Generator):
            self.generator.manual_seed(number)
        else:
            bits = self.generator.bit_generator
            bits.state = type(bits)(number).state

    @property
    def value(self) -> Any:
        """A value that differs after a draw."""
        return mark_of(self.generator)


def state_of(generator: Any) -> Any:
    """Return the state of a generator of Python, NumPy (old or new) or torch as numbers in tuples and dicts, or as a tensor."""
    match generator:
        case torch.Generator():
            return generator.get_state()
        case random.Random():
            return generator.getstate()
        case np.random.RandomState():
            return _without_arrays(generator.get_state(legacy=False))
        case _:
            return _without_arrays(generator.bit_generator.state)


def set_state_of(generator: Any, state: Any) -> None:
    """Give a generator a *state* as `state_of` returns it.

    Raises:
        ValueError: it is the state of another kind of generator.
    """
    match generator:
        case torch.Generator():
            generator.set_state(state.cpu())
        case random.Random():
            generator.setstate(state)
        case np.random.RandomState():
            generator.set_state(_with_arrays(state, generator.get_state(legacy=False)))
        case _:
            bits = generator.bit_generator
            bits.state = _with_arrays(state, bits.state)


def mark_of(generator: Any) -> str:
    """Return a text that differs after each draw; empty for `SystemRandom`, which has no state."""
    # Not by `state_of`, whose lists take several times as long: a dataset's generators are looked at around each sample.
    match generator:
        case random.SystemRandom():
            return ""
        case torch.Generator():
            return str(zlib.crc32(generator.get_state().numpy().data))
        case random.Random():
            return str(hash(generator.getstate()))
        case np.random.RandomState():
            return str(hash(_frozen(generator.get_state(legacy=False))))
        case _:
            return str(hash(_frozen(generator.bit_generator.state)))


def _frozen(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple(map(_frozen, state.values()))
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(item) for key, item in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _with_arrays(state: Any, like: Any) -> Any:
    """Return *state* with arrays where *like*, the state of such a generator, has them."""
    if isinstance(like, dict):
        if not isinstance(state, dict) or state.keys() != like.keys():
            raise ValueError(f"the generator is a {like.get('bit_generator')} now")
        return {key: _with_arrays(item, like[key]) for key, item in state.items()}
    return np.asarray(state, dtype=like.dtype) if isinstance(like, np.ndarray) else state


@contextmanager
def put_back() -> Iterator[None]:
    """Context after which random, numpy and torch on the CPU are in the states that they had before."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])


class _Generator:
    """One of the generators that are seeded by key."""

    __slots__ = ("rests", "seed", "word")

    def __init__(self, seed: Callable[[int], object], word: c_uint64 | Held) -> None:
        self.seed, self.word = seed, word
        self.rests: Any = 0


class Generators:
    """The global generators of one process, seeded by key.

    torch's generator is seeded before every forward. Seeding python's and numpy's generators takes 45 us in the middle
    of a step, and most jobs draw from neither. So both rest in one known state until a forward or the optimizer draws
    from them, which two reads of memory show; from the next step on both are seeded by key. In the step of the first
    draws each forward draws from the resting state. This is the same at every world size, as long as `are_used`
    outlives a restart.

    A dataset's draws are seen in the same way, against the same state; see `Draws`.

    Attributes:
        are_used: The model or the optimizer draws from python's or numpy's generator, or this is unknown.
        of_data: The generators that a dataset may draw from: python's, numpy's, torch's, and the generators added by `add`.
        can_look: Draws can be seen in this Python, numpy and torch.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._resting = _key(_REST, seed, 0, 0, 0)
        self._seed_device: Callable[[int], object] | None = None
        if device.type != "cpu":
            generators = torch.get_device_module(device).default_generators
            self._seed_device = generators[device.index or 0].manual_seed
        words = _words_that_move()
        self.can_look = words is not None
        self.are_used = words is None
        self._is_seen = False
        seeds: tuple[Callable[[int], object], ...] = (_seed_python, _seed_numpy, _seed_torch)
        self.of_data = [
            _Generator(seed, word) for seed, word in zip(seeds, words or (c_uint64(),) * 3, strict=True)
        ]
        self._python, self._numpy, self._torch = self.of_data
        self._added: list[_Generator] = []
        self._known: dict[int, object] = {}

    def add(self, held: Iterable[Held]) -> None:
        """Add generators that a dataset holds to `of_data`; known generators are left out."""
        for each in held:
            if id(each.generator) not in self._known:
                self._known[id(each.generator)] = each.generator
                is_pythons = self.can_look and type(each.generator) is random.Random
                added = _Generator(each.seed, _word_of_python(each.generator) if is_pythons else each)
                self._added.append(added)
                _put_to_rest(added, self._resting)
        self.of_data = [self._python, self._numpy, self._torch, *self._added]

    def rest(self) -> None:
        """Put all generators into the state that a step begins with; earlier draws are forgotten."""
        for generator in self.of_data:
            _put_to_rest(generator, self._resting)
        self._is_seen = False

    def look(self) -> bool:
        """Return `are_used`, which becomes true if a forward or the optimizer drew from python's or numpy's generator since `rest`."""
        if not self.are_used and (self._is_seen or self._have_two_moved()):
            self.are_used = True
        return self.are_used

    def seed_model(self, key: int) -> None:
        """Seed the generators that a forward draws from."""
        _seed_torch(key)
        if self._seed_device is not None:
            self._seed_device(key)
        if self.are_used:
            _seed_python(key)
            _seed_numpy(key)
        elif self._have_two_moved():
            self._is_seen = True
            self._rest_two()

    def before_data(self) -> None:
        """Put all generators into the resting state, and remember if the model drew from python's or numpy's."""
        self._is_seen |= self._have_two_moved()
        self.after_data()

    def after_data(self) -> None:
        """Put all generators into the resting state; a dataset's draws say nothing about the model."""
        _seed_torch(self._resting)
        if self._have_two_moved():
            self._rest_two()
        self._rest_added()

    def have_moved(self) -> bool:
        """True if any generator was drawn from since it was put into the resting state."""
        return any(map(_has_moved, self.of_data))

    def _have_two_moved(self) -> bool:
        return _has_moved(self._python) or _has_moved(self._numpy)

    def _rest_added(self) -> None:
        for generator in self._added:
            if _has_moved(generator):
                generator.seed(self._resting)

    def _rest_two(self) -> None:
        _seed_python(self._resting)
        _seed_numpy(self._resting)


def _put_to_rest(generator: _Generator, key: int) -> None:
    generator.seed(key)
    generator.rests = generator.word.value


def _has_moved(generator: _Generator) -> bool:
    return bool(generator.word.value != generator.rests)


class Draws:
    """Finds the generators that a piece of the job's code draws from.

    Known generators are seeded before each use of the code; the others rest. Call `are_more` after each use: if it
    returns true, seed again and repeat the use.
    """

    def __init__(self, generators: Generators) -> None:
        all_of_them = generators.of_data
        self._resting = all_of_them if generators.can_look else []
        self._seeds = [] if generators.can_look else [generator.seed for generator in all_of_them]

    def __bool__(self) -> bool:
        return bool(self._seeds)

    def seed(self, key: int) -> None:
        """Put the generators that the code draws from into the state of *key*."""
        for seed in self._seeds:
            seed(key)

    def are_more(self) -> bool:
        """True if the code drew from resting generators, which are seeded from now on."""
        moved = [generator for generator in self._resting if _has_moved(generator)]
        if moved:
            self._resting = [generator for generator in self._resting if generator not in moved]
            self._seeds = [*self._seeds, *(generator.seed for generator in moved)]
        return bool(moved)


def _words_that_move() -> tuple[c_uint64, c_uint64, c_uint64] | None:
    """Return the memory of python's, numpy's and torch's generator that changes with each draw; None if its place is unknown.

    All three are Mersenne twisters: 624 words, made anew when an index has passed them. Source: CPython 3.11 to 3.14,
    Modules/_randommodule.c (index, then words, after the object's header); numpy 2, mt19937.h (words, then index);
    torch 2.13, MT19937RNGEngine.h (seed, left, seeded, index, then words). These layouts are not promised, so this function first
    tries them on generators of its own. A normal deviate kept for the next draw lies elsewhere: seeding drops it, and
    without it the first draw moves the index.
    """
    if sys.implementation.name != "cpython":
        return None
    trial, twister, engine = random.Random(1), np.random.MT19937(1), torch.Generator().manual_seed(_TRIAL)
    address, default = torch_private.address_of(engine), torch_private.address_of(torch.default_generator)
    if address is None or default is None:
        return None
    at = string_at(address, 256).find(pack("<Q", _TRIAL)) + 16  # its seed and the fields behind it
    memory = _word_of_python(trial), _word_of_numpy(twister), c_uint64.from_address(address + at)
    for _ in range(2):
        *_, index = words = trial.getstate()[1]
        state = twister.state["state"]
        legacy = engine.get_state().numpy().view(np.uint64)
        expected = (
            index | words[0] << 32,
            int(state["key"][-1]) | int(state["pos"]) << 32,
            int(legacy[2]) | int(legacy[3]) << 32,
        )
        if tuple(word.value for word in memory) != expected:
            return None
        trial.random()
        np.random.Generator(twister).random()
        torch.rand((), generator=engine)
    ours = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public since 1.24, not in the stubs
    if not isinstance(ours, np.random.MT19937):
        return None
    return _word_of_python(random._inst), _word_of_numpy(ours), c_uint64.from_address(default + at)  # noqa: SLF001


def _word_of_python(generator: random.Random) -> c_uint64:
    return c_uint64.from_address(id(generator) + object.__basicsize__)


def _word_of_numpy(generator: np.random.MT19937) -> c_uint64:
    return c_uint64.from_address(generator.ctypes.state_address + 4 * 623)


def begin(seed: int, factory: str) -> None:
    """Put random, numpy and torch on all devices into the state in which a factory of the job begins.

    The state follows from *seed* and *factory* alone. All code that opens data counts as one factory, "data": training
    and evaluation data see the same permutation, even if two functions of the job each split one set. The model begins
    as after `torch.manual_seed(seed)`. Other factories begin in other states, so that a teacher model that makes the
    data does not get the weights of the model.
    """
    if factory == "model":
        seed_everything(seed)
        return
    key = _factory_key(seed, factory)
    _seed_python(key)
    _seed_numpy(key)
    torch.manual_seed(key)


def begin_import(seed: int, module: str) -> None:
    """Put random, numpy and torch on the CPU into the state in which *module* of the job is imported."""
    seed_all(_factory_key(seed, f"import {module}"))


def _factory_key(seed: int, factory: str) -> int:
    return _key(_FACTORY, seed, _number_of(factory.encode()), 0, 0)


def seed_everything(seed: int) -> None:
    """Seed random, numpy and torch on all devices with the same number."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  # models draw from the global generator
    torch.manual_seed(seed)
