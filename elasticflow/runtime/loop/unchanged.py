"""Checks that a hook has not changed the trained state.

Every tensor that PyTorch changes counts its changes: looking at the counts takes a microsecond a tensor, so it is always
done. What is changed behind them (through `.data`, or numpy) shows in sums over the bytes only, which read the whole model
twice: at a hook's first call in a process, and with `train.consistency = "exact"`, which promises the bits, at each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from elasticflow.errors import HookError
from elasticflow.runtime.process import checksums
from elasticflow.runtime.process.sharded_tensors import local_of, reshard
from elasticflow.runtime.process.torch_private import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

REMEDY = "a hook looks at training: work on copy.deepcopy(context.model), or change it in model.step or the optimizer"


class _Mark(NamedTuple):
    tensor: Tensor  # held, so that its id is no other's
    version: int
    address: int
    is_trained: bool


class Unchanged:
    """Detects changes of modules' parameters and buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules, self._is_thorough = modules, False
        self._marks: dict[str, _Mark] = {}
        self._sums: dict[str, int] = {}

    def begin(self, *, is_thorough: bool) -> None:
        """Remember the current state; every bit of it if *is_thorough*."""
        self._is_thorough = is_thorough
        self._marks = self._look()
        self._sums = self._summed()

    def require(self, hook: str) -> None:
        """Make sure that nothing has changed since `begin`.

        Raises:
            HookError: a tensor has changed; the message names it.
        """
        before, after = self._marks, self._look()
        self._marks = {}
        for name in {**before, **after}:
            if name not in before or name not in after:
                raise _changed(hook, f"{'took away' if name in before else 'added'} {name}")
            was, now = before[name], after[name]
            if was.tensor is not now.tensor or was.address != now.address:
                raise _changed(hook, f"replaced {name}")
            if was.is_trained != now.is_trained:
                raise _changed(hook, f"{'thawed' if now.is_trained else 'froze'} {name}")
            if was.version != now.version:
                raise _changed(hook, f"changed {name}")
        sums, self._sums = self._sums, {}
        for name, value in self._summed().items():
            if sums.get(name) != value:
                raise _changed(hook, f"changed {name}")

    def _look(self) -> dict[str, _Mark]:
        """Return a mark of everything that a snapshot would hold of the modules."""
        return {
            name: _Mark(tensor, version_of(tensor), tensor.data_ptr(), tensor.requires_grad)
            for name, tensor in self._tensors().items()
        }

    def _summed(self) -> dict[str, int]:
        return checksums.sums_of(self._tensors()) if self._is_thorough else {}

    def _tensors(self) -> dict[str, Tensor]:
        for module in self._modules:
            reshard(module)
        words = ("", "the average's ")
        return {
            f"{word}{name}": local_of(tensor)
            for word, module in zip(words, self._modules, strict=False)
            for name, tensor in module.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }


def _changed(hook: str, what: str) -> HookError:
    return HookError(f"{hook} {what}, which is trained, or part of a snapshot", REMEDY)
