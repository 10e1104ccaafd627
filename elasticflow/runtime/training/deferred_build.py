"""Models that no worker can hold whole: built without memory, and filled in block by block with the values of the job's own code.

While the job's code builds the model, tensors of `LEAST` elements or more take no memory (torch's meta device). A record of operations
has all that fill or change them, and for random ones the state of the generator. The generator moves on as if they had run. `fill`
repeats the operations that concern one module. So the values are those of a model that is built at once, however the code sets them.
Where a snapshot gives them their values anyway, tensors that it holds get memory alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elasticflow.errors import StateError
from elasticflow.runtime.process import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import UntypedStorage

# Smaller tensors are real: a job's code may read the values of a handful of numbers.
LEAST = 1024
_META, _CPU = torch.device("meta"), torch.device("cpu")
_DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
# Answers to what code may ask of a tensor without memory: as if it had some. torch's own initializers skip tensors of the meta device.
_ANSWERS: dict[Any, Any] = {
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    Tensor.device.__get__: _CPU,
}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Place:
    """A tensor without memory, as an operation was given or returned it."""

    storage: UntypedStorage
    dtype: torch.dtype
    size: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Place:
        """Return the place of *tensor*."""
        return cls(
            tensor.untyped_storage(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def on(self, memory: UntypedStorage) -> Tensor:
        """Return the tensor at this place of real memory."""
        return torch.empty(0, dtype=self.dtype, device=memory.device).set_(
            memory, self.offset, self.size, self.strides
        )

    @property
    def form(self) -> tuple[Any, ...]:
        """Everything but the memory."""
        return self.dtype, self.size, self.strides, self.offset


@dataclass(frozen=True)
class _Operation:
    """An operation on tensors without memory.

    Attributes:
        arguments: Positional and named ones; a place stands for a tensor without memory.
        states: State of its generator before it, if it draws random numbers.
    """

    function: Any
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    made: tuple[_Place | None, ...]
    states: Tensor | None
    reads: tuple[UntypedStorage, ...]


class DeferredBuild(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Calls code that builds modules, and fills these in later.

    Args:
        resumes: A snapshot will be loaded into the modules.
    """

    def __init__(self, *, resumes: bool = False) -> None:
        super().__init__()
        self._resumes = resumes
        self._operations: list[_Operation] = []
        # Numbers of the operations that write a memory, by the memory's id: `_operations` keeps it alive.
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._order: dict[int, int] = {}
        self._digest = hashlib.blake2b(digest_size=16)

    def call(self, build: Callable[..., Any], *arguments: Any) -> Any:
        """Return what *build* returns; large tensors that it makes have no memory yet.

        Values that *build* reads of such a tensor are computed then.
        """
        with _Posing(), self:
            return build(*arguments)

    @property
    def digest(self) -> str:
        """A digest of everything that `fill` will do: the same on ranks whose code does the same."""
        return self._digest.hexdigest()

    def fill(self, module: nn.Module) -> None:
        """Give parameters and buffers of *module* their values, where they have none yet. Tied parameters stay tied.

        Raises:
            StateError: the module has such a tensor that is neither parameter nor buffer, or that was never given values.
        """
        known: dict[int, Tensor] = {}
        for name, inner in module.named_modules():
            # Setting an attribute would ask code of the job.
            unsaved = torch_private.unsaved_buffers_of(inner)
            for table in torch_private.tables_of(inner)[:2]:
                for key, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        if id(tensor) not in known:
                            place = f"{name}.{key}".lstrip(".")
                            known[id(tensor)] = self._real(tensor, place, is_saved=key not in unsaved)
                        table[key] = known[id(tensor)]
            for key, value in vars(inner).items():
                if isinstance(value, Tensor) and value.is_meta:
                    raise StateError(
                        f"{name or 'the model'} has a tensor {key} of {value.numel()} elements that is neither parameter nor buffer",
                        'keep it by register_buffer, or leave parallel.init = "meta" out',
                    )

    def _real(self, tensor: Tensor, name: str, *, is_saved: bool) -> Tensor:
        needs_values = not (self._resumes and is_saved and self._is_made(tensor.untyped_storage()))
        made: Tensor = self._value_now(tensor) if needs_values else _scratch(tensor)
        if made.is_meta:
            raise StateError(
                f"the code that builds the model makes {name} on the meta device itself, and gives it no values",
                'leave the meta device to parallel.init = "meta"',
            )
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            made.__dict__.update(tensor.__dict__)
        return made

    def _is_made(self, storage: UntypedStorage) -> bool:
        """Return whether an operation on record has made *storage*, which is on the meta device for that reason alone."""
        first = self._writers.get(id(storage), ())[:1]
        return any(
            place and place.storage is storage for number in first for place in self._operations[number].made
        )

    def _value_now(self, value: Any) -> Any:
        is_empty = isinstance(value, Tensor) and value.is_meta
        return _Place.of(value).on(self._replayed(value.untyped_storage())) if is_empty else value

    def _replayed(self, storage: UntypedStorage) -> UntypedStorage:
        """Return memory with the values of *storage*."""
        needed: set[int] = set()
        wanted, seen = [storage], {id(storage)}
        while wanted:
            for number in self._writers[id(wanted.pop())]:
                needed.add(number)
                more = [other for other in self._operations[number].reads if id(other) not in seen]
                seen.update(map(id, more))
                wanted += more
        memory: dict[int, UntypedStorage] = {}

        def value_of(each: Any) -> Any:
            return each.on(memory.get(id(each.storage), each.storage)) if isinstance(each, _Place) else each

        with torch.no_grad():
            for number in sorted(needed):
                operation = self._operations[number]
                args, kwargs = torch_private.tree_map(value_of, operation.arguments)
                results = _leaves(_run(operation.function, args, kwargs, operation.states))
                for place, result in zip(operation.made, results, strict=True):
                    if place is not None:
                        if place.form != _Place.of(result).form:
                            raise StateError(
                                f"{operation.function}, by which the code builds the model, gives another tensor in memory than without",
                                'leave parallel.init = "meta" out',
                            )
                        memory[id(place.storage)] = result.untyped_storage()
        return memory.get(id(storage), storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of the job's code, or note it if it is one on tensors without memory."""
        del types
        kwargs = kwargs or {}
        tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            return self._noted(func, args, kwargs, tensors)
        if func is torch.ops.aten.scalar_tensor.default and kwargs.get("device") == _META:
            # Torch makes the value of `weight[rows] = 0` where the weight seems to lie.
            return self._noted(func, args, {**kwargs, "device": _CPU}, tensors)
        if tensors or not _makes_on_cpu(func, kwargs):
            return func(*args, **kwargs)
        shape = func(*args, **{**kwargs, "device": _META, "pin_memory": False})
        if not isinstance(shape, Tensor) or shape.numel() < LEAST:
            return func(*args, **kwargs)
        return self._noted(func, args, kwargs, tensors)

    def _noted(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        schema = func._schema  # noqa: SLF001  # as torch's own modes read it
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        written = [
            each
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for each in _leaves(given.get(argument.name))
            if isinstance(each, Tensor)
        ]
        if _DATA_DEPENDENT & {*func.tags} or not all(tensor.is_meta for tensor in written):
            return self._computed(func, args, kwargs, written)
        on_meta = {**kwargs, "device": _META} if "device" in kwargs or not tensors else kwargs
        if "pin_memory" in on_meta:
            on_meta = {**on_meta, "pin_memory": False}
        generator = {"generator": None} if on_meta.get("generator") is not None else {}
        try:
            result = func(
                *torch_private.tree_map(_shape, args),
                **torch_private.tree_map(_shape, {**on_meta, **generator}),
            )
        except NotImplementedError:  # has no form for tensors without memory
            return self._computed(func, args, kwargs, written)
        states = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            states = (kwargs.get("generator") or torch.default_generator).get_state()
            # As many draws as the operation itself makes, which may depend on the values that it reads.
            self._computed(func, args, kwargs, written, to_scratch=True)
        sources = {id(t.untyped_storage()): t.untyped_storage() for t in tensors if t.is_meta}
        made = tuple(
            _Place.of(each)
            if isinstance(each, Tensor) and id(each.untyped_storage()) not in sources
            else None
            for each in _leaves(result)
        )
        if written or any(made):
            self._note(func, (args, kwargs), made, states, written, sources)
        return result

    def _computed(
        self, func: Any, args: Any, kwargs: Any, written: list[Tensor], *, to_scratch: bool = False
    ) -> Any:
        """Return what an operation makes of the values that its tensors have now; with *to_scratch* it writes others than *written*.

        Raises:
            StateError: it would write a tensor without memory.
        """
        if not to_scratch and any(tensor.is_meta for tensor in written):
            raise StateError(
                f"{func}, by which the code builds the model, writes large tensors and depends on values or writes small ones, too",
                'leave parallel.init = "meta" out',
            )
        scratched = set(map(id, written))

        def value_of(each: Any) -> Any:
            return _scratch(each) if id(each) in scratched else self._value_now(each)

        return func(*torch_private.tree_map(value_of, args), **torch_private.tree_map(value_of, kwargs))

    def _note(
        self,
        func: Any,
        arguments: Any,
        made: tuple[_Place | None, ...],
        states: Tensor | None,
        written: list[Tensor],
        sources: dict[int, UntypedStorage],
    ) -> None:
        kept = torch_private.tree_map(_kept, arguments)
        number = len(self._operations)
        places = [place.storage for place in made if place is not None]
        for storage in (*places, *(tensor.untyped_storage() for tensor in written)):
            self._writers[id(storage)].append(number)
            self._order.setdefault(id(storage), len(self._order))
        self._operations.append(_Operation(func, kept, made, states, tuple(sources.values())))
        self._digest.update(str(func).encode())
        if states is not None:
            self._digest.update(states.numpy().tobytes())
        for each in (*_leaves(kept), *made):
            self._digest.update(self._text(each).encode())

    def _text(self, value: Any) -> str:
        if isinstance(value, _Place):
            return repr((self._order[id(value.storage)], value.form))
        if isinstance(value, Tensor):
            return hashlib.blake2b(value.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        return "" if isinstance(value, torch.Generator) else repr(value)


class _Posing(TorchFunctionMode):
    """Has tensors without memory say that they lie in the CPU's memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for a tensor, or call *func*."""
        del types
        if func == _SET_DATA and args[0].is_meta and not args[1].is_meta:
            # Torch exchanges the data of tensors of one device alone.
            args = args[0], torch.empty(args[1].shape, dtype=args[1].dtype).copy_(args[1])
        return _ANSWERS[func] if func in _ANSWERS and not kwargs else func(*args, **(kwargs or {}))


def _makes_on_cpu(func: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether *func* makes a tensor of nothing, in the CPU's memory."""
    takes = any(argument.name == "device" for argument in func._schema.arguments)  # noqa: SLF001
    return takes and torch.device(kwargs.get("device") or _CPU) == _CPU


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    torch_private.tree_map(found.append, value)
    return found


def _scratch(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return value


def _shape(value: Any) -> Any:
    return value.to(_META) if isinstance(value, Tensor) and not value.is_meta and value.dim() else value


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Place.of(value) if value.is_meta else value.detach().clone()
    return value


def _run(func: Any, args: Any, kwargs: dict[str, Any], states: Tensor | None) -> Any:
    """Run an operation, with its generator in a state of *states*; the job's generators stay as they are."""
    if states is None:
        return func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        generator = torch.Generator()
        generator.set_state(states)
        return func(*args, **{**kwargs, "generator": generator})
    before = torch.get_rng_state()
    try:
        torch.set_rng_state(states)
        return func(*args, **kwargs)
    finally:
        torch.set_rng_state(before)
