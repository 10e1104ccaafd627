"""All that continues a job, captured as tensors and JSON and applied to live objects."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elasticflow import fault_injection
from elasticflow.errors import StateError
from elasticflow.runtime.state import codec, loading, loading_checks
from elasticflow.runtime.state.cached_parts import Stock, part_of
from elasticflow.runtime.state.loading_checks import check_module as check_fit
from elasticflow.runtime.training import several_optimizers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel

    from elasticflow.runtime.process.learning_rates import AnyOptimizers
    from elasticflow.runtime.training.evaluation import Evaluation
    from elasticflow.runtime.training.several_optimizers import Schedules

__all__ = ["Captured", "State", "check_fit"]

_INCLUDE = "include."
_METHODS = ("state_dict", "load_state_dict")
_EVALUATION = "evaluation"
_PARAMETERS = "parameters"  # beside the parts: which parameter each number of the optimizer's stands for


@dataclass(frozen=True)
class Captured:
    """State at one position; the tensors are the live ones.

    Attributes:
        tree: JSON, with references to tensors.
        tensors: By key, sorted; the same keys and shapes on every rank. The same dict as before as long as they
            are the same tensors.
        aliases: Tied tensors: key to the key that is stored.
        memory_formats: How tensors that are not contiguous lie in memory.
        frozen: Keys of the model's parameters that take no gradient.
        local: Keys of what a rank may have otherwise than others: buffers, packed scalars, objects of the job's own.
            Rank 0's count.
        stepped: Keys of what nothing but the optimizer's step writes: its parameters and its own tensors.
    """

    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    memory_formats: dict[str, str]
    frozen: frozenset[str] = frozenset()
    stepped: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()


class State:
    """What a snapshot holds besides the position: any of a training job's stateful objects.

    Args:
        model: The bare model.
        optimizer: The optimizer.
        optimizers: In its place what a step that moves optimizers itself is given: one, or several in a mapping or a list.
        scheduler: The learning-rate schedule, or several.
        scaler: The gradient scaler of fp16.
        ema: The averaged model.
        evaluation: Keeps the best metric.
        include: The job's own objects that have `state_dict` and `load_state_dict`, by name.

    Raises:
        StateError: an object of *include* has no such methods, *optimizer* is not one, or *optimizers* hold what is none.

    Attributes:
        optimizers: By the names of their parts: `optimizer`, or `optimizer.g` and so on.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        optimizers: AnyOptimizers | None = None,
        scheduler: LRScheduler | Schedules | None = None,
        scaler: GradScaler | None = None,
        ema: AveragedModel | None = None,
        evaluation: Evaluation | None = None,
        include: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.ema, self.evaluation = model, ema, evaluation
        if optimizers is None:
            several_optimizers.require_one(optimizer)
        self.optimizers = several_optimizers.optimizers(optimizer if optimizers is None else optimizers)
        for name, each in several_optimizers.schedules(scheduler).items():
            if each is not None:
                several_optimizers.require_callable(each, name)
        things: dict[str, Any] = {
            "model": model,
            **self.optimizers,
            **several_optimizers.schedules(scheduler),
            "scaler": scaler,
            "ema": ema,
            _EVALUATION: evaluation,
            **{f"{_INCLUDE}{name}": _stateful(name, thing) for name, thing in (include or {}).items()},
        }
        self._parts = {name: part_of(name, thing) for name, thing in things.items() if thing is not None}
        self._stocks: list[Stock] = []
        self._captured = Captured({}, {}, {}, {})
        self._names: loading_checks.Names | dict[str, loading_checks.Names] = []

    @property
    def things(self) -> dict[str, Any]:
        """The objects whose state it is, by the names that snapshots have for them."""
        return {name: part.thing for name, part in self._parts.items()}

    def scalars(self) -> list[Tensor]:
        """Return the tensors of one element each that the last capture packed together."""
        return [tensor for stock in self._stocks for packed in stock.scalars.values() for tensor in packed]

    def misses(self, thing: Any) -> bool:
        """True if *thing* could give and take state, and is no part of this one."""
        is_part = any(part.thing is thing for part in self._parts.values())
        return not is_part and all(callable(getattr(thing, method, None)) for method in _METHODS)

    def capture(self) -> Captured:
        """Return the state now; nothing is copied, so read it before the next step.

        Raises:
            StateError: a part holds something that neither JSON nor safetensors can express; named.
        """
        fault_injection.reach("snapshot.before_capture")
        content: dict[str, Any] = {}
        stocks = []
        for name, part in self._parts.items():
            content[name], stock = part.read()
            stocks.append(stock)
        if not self._stocks or not all(map(operator.is_, stocks, self._stocks)):
            self._stocks, self._captured = stocks, self._merged(stocks)
            self._names = self._parameter_names()
        content[_PARAMETERS] = self._names
        fault_injection.reach("snapshot.after_capture")
        return replace(self._captured, tree=content)

    def _merged(self, stocks: list[Stock]) -> Captured:
        found = {key: tensor for stock in stocks for key, tensor in stock.tensors.items()}
        tensors = {key: found[key] for key in sorted(found)}
        trained = several_optimizers.parameters_of(self.optimizers.values())
        places = {p.data_ptr() for p in trained if p.numel()}
        stepped = {
            key
            for key, tensor in tensors.items()
            if (key.startswith("model/") and tensor.data_ptr() in places)
            or several_optimizers.is_of_optimizer(key)
        }
        scalars = {key for stock in stocks for key in stock.scalars}
        return Captured(
            {},
            tensors,
            {key: other for stock in stocks for key, other in stock.aliases.items()},
            {key: layout for stock in stocks for key, layout in stock.memory_formats.items()},
            frozenset(key for stock in stocks for key in stock.frozen if key.startswith("model/")),
            frozenset(stepped) - scalars,
            frozenset(tensors.keys() - self._replicated(tensors)) | scalars,
        )

    def _replicated(self, keys: Iterable[str]) -> set[str]:
        """Return which keys are of parameters, or of the optimizer: the same on every rank at any time."""
        modules = {
            name: part.thing for name, part in self._parts.items() if isinstance(part.thing, nn.Module)
        }
        found = {
            f"{name}/{key}"
            for name, module in modules.items()
            for key, _ in module.named_parameters(remove_duplicate=False)
        }
        return found | set(filter(several_optimizers.is_of_optimizer, keys))

    def apply(
        self, content: Mapping[str, Any], tensors: Mapping[str, Tensor], memory_formats: Mapping[str, str]
    ) -> None:
        """Make the live objects what was captured; a module's tensors keep their places in memory.

        Objects of the job's own come first: one that refuses its state leaves all others as they were.

        Raises:
            StateError: the snapshot is of another model, optimizer, schedule or set of parts; named. Nothing was
                changed then, but for an object of the job's own that raised while it loaded.
        """
        fault_injection.reach("restore.before_apply")
        self._check_parts(content)
        view, own = (codec.Decoder(tensors, memory_formats, copies=copies) for copies in (False, True))
        parts = {name: part for name, part in self._parts.items() if name in content}
        decoded = {
            name: loading.decoded(part.thing, content[name], view, own) for name, part in parts.items()
        }
        for name, part in parts.items():
            if isinstance(part.thing, nn.Module):
                loading_checks.check_module(part.thing, decoded[name], name)
            elif several_optimizers.is_optimizer(name):
                saved, mine = self._names_for(name, content.get(_PARAMETERS)), self._names_of(name)
                loading_checks.check_optimizer(part.thing, decoded[name], name, saved=saved, own=mine)
            elif several_optimizers.is_schedule(name):
                loading_checks.check_schedule(part.thing, decoded[name], name)
        for name in sorted(parts, key=self._when_loaded):
            fault_injection.reach("restore.mid_apply")
            try:
                loading.load(parts[name].thing, decoded[name])
            except Exception as error:
                if name.startswith(_INCLUDE) or isinstance(error, RuntimeError | ValueError | KeyError):
                    raise StateError(f"the snapshot does not fit the job's {name}: {error}") from error
                raise

    def _when_loaded(self, name: str) -> int:
        # What may refuse its state first; modules, which were compared down to the last tensor, last.
        if isinstance(self._parts[name].thing, nn.Module):
            return 2
        return 0 if name.startswith(_INCLUDE) else 1

    def _check_parts(self, content: Mapping[str, Any]) -> None:
        # An evaluation may come or go: what it keeps is about the run, no weight depends on it.
        for name in sorted((set(self._parts) ^ set(content)) - {_PARAMETERS, _EVALUATION}):
            is_own = name.startswith(_INCLUDE)
            short = name.removeprefix(_INCLUDE)
            if name in self._parts:
                where = "only in the job"
                remedy = f"take `{short}` out of snapshots.include" if is_own else None
            else:
                where = "only in the snapshot"
                remedy = f'add it to [snapshots] again: include = {{ {short} = "..." }}' if is_own else None
            remedy = f"{remedy}, or start a new run" if remedy else None
            raise StateError(f"the snapshot does not fit the job: `{name}` is {where}", remedy)

    def _parameter_names(self) -> loading_checks.Names | dict[str, loading_checks.Names]:
        """Return the parameters' names: of the optimizer, or of each where there are several."""
        if "optimizer" in self.optimizers:
            return self._names_of("optimizer")
        return {name: self._names_of(name) for name in self.optimizers}

    def _names_of(self, part: str) -> loading_checks.Names:
        names = {id(p): f"model/{name}" for name, p in self.model.named_parameters()}
        groups = self.optimizers[part].param_groups
        return [[names.get(id(p)) for p in group["params"]] for group in groups]

    @staticmethod
    def _names_for(part: str, saved: Any) -> loading_checks.Names | None:
        found: loading_checks.Names | None = saved.get(part) if isinstance(saved, dict) else saved
        return found


def _stateful(name: str, thing: Any) -> Any:
    for method in _METHODS:
        if isinstance(thing, type) or not callable(getattr(thing, method, None)):
            what = (
                "a class"
                if isinstance(thing, type)
                else f"a {type(thing).__module__}.{type(thing).__qualname__}"
            )
            raise StateError(
                f"{_INCLUDE}{name} is {what}, without a `{method}` to call",
                "name an object that has the methods state_dict() and load_state_dict(state)",
            )
    return thing
