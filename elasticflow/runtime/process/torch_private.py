# ruff: noqa: SLF001  # this is the one module that may
"""Everything that elasticflow uses of torch without torch's promise to keep it.

Seen in torch 2.13, 2.14 and 2.15, the same in each unless an entry says otherwise. Tests try each entry
(`tests/runtime/process/test_torch_private.py`), so that a version that behaves differently fails there and not in a user's
run. If a version lacks a name, `TorchChangedError` names it, at import or at its first use, unless an entry says otherwise.

Three more places depend on a version of torch: `deferred_compiler.py` beside this module, whose whole subject is one;
`launcher/fork_server/probe.py` (torchrun's own parser; nothing underscored), since the launcher does not import
the runtime; and `errors.py`, with the texts of a collective that fails.
"""

from __future__ import annotations

import functools
import inspect
import operator
import os
import pkgutil
import queue
import secrets
import sys
from contextlib import contextmanager
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Public; torch's type hints do not say so.
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from elasticflow.errors import TorchChangedError
from elasticflow.runtime.process import deferred_compiler
from elasticflow.system.installation import torch_requirement
from elasticflow.system.shared_memory import memory_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.optim import Optimizer

# Names of torch that others take from here.
__all__ = ["HashStore", "PrefixStore", "Store", "TCPStore"]


def _changed(name: str, use: str) -> TorchChangedError:
    return TorchChangedError(
        f"torch {torch.__version__} has no {name}, which elasticflow needs {use}",
        f"pip install '{torch_requirement()}'",
    )


def _required(name: str, use: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise _changed(name.replace(":", "."), use) from error


def _require_attributes(thing: Any, names: Sequence[str], use: str) -> None:
    for name in names:
        if not hasattr(thing, name):
            raise _changed(f"{type(thing).__name__}.{name}", use)


# Many tensors in one call: ten times as fast as single calls if the tensors are small. Targets are changed in place.
foreach_copy_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _required(
    "torch:_foreach_copy_", "to copy many tensors at once"
)
foreach_div_: Callable[[Sequence[Tensor], float], None] = _required(
    "torch:_foreach_div_", "to divide many gradients at once"
)

_broadcast_coalesced = _required(
    "torch._C._distributed_c10d:_broadcast_coalesced", "to send buffers in few messages"
)


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[Tensor], bucket_bytes: int) -> None:
    """Give every rank of *group* rank 0's *tensors*, as DistributedDataParallel does. Collective: every rank."""
    _broadcast_coalesced(group, tensors, bucket_bytes, 0)


# Number of times that a tensor was written in place.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
_require_attributes(torch.empty(0), ["_version"], "to see that a buffer was written")


# Dicts of a module that `state_dict` walks through; the same objects as long as the module lives.
_MODULE_TABLES = "_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks"
_require_attributes(nn.Module(), [*_MODULE_TABLES, "_save_to_state_dict"], "to see that a state is as it was")
tables_of: Callable[[nn.Module], tuple[dict[Any, Any], ...]] = operator.attrgetter(*_MODULE_TABLES)
# A module's own buffers by name, also None: a buffer can be replaced by assignment.
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")
_require_attributes(nn.Module(), ["_non_persistent_buffers_set"], "to see what a state leaves out")
# The names of the buffers that the module's `state_dict` leaves out.
unsaved_buffers_of: Callable[[nn.Module], set[str]] = operator.attrgetter("_non_persistent_buffers_set")

# The last part of the key of `get_extra_state` in a module's state.
EXTRA_STATE: str = _required(
    "torch.nn.modules.module:_EXTRA_STATE_KEY_SUFFIX", "to tell a module's own state"
)


def collectives_so_far() -> int:
    """Return how many collectives this process has begun in the default group; 0 where there is none."""
    if not dist.is_initialized():
        return 0
    return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())  # type: ignore[attr-defined]


def has_plain_state(module: nn.Module) -> bool:
    """True if `state_dict` of the module gives its parameters and buffers and nothing else.

    A hook of torch's own, by which `fully_shard` has a state be of sharded parameters, adds nothing.
    """
    kind = type(module)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and "state_dict" not in vars(module)
        and not module._state_dict_hooks
        and all(map(_is_hook_of_fsdp, module._state_dict_pre_hooks.values()))
    )


def _is_hook_of_fsdp(hook: Any) -> bool:
    """True if *hook* only puts sharded parameters back in the place of gathered ones, before `state_dict` reads them.

    Told by its code, which no other function has. A version of torch with another hook reads such a state each time, and is right.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`_register_state_dict_hooks`); 2.13, 2.14.
    """
    group = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if group is None:
        return False
    register: Any = getattr(getattr(group, "FSDPParamGroup", None), "_register_state_dict_hooks", None)
    codes = getattr(getattr(register, "__code__", None), "co_consts", ())
    code = getattr(hook, "__code__", None)
    return code is not None and any(code is each and each.co_name == "to_sharded_hook" for each in codes)


# Commands that train nothing, and scripts under plain python, import this module first.
deferred_compiler.defer()


# Hooks of an optimizer that `state_dict` calls, before and after, by number.
_OPTIMIZER_HOOKS = "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"
_require_attributes(
    torch.optim.Optimizer([torch.empty(0)], {}), _OPTIMIZER_HOOKS, "to see that a state is as it was"
)
state_hooks_of: Callable[[Optimizer], tuple[dict[int, Any], dict[int, Any]]] = operator.attrgetter(
    *_OPTIMIZER_HOOKS
)


# Scale of a GradScaler and steps since it changed, as tensors on the device; None before the first `scale`.
_SCALE = "_scale", "_growth_tracker"
_require_attributes(torch.amp.GradScaler("cpu"), _SCALE, "to capture a scaler's state without waiting")
scale_of: Callable[[torch.amp.GradScaler], tuple[Tensor | None, Tensor | None]] = operator.attrgetter(*_SCALE)


tree_map: Callable[..., Any] = _required("torch.utils._pytree:tree_map", "to keep the arguments of a forward")
TorchDispatchMode: Any = _required(
    "torch.utils._python_dispatch:TorchDispatchMode", "to note how a model is built"
)


total_norm: Callable[..., Tensor] = _required("torch.nn.utils.clip_grad:_get_total_norm", "to clip gradients")


def replace_total_norm(norm: Callable[..., Tensor]) -> None:
    """Have `clip_grad_norm_` and `get_total_norm` call *norm*: torch looks its own function up at each call."""
    clip_grad: Any = pkgutil.resolve_name("torch.nn.utils.clip_grad")
    clip_grad._get_total_norm = nn.utils.get_total_norm = norm


# The part of a DTensor that this rank holds. `to_local` gives another view of it each time, as a step of autograd.
local_tensor_of: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")


def has_gradient_hooks(tensor: Tensor) -> bool:
    """True if functions were registered that see or change the gradient of *tensor*."""
    _require_attributes(
        tensor, ["_backward_hooks", "_post_accumulate_grad_hooks"], "to see hooks of parameters"
    )
    held: Any = tensor
    return bool(held._backward_hooks) or bool(held._post_accumulate_grad_hooks)


def before_gathers(act: Callable[[Any], None]) -> None:
    """Have *act* called with the mesh of a DTensor before the tensor is laid out anew, as `full_tensor` does. For the whole process."""
    from torch.distributed.tensor import DTensor

    redistribute = DTensor.redistribute

    @functools.wraps(redistribute)
    def announced(tensor: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        act(tensor.device_mesh)
        return redistribute(tensor, *args, **kwargs)

    DTensor.redistribute = announced  # type: ignore[method-assign,assignment]


def refuse_draws_into_parts(error: Callable[[], Exception]) -> None:
    """Have random draws into DTensors raise what *error* returns, for the CPU: torch itself draws the same numbers for the part of each rank.

    On a GPU torch moves the generator to each rank's place. Nothing happens where no DTensor can exist yet.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    place: Any = pkgutil.resolve_name("torch.distributed.tensor._random")
    _require_attributes(place, ["_rng_tracker"], "to refuse random draws into parts of a tensor")
    place._rng_tracker = _RefusedDraws(error)


class _RefusedDraws:
    """Stands where DTensor looks for the generators of a mesh."""

    distribute_region_enabled = True

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def _distribute_region(self, *_: Any, **__: Any) -> Any:
        raise self._error()


def has_gathered_gradients(module: Any) -> bool:
    """True if a module that `fully_shard` was called with holds gradients that no rank has passed on to the others.

    `set_requires_gradient_sync(False)` has the backward leave them with the gathered parameters: the sharded ones, which all
    other code sees, have none.
    """
    use = "to see gradients that a sharded model accumulates"
    state = module._get_fsdp_state()
    _require_attributes(state, ["_fsdp_param_groups"], use)
    for parameter in (each for group in state._fsdp_param_groups for each in group.fsdp_params):
        _require_attributes(parameter, ["unsharded_accumulated_grad"], use)
        gathered = getattr(parameter, "_unsharded_param", None)  # before the first forward there is none
        if parameter.unsharded_accumulated_grad is not None or getattr(gathered, "grad", None) is not None:
            return True
    return False


def storage_id(tensor: Tensor) -> int:
    """Return an id that tensors share if they share memory, also on the meta device."""
    return int(tensor.untyped_storage()._cdata)


_require_attributes(torch.UntypedStorage(0), ["_cdata"], "to tell memory apart")  # type: ignore[no-untyped-call]


def address_of(generator: torch.Generator) -> int | None:
    """Return the generator's address in memory; None if torch does not tell it: generators are then seeded each time."""
    address = getattr(generator, "_cdata", None)
    return None if address is None else int(address)


_LOADER_ITERATOR = _required(
    "torch.utils.data.dataloader:_BaseDataLoaderIter", "to see which loaders a script reads"
)


def loader_processes_of(batches: Any) -> list[Any]:
    """Return the processes behind an iterator of a DataLoader with workers."""
    _require_attributes(batches, ["_workers"], "to watch and end loader processes")
    processes: list[Any] = batches._workers
    return processes


def batches_given(batches: Any) -> int | None:
    """Return the number of batches that an iterator of a DataLoader has given; None for every other object."""
    if not isinstance(batches, _LOADER_ITERATOR):
        return None
    _require_attributes(batches, ["_num_yielded"], "to see which loaders a script reads")
    given: int = batches._num_yielded
    return given


def is_next_delivered(batches: Any) -> bool:
    """Return whether an iterator of a DataLoader with workers and pinned memory gives its next batch without waiting.

    False where that cannot be told: batches are not pinned, or a version of torch lacks a name. Nothing is taken out.
    """
    tasks, wanted = getattr(batches, "_task_info", {}), getattr(batches, "_rcvd_idx", None)
    if len(tasks.get(wanted, ())) == 2:  # it came before its turn: worker and batch
        return True
    delivered = getattr(batches, "_data_queue", None)
    if not isinstance(
        delivered, queue.Queue
    ):  # without the thread that pins: of processes, which does not show what is in it
        return False
    with delivered.mutex:
        return any(number == wanted for number, _ in delivered.queue)


def forget_loader_process() -> None:
    """Have `torch.utils.data.get_worker_info()` return None in this loader process."""
    from torch.utils.data._utils import worker

    if not hasattr(worker, "_worker_info"):
        raise _changed(
            "torch.utils.data._utils.worker._worker_info", "to read data shards in loader processes"
        )
    worker._worker_info = None


def share_batches_without_names() -> None:
    """Have this loader process hand its batches over in memory files without a name, and not in `/dev/shm`.

    Torch gives a file there its name for as long as it takes to reserve the memory: a process that is killed meanwhile
    leaves both; and a container has 64 MiB there by default. Torch's other way of sharing, `file_system`, stays as it is.
    Python hands files over by a socket in a temporary folder of each process, which a killed one leaves, too: here the
    socket has no place in the file system.

    Source: multiprocessing/connection.py (`Listener.__init__` asks `arbitrary_address`), CPython 3.11 to 3.14.
    """
    address_of = vars(connection)["arbitrary_address"]

    def without_place(family: str) -> Any:
        return f"\0elasticflow-{secrets.token_hex(16)}" if family == "AF_UNIX" else address_of(family)

    vars(connection)["arbitrary_address"] = without_place
    storage: Any = torch.UntypedStorage
    for name in ("_new_shared_fd_cpu", "_new_using_fd_cpu", "_share_fd_cpu_", "_swap_data_ptr_"):
        if not hasattr(storage, name):
            raise _changed(f"torch.UntypedStorage.{name}", "to read data in loader processes")
    new_of_torch, share = storage._new_using_fd_cpu, storage._share_fd_cpu_

    def new(size: int) -> Any:
        if size == 0:  # nothing to map
            return new_of_torch(size)
        file = memory_file("batch")
        try:
            os.posix_fallocate(file, 0, size)  # a lack of memory is an error here, and a SIGBUS later
            return storage._new_shared_fd_cpu(file, size)
        finally:
            os.close(file)

    def share_here(self: Any) -> Any:
        if not self.is_shared() and self.nbytes():
            shared = new(self.nbytes())
            _bytes_of(shared).copy_(_bytes_of(self))
            self._swap_data_ptr_(shared)
        return share(self)

    storage._new_using_fd_cpu, storage._share_fd_cpu_ = staticmethod(new), share_here


def _bytes_of(storage: Any) -> Tensor:
    # Copied as tensors: torch's copy of storages keeps Python's lock.
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def bind_to_cores(mode: str, gpu: int) -> None:
    """Bind this process to cores near GPU number *gpu*, by torchrun's rule for `--numa-binding` *mode*.

    Raises:
        Exception: the process cannot be bound, for example for want of a GPU.
    """
    from torch.numa import binding

    bind = _required(
        "torch.numa.binding:_maybe_apply_numa_binding_to_current_process", "for torchrun.numa_binding"
    )
    # 2.13: gpu_index; from 2.14 on: device_index.
    index = next(name for name in inspect.signature(bind).parameters if name.endswith("_index"))
    bind(**{index: gpu, "numa_options": binding.NumaOptions(binding.AffinityMode(mode))})


def on_compile(begin: Callable[[object], None], end: Callable[[object], None]) -> None:
    """Have *begin* and *end* called before and after each compilation of torch.compile in this process."""
    handler = _required("torch._dynamo.callback:callback_handler", "to see that torch compiles")
    handler.register_start_callback(begin)
    handler.register_end_callback(end)


def compile_deterministically() -> None:
    """Have torch.compile make kernels that depend on nothing but code and shapes."""
    from torch import _dynamo, _inductor

    use = 'to compile with train.consistency = "exact"'
    _require_attributes(_dynamo.config, ["automatic_dynamic_shapes"], use)
    _require_attributes(_inductor.config, ["deterministic"], use)
    # torch compiles kernels for any size once it sees a second size, and they add in another order: bits would depend on the past.
    _dynamo.config.automatic_dynamic_shapes = False
    _inductor.config.deterministic = True  # no kernel is chosen by its speed


def warm_up_compiler(*, has_gpu: bool) -> None:
    """Import torch's compiler, and have it do the work that is the same for every model, which saves each restart seconds.

    Nothing is computed, no accelerator is touched, and no thread remains: the process may fork workers afterwards. A name
    that a version of torch lacks makes restarts slower, and is no error.

    Args:
        has_gpu: Workers compile for an accelerator; this process must not ask.
    """
    import torch._inductor.compile_fx  # noqa: F401  # its first use would
    from torch._inductor import codecache, cpu_vec_isa
    from torch._inductor.codegen import common

    # Imports the kernel generators of every device: 0.1 s.
    getattr(common, "init_backend_registration", lambda: None)()
    # Digest of torch's own code, a part of every key of the cache: 0.2 s.
    getattr(codecache, "torch_key", lambda: None)()
    if not has_gpu:
        # Tries, in a process of its own, the vector instructions that kernels for processors use: 0.3 s.
        getattr(cpu_vec_isa, "pick_vec_isa", lambda: None)()
    if _can_hide_accelerators():
        with _accelerators_hidden():
            _trace_for_the_first_time()


# Modules whose `is_available` and `device_count` answer without asking a driver where `_is_compiled()` is false.
_HIDDEN: tuple[Any, ...] = (torch.cuda, torch.xpu)


def _can_hide_accelerators() -> bool:
    from torch._dynamo import device_interface

    return all(hasattr(module, "_is_compiled") for module in _HIDDEN) and hasattr(
        device_interface, "_device_initialized"
    )


@contextmanager
def _accelerators_hidden() -> Iterator[None]:
    """Within this context torch finds no accelerator, and asks no driver; afterwards nothing of torch remembers that.

    A trace reads the accelerator's random state and asks what Triton can do there, either of which opens the driver.
    Public functions stay the same objects: dynamo's tables hold them. A module of torch that is imported meanwhile is told
    the truth, which it keeps.

    Source: torch/_dynamo/convert_frame.py (`preserve_global_state`), torch/utils/_triton.py (`has_triton` and its like
    keep their answers), torch/_dynamo/device_interface.py (`init_device_reg` counts devices once); 2.13, 2.14.
    """
    from torch._dynamo import device_interface
    from torch.utils import _triton

    compiled = [module._is_compiled for module in _HIDDEN]
    for module, is_compiled in zip(_HIDDEN, compiled, strict=True):
        module._is_compiled = lambda is_compiled=is_compiled: _is_importing_torch() and is_compiled()
    try:
        yield
    finally:
        for module, is_compiled in zip(_HIDDEN, compiled, strict=True):
            module._is_compiled = is_compiled
        for function in vars(_triton).values():
            getattr(function, "cache_clear", lambda: None)()
        device_interface._device_initialized = False


def _is_importing_torch() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").startswith("torch."):
            return True
        frame = frame.f_back
    return False


def is_accelerator_refused() -> bool:
    """True if torch refuses the accelerator to this process, as it was forked from one that had opened the driver."""
    modules = [torch.cuda, torch.xpu]
    accelerator = torch.accelerator.current_accelerator()  # the build's: no driver is asked
    if accelerator is not None:
        modules.append(torch.get_device_module(accelerator))
    return any(getattr(module, "_is_in_bad_fork", lambda: False)() for module in modules)


def _trace_for_the_first_time() -> None:
    """Trace a model of common layers: torch reads their sources and imports the modules that only tracing needs: 0.5 s."""
    from torch._dynamo.utils import counters

    def compute_nothing(*_: object) -> Callable[..., tuple[Tensor]]:
        return lambda *_: (torch.empty(0),)

    with torch.device("meta"):  # draws no random numbers
        convolution = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        model = nn.Sequential(*convolution, nn.Linear(18, 2), nn.LayerNorm(2), nn.Dropout(0.1), nn.GELU())
    model.to_empty(device="cpu")

    def forward(images: Tensor) -> Any:  # torch does not trace a container of its own
        return model(images)

    torch.compile(forward, backend=compute_nothing)(torch.empty(2, 1, 8, 8))
    torch._dynamo.reset()
    counters.clear()


def compiled_graphs() -> tuple[int, int]:
    """Return the number of graphs that this process has taken from the compiler's cache, and the number that it has compiled.

    Graphs that cannot be cached count as compiled.
    """
    counters = _required("torch._dynamo.utils:counters", "to tell what the compiler's cache saves")[
        "inductor"
    ]
    made = counters["fxgraph_cache_miss"] + counters["fxgraph_cache_bypass"]
    return int(counters["fxgraph_cache_hit"]), int(made)


def precompile_headers_if(is_wanted: Callable[[], bool]) -> None:
    """Have torch's compiler precompile headers of C++ only where *is_wanted()*.

    In torch 2.13 each process that loads a CPU kernel preprocesses a header, to find out whether the precompiled form
    exists; on a new machine it precompiles the header (150 MB, some seconds), even if all kernels are there.
    Kernels have the same names and bits either way. A version of torch without that function stays as it is.
    """
    from torch._inductor import codecache

    precompile = getattr(codecache, "_precompile_header", None)
    if precompile is None:
        return

    def precompile_if_wanted(header: str, *args: Any, **options: Any) -> Any:
        # Header included before a kernel's own code: the header itself, not its precompiled form.
        return precompile(header, *args, **options) if is_wanted() else header

    codecache._precompile_header = precompile_if_wanted  # type: ignore[assignment]


# Attribute in which `torch.compile(model)` keeps the model, and the name of its class.
COMPILED_MODEL = "_orig_mod"
_COMPILED_CLASS = "OptimizedModule"


def is_compiled(module: nn.Module) -> bool:
    """True if `torch.compile` made the module, or `module.compile()` was called."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == _COMPILED_CLASS
    )


# Modules whose objects are torch's own business and hold no state of a job. A name that torch drops does no harm.
MACHINERY = ("torch._C", "torch._dynamo", "torch._inductor")


# Messages of torch errors without a class of their own. If torch changes a message, the failure counts as an error of the
# job's code, in torch's own words.
LOADER_TIMED_OUT = "DataLoader timed out"
# A signal ended a loader process: the words of the handler of SIGCHLD, whose error is the cause of an error that names only the process.
LOADER_KILLED = "is killed by signal: "
# Survivors of a dead rank get RuntimeErrors of gloo, recognised by the place in gloo that raises them.
PEER_LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "gloo/gloo")
# The allocator for main memory.
NO_MEMORY = "DefaultCPUAllocator: "
# DistributedDataParallel: the step before left out a parameter, without and with a search for those; a gradient came twice.
STILL_NO_GRADIENT = "Since `find_unused_parameters=True` is enabled, this likely"
NO_GRADIENT = "Expected to have finished reduction in the prior iteration"
GRADIENT_TWICE = "Expected to mark a variable ready only once"
# FSDP2: an operation got a parameter that is not gathered.
SHARDED_PART = "got mixed torch.Tensor and DTensor"
# The refusal of an operation without a deterministic form; its name, such as `put_` or `median CUDA with indices output`.
NOT_DETERMINISTIC = r"([^\s:][^\n:]*) does not have a deterministic"
