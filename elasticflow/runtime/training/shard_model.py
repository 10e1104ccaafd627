"""Shards a model among the ranks of each replica, by torch's `fully_shard` (FSDP2)."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elasticflow.errors import StateError
from elasticflow.runtime.process import process_group, torch_private
from elasticflow.runtime.process.shard_layout import offloads
from elasticflow.runtime.process.sharded_tensors import (
    is_sharded,
    refuse_draws,
    require_no_hooks,
    sharded_modules,
)
from elasticflow.runtime.training import model_buffers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.shard_layout import Sharding
    from elasticflow.runtime.training.deferred_build import DeferredBuild

_BLOCKS = "run.wrap(model, blocks=model.layers): modules that are called one after the other, such as the layers of a transformer"
_WRAP = f'parallel.wrap = ["module:Class"] names the classes of blocks in a job file; in a loop {_BLOCKS}'
# Optimizers of torch.optim whose step treats each element of a parameter by itself.
_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def shard_model(
    worker: Worker,
    model: nn.Module,
    sharding: Sharding | None,
    blocks: Iterable[nn.Module] | None = None,
    build: DeferredBuild | None = None,
) -> None:
    """Shard *model* among the ranks of each replica: each block by itself, then the rest. Collective: every rank.

    Each rank has its rows of rank 0's values afterwards, on its device, or offloaded: in the CPU's memory. Where no rank shares a model
    with another one, and nothing is offloaded, it is only moved.

    Args:
        blocks: Modules to gather one at a time. None: those of *sharding*.
        build: Fills the model in, one block after the other, if its large tensors have no memory yet.

    Raises:
        StateError: the model cannot be sharded so; the message names the module or parameter. Nothing is changed then. Or the
            ranks did not build the same model.
    """
    if build is not None:
        _require_same_build(worker, build)
    if sharding is None or not worker.layout.is_cut:
        if build is not None:
            build.fill(model)
        model.to(worker.device)
        return
    chosen = blocks_of(model, sharding, blocks)
    # No reference is held afterwards: a block's memory is free as soon as it is cut.
    model_buffers.send(worker, [t.detach() for t in (*model.parameters(), *model.buffers()) if not t.is_meta])
    layout = worker.layout
    groups = [
        process_group.new_group(worker.identity, layout.peers_of(replica))
        for replica in range(layout.replicas)
    ]
    fully_shard_blocks(model, chosen, groups[layout.replica], worker.device.type, sharding, build)


def fully_shard_blocks(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    group: dist.ProcessGroup,
    device_type: str,
    sharding: Sharding,
    build: DeferredBuild | None = None,
) -> None:
    """Shard each of *blocks* by itself among the ranks of *group*, then the rest of *model*; *build* fills each in before."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = DeviceMesh.from_group(group, device_type, mesh_dim_names=("shard",))
    is_offloaded = offloads(sharding, device_type)
    # Pinned memory: a block is on its way to the device while the one before is at work.
    policy = CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
    marks = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
    for module in (*blocks, model):
        if build is not None:
            build.fill(module)
        cut = fully_shard(
            module, mesh=mesh, reshard_after_forward=sharding.reshard_after_forward, offload_policy=policy
        )
        if device_type == "cpu":
            # Gloo gathers while this thread waits: another block gathered ahead would only take memory.
            cut.set_modules_to_backward_prefetch([cut])
    for name, parameter in model.named_parameters():
        vars(parameter).update(marks[name])  # such as _no_weight_decay, by which a script makes groups
    refuse_draws(torch.device("cpu" if is_offloaded else device_type))


def blocks_of(
    model: nn.Module, sharding: Sharding, blocks: Iterable[nn.Module] | None = None
) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: *blocks*, or else those of *sharding*; inner ones before those around them.

    Raises:
        StateError: the model cannot be sharded so; the message names the module or parameter.
    """
    chosen = _named_blocks(model, sharding.wrap) if blocks is None else list(blocks)
    _require_fitting(model, chosen)
    # Torch leaves to an outer call what an inner one has taken before.
    depths = {id(module): name.count(".") for name, module in model.named_modules()}
    return sorted(chosen, key=lambda block: -depths[id(block)])


def block_bytes(model: nn.Module, blocks: Sequence[nn.Module]) -> int:
    """Return the size of the largest part of *model* that is gathered as a whole: one of *blocks*, or the rest."""
    sizes: dict[int, int] = {}
    for name, parameter in model.named_parameters():
        owner = id(_owner(name, blocks, model))
        sizes[owner] = sizes.get(owner, 0) + parameter.nbytes
    return max(sizes.values(), default=0)


def _require_same_build(worker: Worker, build: DeferredBuild) -> None:
    digests = worker.gather_text(build.digest)
    if other := next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None):
        raise StateError(
            f"rank {other} builds a model with other values than rank 0, and each would keep rows of its own",
            'draw from torch, random or numpy, which begin alike on every rank; or leave parallel.init = "meta" out',
        )


def require_elementwise(optimizers: Iterable[tuple[str, Any]]) -> None:
    """Make sure that steps on rows of a parameter have the bits of steps on the whole.

    Raises:
        StateError: an optimizer treats a parameter as a whole, or is not known to treat each element by itself; the message names it.
    """
    for name, optimizer in optimizers:
        kind = type(optimizer)
        is_known = kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE
        if not is_known:
            raise StateError(
                f"{name} is a {kind.__module__}.{kind.__qualname__}, which is not known to treat each element of a parameter by "
                "itself: on a part of a parameter it would compute something else",
                f"one of torch.optim: {', '.join(_ELEMENTWISE)}",
            )
        if any(group.get("fused") for group in optimizer.param_groups):
            raise StateError(
                f"{name} has fused=True, whose last elements round differently on a part of a parameter",
                f"leave fused out, or foreach=True: torch.optim.{kind.__name__}(..., foreach=True)",
            )


def require_made_after(model: nn.Module, optimizers: Iterable[Any]) -> None:
    """Make sure that the optimizers of a sharded model were made once it was sharded.

    Raises:
        StateError: none of them moves a parameter that the model has now.
    """
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    moved = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if sharded_modules(model) and trained and not trained & moved:
        raise StateError(
            "the optimizer moves no parameter of the sharded model: sharding replaces a model's parameters by this worker's rows",
            "make the optimizer of model.parameters() once the model is sharded, after run.wrap or fully_shard",
        )


def _named_blocks(model: nn.Module, entries: Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules of the classes that *entries* name; without any the elements of the longest ModuleList."""
    if not entries:
        return _longest_list(model)
    found: list[nn.Module] = []
    for entry in entries:
        kind = pkgutil.resolve_name(entry)
        of_kind = [module for module in model.modules() if isinstance(module, kind) and module is not model]
        if not of_kind:
            raise StateError(
                f"{entry} is named in wrap, and the model has no such module",
                "name a class of the model's blocks: parallel.wrap, or Sharding(wrap=...)",
            )
        found += of_kind
    inner = {id(module) for block in found for module in block.modules() if module is not block}
    return list({id(block): block for block in found if id(block) not in inner}.values())


def _longest_list(model: nn.Module) -> list[nn.Module]:
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise StateError(
            "the model has no ModuleList whose elements could be sharded one by one",
            _WRAP,
        )
    return max(lists, key=len)


def _require_fitting(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    names = {id(module): name or "the model itself" for name, module in model.named_modules()}
    if not blocks:
        raise StateError("run.wrap was given no blocks to shard", _BLOCKS)
    for block in blocks:
        if id(block) not in names or block is model:
            raise StateError(f"a block, a {type(block).__name__}, is no part of the model", _BLOCKS)
        if type(block).forward is nn.Module.forward:
            raise StateError(
                f"{names[id(block)]} is a {type(block).__name__} without a forward, so it is never gathered as a block",
                _WRAP,
            )
    if torch_private.is_compiled(model):
        raise StateError(
            "the model is compiled as a whole, and its blocks are gathered one at a time",
            "compile the blocks: for block in blocks: block.compile()",
        )
    _require_parameters(model)
    _require_apart(model, blocks, names)
    _require_one_dtype(model, blocks)


def _require_parameters(model: nn.Module) -> None:
    if sharded_modules(model) or any(map(is_sharded, model.parameters())):
        raise StateError(
            "the model is sharded already",
            "leave fully_shard out: run.wrap calls it on the model and its blocks",
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise StateError(
                f"{name} has no dimension, and so no rows to share out",
                "give it one: torch.zeros(1), not torch.zeros(())",
            )
        if not parameter.is_contiguous():
            raise StateError(f"{name} is not contiguous in memory", "leave channels_last out")
        if not parameter.numel():
            raise StateError(f"{name} has no elements", "leave it out of the model")
        require_no_hooks(parameter, name)
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise StateError(
                f"{name} is a SyncBatchNorm, whose statistics are of whatever runs at once", "use BatchNorm"
            )


def _require_apart(model: nn.Module, blocks: Sequence[nn.Module], names: dict[int, str]) -> None:
    owners: dict[int, tuple[str, nn.Module | None]] = {}
    seen: set[int] = set()
    for block in blocks:
        if id(block) in seen:
            raise StateError(
                f"{names[id(block)]} is named twice among the blocks, or is called at two places", _BLOCKS
            )
        seen.add(id(block))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = _owner(name, blocks, model)
        known = owners.setdefault(id(parameter), (name, owner))
        if known[1] is not owner:
            raise StateError(
                f"{name} is the same parameter as {known[0]}, and not both are of one block",
                "leave the block out, so that both are gathered with the rest of the model, or untie them",
            )


def _require_one_dtype(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Make sure that torch can reduce the gradients of each block in one tensor; frozen parameters may have other dtypes."""
    found: dict[int, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            owner = id(_owner(name, blocks, model))
            found.setdefault(owner, {}).setdefault(parameter.dtype, name)
    for dtypes in found.values():
        if len(dtypes) > 1:
            told = " and ".join(f"{name} of {dtype}" for dtype, name in dtypes.items())
            raise StateError(
                f"trained parameters that are gathered together have several dtypes: {told}",
                "give them one dtype where the model is made, such as model.float(); frozen parameters may have others",
            )


def _owner(name: str, blocks: Sequence[nn.Module], model: nn.Module) -> nn.Module | None:
    """Return the block that the parameter of this name lies in; None: none, it is gathered with the rest of the model."""
    module: Any = model
    found = None
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if any(module is block for block in blocks):
            found = module
    return found
