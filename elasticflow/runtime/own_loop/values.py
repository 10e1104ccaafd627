"""Values and random generators that a script has `run.keep` hold: numbers, text, lists, dicts, and what draws at random."""

from __future__ import annotations

import random
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from elasticflow.errors import StateError
from elasticflow.runtime.snapshot.reachable import GENERATORS
from elasticflow.runtime.state.codec import Encoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PLAIN = (type(None), bool, int, float, str, list, tuple, dict, Tensor)


class Value:
    """A plain value as a part of a snapshot: its state is the value itself.

    Args:
        name: Of the value, for messages.
        value: What it is at the beginning of the run.

    Attributes:
        value: What it is now.

    Raises:
        StateError: a snapshot cannot hold the value; names what in it.
    """

    def __init__(self, name: str, value: Any) -> None:
        require_storable(name, value)
        self.value = value

    def state_dict(self) -> Any:
        """Return the value."""
        return self.value

    def load_state_dict(self, state: Any) -> None:
        """Take over a value: lists, dicts and tensors are the same objects afterwards, with other contents."""
        self.value = _restored(self.value, state)


class Generator:
    """A random generator as a part of a snapshot.

    Args:
        generator: Python's, NumPy's (old or new) or torch's.

    Attributes:
        generator: The same.
    """

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> Any:
        """Return where it is."""
        match self.generator:
            case torch.Generator():
                return self.generator.get_state()
            case random.Random():
                return self.generator.getstate()
            case np.random.RandomState():
                return _without_arrays(self.generator.get_state(legacy=False))
            case _:
                return _without_arrays(self.generator.bit_generator.state)

    def load_state_dict(self, state: Any) -> None:
        """Go on from there.

        Raises:
            ValueError: it is the state of another kind of generator.
        """
        match self.generator:
            case torch.Generator():
                self.generator.set_state(state.cpu())
            case random.Random():
                self.generator.setstate(state)
            case np.random.RandomState():
                self.generator.set_state(_with_arrays(state, self.generator.get_state(legacy=False)))
            case _:
                bits = self.generator.bit_generator
                bits.state = _with_arrays(state, bits.state)


class KeptValues(MutableMapping[str, Any]):
    """The plain values that `run.keep` was given, by the names that they have there. Snapshots hold what is in it.

    Args:
        values: By name.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        """Return the value.

        Raises:
            StateError: `run.keep` was given no such value.
        """
        return self._of(name).value

    def __setitem__(self, name: str, value: Any) -> None:
        """Have the next snapshots hold *value*; the same on every rank.

        Raises:
            StateError: `run.keep` was given no such value, or a snapshot cannot hold *value*.
        """
        kept = self._of(name)
        require_storable(name, value)
        kept.value = value

    def __delitem__(self, name: str) -> NoReturn:
        """Raise: what is kept stays so."""
        raise StateError(
            f"run.kept[{name!r}] cannot be taken away: snapshots hold it", f"run.kept[{name!r}] = None"
        )

    def __contains__(self, name: object) -> bool:
        """Return whether `run.keep` was given such a value."""
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        """Go through the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Count the values."""
        return len(self._values)

    def __repr__(self) -> str:
        """Show them as a dict."""
        return repr({name: kept.value for name, kept in self._values.items()})

    def _of(self, name: str) -> Value:
        if name not in self._values:
            there = ", ".join(self._values) or "none"
            raise StateError(
                f"run.keep was given no plain value called {name!r}; it was given: {there}",
                f"run.keep(..., {name}=0): with the value that it has at the beginning",
            )
        return self._values[name]


def part_of(name: str, value: Any) -> Any:
    """Return *value* as what a snapshot can include: plain values and generators get `state_dict` and `load_state_dict`.

    Raises:
        StateError: a list or a dict holds what a snapshot cannot hold.
    """
    if isinstance(value, GENERATORS):
        return Generator(value)
    return Value(name, value) if type(value) in _PLAIN else value


def require_storable(name: str, value: Any) -> None:
    """Make sure that a snapshot can hold a value.

    Raises:
        StateError: it cannot; names what in it.
    """
    try:
        Encoder().encode(value, name)
    except RecursionError:
        raise StateError(f"{name} is nested too deeply, or holds itself") from None


def _restored(live: Any, saved: Any) -> Any:
    """Return *saved*, in the lists, dicts and tensors of *live* as far as there are any."""
    if isinstance(live, Tensor) and isinstance(saved, Tensor) and live.shape == saved.shape:
        with torch.no_grad():
            return live.copy_(saved)
    if type(live) is list and type(saved) is list:
        same = [_restored(old, new) for old, new in zip(live, saved, strict=False)]
        live[:] = [*same, *saved[len(same) :]]
        return live
    if type(live) is dict and type(saved) is dict:
        items = {key: _restored(live.get(key), new) for key, new in saved.items()}
        live.clear()
        live.update(items)
        return live
    return saved


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(item) for key, item in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


def _with_arrays(state: Any, like: Any) -> Any:
    """Return *state* with arrays where *like*, the state of such a generator, has them.

    Raises:
        ValueError: it is the state of another kind of generator.
    """
    if isinstance(like, dict):
        if not isinstance(state, dict) or state.keys() != like.keys():
            raise ValueError(f"the generator is a {like.get('bit_generator')} now")
        return {key: _with_arrays(item, like[key]) for key, item in state.items()}
    if isinstance(like, np.ndarray):
        return np.asarray(state, dtype=like.dtype)
    return state
