"""Scalars that a training step returns beside its loss: their means over the global batch.

A mean is over the items that the loss is a mean over: the step's own `count`, else the samples. Sums and weights travel
where the loss travels, in places that all ranks give the same names; so they cost no collective. A name that some rank
meets for the first time has no place yet: the vote of that step says so, and the ranks gather its values once. That sum is
rounded otherwise than the travelling one, so snapshots hold the names in the order of their places: each value of a run
that was interrupted has the last digit it would have had.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elasticflow.errors import StepResultError
from elasticflow.protocol import run_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.runtime.process.context import Worker

LOSS_KEYS = frozenset({"loss", "count"})
MOST = 64
"""Scalars of one job."""
NUM_PLACES = 2 * MOST
"""Numbers that travel: sum and weight of each."""


Sums = dict[str, tuple[float | Tensor, float]]
"""By name: weighted sum, and sum of the weights."""


def scalars_in(result: Mapping[Any, Any]) -> dict[str, float | Tensor]:
    """Return the scalars among what a training step returned: numbers and tensors without dimensions, but for the loss."""
    return {
        name: value
        for name, value in result.items()
        if name not in LOSS_KEYS and isinstance(name, str) and _is_scalar(value)
    }


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0


def require_name(name: str) -> None:
    """Raise unless a scalar may be called *name*.

    Raises:
        StepResultError: it is a field of ours, or cannot be one.
    """
    if run_files.is_ours(name):
        raise StepResultError(
            f"the training step returned a scalar `{name}`, and metrics.jsonl has a field of that name of its own",
            f'call it something else in model.step, such as "own_{name}"',
        )
    if not run_files.is_name(name):
        raise StepResultError(
            f"the training step returned a scalar {name!r}, which is no name for a field of metrics.jsonl",
            "call it by a letter and up to 99 letters, digits and _ . / - in model.step",
        )


def require_room(number: int) -> None:
    """Raise unless so many scalars of one job can be logged.

    Raises:
        StepResultError: they are too many.
    """
    if number > MOST:
        raise StepResultError(
            f"the training step returned {number} different scalars, and there is room for {MOST}",
            "return fewer from model.step; many of one kind may be logged by a hook, with log_scalar",
        )


class Scalars:
    """Adds up the scalars of one step after the other. Every rank makes one.

    Args:
        leaves: Number of parts, over all ranks, that a batch is cut into; sums are added in the order of the parts.
    """

    def __init__(self, worker: Worker, leaves: int) -> None:
        self._worker, self._leaves = worker, leaves
        # Names met since the run began or resumed, the same on every rank.
        self._met: set[str] = set()
        self._parts: dict[int, Sums] = {}

    @property
    def _names(self) -> list[str]:
        return self._worker.scalar_names

    def begin(self) -> None:
        """Begin a step."""
        self._parts.clear()
        self._worker.vote.names_wanted = False

    def add(self, part: int, result: Any, weight: float) -> None:
        """Take the scalars of what the job's step returned for some items.

        Raises:
            StepResultError: a scalar cannot have its name.
        """
        if not isinstance(result, dict) or len(result) < 2 or weight == 0:
            return
        sums = self._parts.setdefault(part, {})
        for name, value in scalars_in(result).items():
            if name not in self._names:
                require_name(name)
                self._worker.vote.names_wanted = True
            number = value.detach().float() if isinstance(value, Tensor) else float(value)
            if isinstance(number, Tensor) and number.device.type == "cpu":
                number = number.item()
            total, items = sums.get(name, (0.0, 0.0))
            sums[name] = total + number * weight, items + weight

    def numbers(self, part: int) -> list[float | Tensor]:
        """Return the numbers of *part* that travel: sum and weight of each name that has a place."""
        sums = self._parts.get(part, {})
        return [number for name in self._names for number in sums.get(name, (0.0, 0.0))]

    def means(self, totals: Sequence[float]) -> dict[str, float]:
        """Return the means over the global batch. Collective if the vote says that there are new names.

        Args:
            totals: Sums over all parts; all scaled by one factor, if any.

        Raises:
            StepResultError: on every rank: there are too many.
        """
        means = {
            name: totals[2 * place] / totals[2 * place + 1]
            for place, name in enumerate(self._names)
            if totals[2 * place + 1] > 0
        }
        self._met.update(means)
        return {**means, **self._learned()} if self._worker.vote.names else means

    def _learned(self) -> dict[str, float]:
        """Give names that were met in this step their places, and return their means. Collective: every rank."""
        mine = {
            part: {
                name: (float(total), weight)
                for name, (total, weight) in sums.items()
                if name not in self._names
            }
            for part, sums in self._parts.items()
        }
        parts: dict[int, dict[str, tuple[float, float]]] = {}
        for text in self._worker.gather_text(json.dumps(mine)):
            parts |= {int(part): sums for part, sums in json.loads(text).items()}
        new = sorted({name for sums in parts.values() for name in sums})
        if len(self._names) + len(new) > MOST:  # the job's code had other names before
            self._names[:] = [name for name in self._names if name in self._met]
        self._names.extend(new)
        self._met.update(new)
        require_room(len(self._names))
        rows = torch.zeros(self._leaves, len(new), 2)
        for part, sums in parts.items():
            for name, pair in sums.items():
                rows[part, new.index(name)] = torch.tensor(pair)
        totals = _added(list(rows)).tolist()
        return {name: total / weight for name, (total, weight) in zip(new, totals, strict=True) if weight > 0}


def _added(rows: list[Tensor]) -> Tensor:
    """Return the sum in the order of the tree that `fixed_order_sum` adds in: a restart changes no bit."""
    while len(rows) > 1:
        rows = [rows[n] if n + 1 == len(rows) else rows[n] + rows[n + 1] for n in range(0, len(rows), 2)]
    return rows[0]
