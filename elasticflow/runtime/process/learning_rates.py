"""The learning rates of a step: one number, or one number by the name of each parameter group."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, SupportsFloat, cast

from torch import Tensor

from elasticflow.runtime.process.host_copies import copy_to_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.optim import Optimizer

    AnyOptimizers = Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]
    """One optimizer, or several by name or number."""

Rates = tuple[SupportsFloat, ...]
"""One rate per parameter group, in the optimizers' order. A rate that is a tensor of a device arrives late: `copy_to_host`."""


class LearningRates:
    """Reads the rates of all parameter groups of one optimizer or several, and formats them as JSON."""

    def __init__(self) -> None:
        self._keys: list[str] = []

    def read(self, optimizers: AnyOptimizers) -> Rates:
        """Return the current rates of the parameter groups; NaN for a group without a rate."""
        groups: list[dict[str, Any]] | None = getattr(optimizers, "param_groups", None)
        # One optimizer; an isinstance check would take most of the time.
        if groups is not None:
            if len(groups) == 1:
                self._keys = []
                return (_rate(groups[0]),)
            if len(groups) != len(self._keys):
                self._keys = [json.dumps(name) for name in _unique(list(map(_name, groups)))]
            return tuple(map(_rate, groups))
        is_named = isinstance(optimizers, Mapping)
        given = cast("Any", optimizers)
        several: Iterable[Optimizer] = given.values() if is_named else given
        rates = tuple([_rate(group) for optimizer in several for group in optimizer.param_groups])
        if len(rates) != len(self._keys):
            names: Iterable[Any] = given if is_named else count()
            named = zip(names, several, strict=False)
            by_name = {str(name): optimizer.param_groups for name, optimizer in named}
            self._keys = [json.dumps(name) for name in _of_several(by_name)]
        return rates

    def json(self, rates: Rates) -> str:
        """Return *rates*, which must be those read last, as JSON: a number for a single group, else an object by name."""
        if len(rates) != len(self._keys):
            return json_number(rates[0]) if rates else "null"
        return "{" + ", ".join(map("{}: {}".format, self._keys, map(json_number, rates))) + "}"


def _of_several(by_name: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Return each group's name: `discriminator` if the optimizer has a single group, `generator/decay` if it has several."""
    names = []
    for optimizer, groups in by_name.items():
        group_names = _unique(list(map(_name, groups)))
        names += [optimizer] if len(group_names) == 1 else [f"{optimizer}/{name}" for name in group_names]
    return names


def _name(group: dict[str, Any]) -> str | None:
    name = group.get("name")
    return name if isinstance(name, str) and name else None


def _unique(names: list[str | None]) -> list[str]:
    """Return the name of each group, or its number if the name is missing or shared."""
    return [
        str(number) if name is None or names.count(name) > 1 else name for number, name in enumerate(names)
    ]


def _rate(group: dict[str, Any]) -> SupportsFloat:
    rate = group.get("lr", math.nan)
    return copy_to_host(rate) if isinstance(rate, Tensor) else float(rate)


def json_number(value: SupportsFloat) -> str:
    """Return a number as JSON; one that is not finite is null."""
    number = float(value)
    return repr(number) if math.isfinite(number) else "null"
