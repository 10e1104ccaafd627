"""All that continues a job, captured as tensors and JSON and applied to live objects."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from elasticflow.errors import StateError
from elasticflow.runtime.process.sharded_tensors import NOT_SHARDED, is_sharded, local_of, sharded_modules
from elasticflow.runtime.state import codec, loading
from elasticflow.runtime.state.cached_parts import TensorSet, part_of
from elasticflow.runtime.state.options import JobOptions
from elasticflow.runtime.training import several_optimizers
from elasticflow.runtime.training.evaluation import Evaluation, Evaluations
from elasticflow.snapshots.format.state_json import PARAMETERS
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.optim.swa_utils import AveragedModel

    from elasticflow.runtime.process.sharded_tensors import Box, Shards
    from elasticflow.runtime.process.step_log import AnyOptimizers
    from elasticflow.runtime.state.options import OptionChange
    from elasticflow.runtime.training.several_optimizers import Schedules

_INCLUDE = "include."
_METHODS = ("state_dict", "load_state_dict")
_EVALUATION = "evaluation"

Names = loading.Names | dict[str, loading.Names]
"""Of the parameters of one optimizer, or of each of several by the name of its part."""


@dataclass(frozen=True)
class Captured:
    """State at one position; the tensors are the live ones.

    Attributes:
        tree: JSON, with references to tensors.
        tensors: By key, sorted; the same keys on every rank, and the same shapes but for sharded tensors. The same dict
            as before as long as they are the same tensors.
        aliases: Tied tensors: key to the key that is stored.
        frozen: Keys of the model's parameters that take no gradient.
        local: Keys of tensors that may differ between ranks: buffers, scalars packed together with buffers, objects of the job's
            own. Snapshots hold rank 0's tensors.
        buffers: Keys of the buffers of modules: of BatchNorm, say, which each rank updates from its own samples.
        stepped: Keys of tensors that as a rule only the optimizer's step writes: its parameters and its own tensors.
        boxes: Rows that this rank holds of each sharded tensor, by key; `tensors` has the local part, whose shape is the rank's own.
    """

    tree: dict[str, Any]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    memory_formats: dict[str, str]
    frozen: frozenset[str] = frozenset()
    stepped: frozenset[str] = frozenset()
    local: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    boxes: dict[str, Box] = field(default_factory=dict)

    @property
    def shards(self) -> Shards:
        """The part of the sharded tensors that this rank holds; if nothing is sharded, the only one."""
        return next((box.shards for box in self.boxes.values()), NOT_SHARDED)


class State:
    """State of a snapshot besides the position: a training job's stateful objects.

    Args:
        optimizers: In its place what a step that moves optimizers itself is given: one, or several in a mapping or a list.

    Raises:
        StateError: an object of *include* has no such methods, *optimizer* is not one, or *optimizers* holds something else.

    Attributes:
        optimizers: By the names of their parts: `optimizer`, or `optimizer.g` and so on.
        options: Options with which the job made its optimizers and schedules.
        sharded_modules: Modules of all parts that `fully_shard` was called with.
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
        evaluation: Evaluation | Evaluations | None = None,
        include: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(evaluation, Evaluation):
            evaluation = evaluation.alone()
        self.model, self.ema, self.evaluation = model, ema, evaluation
        if optimizers is None:
            several_optimizers.require_one(optimizer)
        self.optimizers = several_optimizers.optimizers(optimizer if optimizers is None else optimizers)
        schedules = several_optimizers.schedules(scheduler)
        objects: dict[str, Any] = {
            "model": model,
            **self.optimizers,
            **schedules,
            "scaler": scaler,
            "ema": ema,
            _EVALUATION: evaluation,
            **{f"{_INCLUDE}{name}": _stateful(name, value) for name, value in (include or {}).items()},
        }
        made = {name: schedule for name, schedule in schedules.items() if schedule is not None}
        self.options = JobOptions(self.optimizers, made)
        self._parts = {name: part_of(name, value) for name, value in objects.items() if value is not None}
        self._tensor_sets: list[TensorSet] = []
        self._captured = Captured({}, {}, {}, {})
        self._names: Names = []
        kept = [value for value in objects.values() if isinstance(value, nn.Module)]
        self.sharded_modules = [module for each in kept for module in sharded_modules(each)]

    @property
    def objects(self) -> dict[str, Any]:
        """The objects that this state consists of, by their names in snapshots."""
        return {name: part.stateful for name, part in self._parts.items()}

    @property
    def is_sharded(self) -> bool:
        """True if ranks hold parts of the model."""
        return bool(sharded_modules(self.model))

    def reshard(self) -> None:
        """Have a sharded model's parameters be this rank's parts: after a forward without a backward the root's are gathered.

        Every rank may call it by itself: nothing is exchanged.
        """
        for module in self.sharded_modules:
            module.reshard()

    def scalars(self) -> list[Tensor]:
        """Return the tensors of one element each that the last capture packed together."""
        return [
            scalar
            for tensor_set in self._tensor_sets
            for packed in tensor_set.scalars.values()
            for scalar in packed
        ]

    def misses(self, value: Any) -> bool:
        """True if *value* could give and take state, and is no part of this state."""
        is_part = any(part.stateful is value for part in self._parts.values())
        return not is_part and all(callable(getattr(value, method, None)) for method in _METHODS)

    def capture(self) -> Captured:
        """Return the state now; nothing is copied, so read it before the next step.

        Raises:
            StateError: a part holds something that neither JSON nor safetensors can express; the message names it.
        """
        fault_injection.reach("snapshot.before_capture")
        self.reshard()
        content: dict[str, Any] = {}
        tensor_sets = []
        for name, part in self._parts.items():
            content[name], tensor_set = part.read()
            tensor_sets.append(tensor_set)
        if not self._tensor_sets or not all(map(operator.is_, tensor_sets, self._tensor_sets)):
            self._tensor_sets, self._captured = tensor_sets, self._merged(tensor_sets)
            self._names = self._parameter_names()
        content[PARAMETERS] = self._names
        fault_injection.reach("snapshot.after_capture")
        return replace(self._captured, tree=content)

    def _merged(self, tensor_sets: list[TensorSet]) -> Captured:
        by_key = {key: tensor for tensor_set in tensor_sets for key, tensor in tensor_set.tensors.items()}
        tensors = {key: by_key[key] for key in sorted(by_key)}
        trained = map(local_of, several_optimizers.parameters_of(self.optimizers.values()))
        addresses = {p.data_ptr() for p in trained if p.numel()} - _written_by_forward(self.model)
        boxes = {key: box for tensor_set in tensor_sets for key, box in tensor_set.boxes.items()}
        _require_one_way(boxes)
        stepped = {
            key
            for key, tensor in tensors.items()
            if (key.startswith("model/") and tensor.data_ptr() in addresses)
            or several_optimizers.is_of_optimizer(key)
        }
        packed = {key: of for tensor_set in tensor_sets for key, of in tensor_set.scalars.items()}
        scalars = frozenset(packed)
        return Captured(
            tree={},
            tensors=tensors,
            aliases={key: other for tensor_set in tensor_sets for key, other in tensor_set.aliases.items()},
            memory_formats={
                key: layout for tensor_set in tensor_sets for key, layout in tensor_set.memory_formats.items()
            },
            frozen=frozenset(
                key for tensor_set in tensor_sets for key in tensor_set.frozen if key.startswith("model/")
            ),
            stepped=frozenset(stepped) - scalars,
            local=frozenset(tensors.keys() - self._replicated(tensors, packed)),
            buffers=frozenset(
                f"{name}/{key}"
                for name, module in self._modules()
                for key, _ in module.named_buffers(remove_duplicate=False)
            ),
            boxes=boxes,
        )

    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [(name, value) for name, value in self.objects.items() if isinstance(value, nn.Module)]

    def _replicated(self, keys: Iterable[str], packed: Mapping[str, Sequence[Tensor]]) -> set[str]:
        """Return the keys of parameters and of the optimizer, whose tensors are always the same on every rank.

        Of the *packed* scalars of modules those are among them that lie beside no buffers.
        """
        parameters = {
            f"{name}/{key}": parameter
            for name, module in self._modules()
            for key, parameter in module.named_parameters(remove_duplicate=False)
        }
        addresses = {local_of(parameter).data_ptr() for parameter in parameters.values()}
        without_buffers = {
            key for key, scalars in packed.items() if all(each.data_ptr() in addresses for each in scalars)
        }
        return {*parameters, *without_buffers, *filter(several_optimizers.is_of_optimizer, keys)}

    def apply(
        self,
        content: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        memory_formats: Mapping[str, str],
        changes: Sequence[OptionChange] = (),
        made: Mapping[str, Any] | None = None,
    ) -> None:
        """Give the live objects the state that was captured; a module's tensors stay where they are in memory.

        Objects of the job's own load first: an object that refuses its state leaves the others unchanged.

        Args:
            changes: Options that the job has changed since the snapshot; their new values count.
            made: Options of the captured optimizers when they were made (`JobOptions.to_json`).

        Raises:
            StateError: the snapshot is of another model, optimizer, schedule or set of parts; the message names it. Nothing
                was changed then, except an object of the job's own that raised while it loaded.
        """
        fault_injection.reach("restore.before_apply")
        self.reshard()
        self._check_parts(content)
        sharded = next((p for m in self.sharded_modules for p in m.parameters() if is_sharded(p)), None)
        view, own = (
            codec.Decoder(tensors, memory_formats, copies=copies, sharded=sharded) for copies in (False, True)
        )
        parts = {name: part for name, part in self._parts.items() if name in content}
        decoded = {
            name: loading.decoded(part.stateful, content[name], view, own) for name, part in parts.items()
        }
        for name, part in parts.items():
            self._check_part(name, part.stateful, decoded[name], content.get(PARAMETERS), made or {})
        order = sorted(parts, key=self._when_loaded)
        merged: Callable[[], None] | None = None
        put_back = loading.in_place(self.optimizers.values())
        for name in order:
            if changes and merged is None and not name.startswith(_INCLUDE):
                merged = self.options.merge(decoded, changes)
            if name not in decoded:
                continue
            fault_injection.reach("restore.mid_apply")
            try:
                loading.load(parts[name].stateful, decoded[name])
            except Exception as error:
                if name.startswith(_INCLUDE) or isinstance(error, RuntimeError | ValueError | KeyError):
                    raise StateError(f"the snapshot does not fit the job's {name}: {error}") from error
                raise
        put_back()
        if merged is not None:
            merged()

    def _check_part(
        self, name: str, stateful: Any, state: Any, saved_names: Names | None, made: Mapping[str, Any]
    ) -> None:
        if isinstance(stateful, nn.Module):
            loading.check_module(stateful, state, name)
        elif several_optimizers.is_optimizer(name):
            saved = saved_names.get(name) if isinstance(saved_names, dict) else saved_names
            names = self._names_of(name)
            loading.check_optimizer(
                stateful, state, name, saved_names=saved, names=names, made=made.get(name)
            )
        elif several_optimizers.is_schedule(name):
            loading.check_schedule(stateful, state, name)

    def _when_loaded(self, name: str) -> int:
        # Objects that may refuse their state load first; modules, which were compared down to the last tensor, load last.
        if isinstance(self._parts[name].stateful, nn.Module):
            return 2
        return 0 if name.startswith(_INCLUDE) else 1

    def _check_parts(self, content: Mapping[str, Any]) -> None:
        # An evaluation may come or go: what it keeps is about the run, no weight depends on it.
        for name in sorted((set(self._parts) ^ set(content)) - {PARAMETERS, _EVALUATION}):
            is_own = name.startswith(_INCLUDE)
            short = name.removeprefix(_INCLUDE)
            if name in self._parts:
                where = "only in the job"
                remedy = f"take `{short}` out of run.keep, or of snapshots.include" if is_own else None
            else:
                where = "only in the snapshot"
                key = f'[snapshots] include = {{ {short} = "..." }}'
                remedy = f"give it to run.keep again, or in a job file: {key}" if is_own else None
            remedy = f"{remedy}, or start a new run" if remedy else None
            raise StateError(f"the snapshot does not fit the job: `{name}` is {where}", remedy)

    def _parameter_names(self) -> Names:
        """Return the parameters' names: of the optimizer, or of each where there are several."""
        if "optimizer" in self.optimizers:
            return self._names_of("optimizer")
        return {name: self._names_of(name) for name in self.optimizers}

    def _names_of(self, part: str) -> loading.Names:
        names = {id(p): f"model/{name}" for name, p in self.model.named_parameters()}
        groups = self.optimizers[part].param_groups
        return [[names.get(id(p)) for p in group["params"]] for group in groups]


def _written_by_forward(model: nn.Module) -> set[int]:
    """Return the addresses of parameters that torch's own modules write in their forward."""
    kinds = nn.Embedding, nn.EmbeddingBag
    written = (m.weight for m in model.modules() if isinstance(m, kinds) and m.max_norm is not None)
    return {local_of(weight).data_ptr() for weight in written}


def _require_one_way(boxes: Mapping[str, Box]) -> None:
    """Raise StateError unless all sharded tensors are shared out in one way."""
    for key, box in boxes.items():
        first_key, first = next(iter(boxes.items()))
        if box.shards != first.shards:
            raise StateError(
                f"{key} is shared out among {box.shards.degree} ranks, and {first_key} among {first.shards.degree} or other ones",
                "use one mesh for all calls of fully_shard",
            )


def _stateful(name: str, value: Any) -> Any:
    for method in _METHODS:
        if isinstance(value, type) or not callable(getattr(value, method, None)):
            what = (
                "a class"
                if isinstance(value, type)
                else f"a {type(value).__module__}.{type(value).__qualname__}"
            )
            raise StateError(
                f"{_INCLUDE}{name} is {what}, without a `{method}` to call",
                "give its class the methods state_dict() and load_state_dict(state); a loop of your own may keep its numbers by name",
            )
    return value
