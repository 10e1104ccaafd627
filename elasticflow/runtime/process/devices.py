"""The device that a worker trains on: chosen by number and type, of one type on all ranks, and of the type before a restart."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch

from elasticflow.errors import DeviceError, OtherDeviceError
from elasticflow.protocol import worker_environment
from elasticflow.runtime.process import torch_private

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from elasticflow.protocol.control_store import RemoteControlStore
    from elasticflow.runtime.process.identity import Identity
    from elasticflow.runtime.process.torch_private import Store

AUTO = "auto"
"""Any type: the machine's accelerator if it has one, else the CPU."""

_CPU = torch.device("cpu")
# Key of the device type on which the launch began.
_BEGAN_ON = "device"
# The first end of a worker has the others killed.
_WRONG_RANKS_FIRST_S = 2.0
_OR_VARIABLE = f" (without a job file, {worker_environment.DEVICE})"
_ONE_DEVICE_FOR_ALL = (
    "start at most as many workers on a node as it has devices, by --set nodes.nproc_per_node=NUMBER, or train on the CPU: "
    "--set nodes.device=cpu"
)


def choose_device(identity: Identity, wanted: str = AUTO) -> torch.device:
    """Return this worker's device, which torch has selected: the accelerator of its local rank, or the CPU.

    The CPU is chosen where the machine has no accelerator that torch was built for, and where *wanted* is "cpu". Then
    CUDA's and ROCm's devices are hidden from this process, and others are refused: `Optimizer.step` asks for the
    accelerator's current stream also if all parameters are on the CPU (torch 2.13 and 2.14,
    `Optimizer._accelerator_graph_capture_health_check`), which opens a context on device 0 in each worker.

    A machine with fewer devices than workers is refused, with one exception: `srun --gpus-per-task=1` starts each worker as a
    Slurm task and gives each task a device, which has number 0 in every worker. torchrun and our agent are one task that
    starts all workers of a machine, so that these see the same devices, and one device is too few for two workers.

    With ELASTICFLOW_SHARE_DEVICE=1 all workers of a machine share device 0, and gloo also exchanges its tensors, since NCCL
    refuses two ranks on one device. It is there for tests with several workers on a machine with one GPU.

    Also binds this process to the cores near its GPU, if `[torchrun] numa_binding` asks for that.

    Args:
        identity: This worker's place; `identity.device` wins over *wanted*.

    Raises:
        DeviceError: the machine has no device of the type that is wanted, or fewer devices than workers; or the CPU is wanted
            and this process sees accelerators that cannot be hidden, or not any more.
    """
    if identity.numa is not None:
        torch_private.bind_to_cores(identity.numa, identity.local_rank)
    wanted = identity.device or wanted
    if wanted == _CPU.type:
        _hide_accelerators(identity)
        return _CPU
    kind, count = accelerators(wanted)
    if kind is None:
        if wanted == AUTO:
            return _CPU
        raise DeviceError(
            f'node {identity.node}: nodes.device{_OR_VARIABLE} is "{wanted}", and torch sees no such device',
            "run `elasticflow doctor` on this machine: it tells why; a job that may train on any device leaves it out",
        )
    if identity.shares_device or (identity.is_own_task and count == 1):
        number = 0
    elif count < identity.local_world_size:
        devices = "1 device" if count == 1 else f"{count} devices"
        raise DeviceError(
            f'node {identity.node}: {identity.local_world_size} workers, and torch sees {devices} of type "{kind}"',
            f"{_ONE_DEVICE_FOR_ALL}; if the machine has more, `elasticflow doctor` tells why torch does not see them",
        )
    else:
        number = identity.local_rank
    device = torch.device(kind, number)
    torch.accelerator.set_device_index(device)
    return device


def fix_workspace() -> None:
    """Have cuBLAS add in the same order each time, unless the launch says otherwise; to be called before CUDA begins."""
    os.environ.setdefault(worker_environment.CUBLAS_WORKSPACE_CONFIG, worker_environment.CUBLAS_WORKSPACE)


def accelerators(wanted: str = AUTO) -> tuple[str | None, int]:
    """Return type and number of the accelerators that torch sees and *wanted* allows; None and 0 if there are none.

    The fork server and the doctor, which cannot import this module, go by the same rule.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or wanted not in {AUTO, found.type}:
        return None, 0
    # Random streams are keyed by seeding these; Apple's GPU has none.
    if not hasattr(torch.get_device_module(found), "default_generators"):
        return None, 0
    count = torch.accelerator.device_count()
    return (found.type, count) if count > 0 else (None, 0)


def _hide_accelerators(identity: Identity) -> None:
    for name in worker_environment.HIDING:
        os.environ[name] = ""
    kind, _ = accelerators()
    if kind is None:
        return
    if kind == "cuda":
        raise DeviceError(
            f'node {identity.node}: nodes.device{_OR_VARIABLE} is "cpu", and this process asked for GPUs before it joined the run: each '
            "worker would take memory of GPU 0",
            'set CUDA_VISIBLE_DEVICES = "" before the process starts, in [env]',
        )
    raise DeviceError(
        f'node {identity.node}: nodes.device{_OR_VARIABLE} is "cpu", and torch sees devices of type "{kind}", which elasticflow cannot hide: '
        "each worker would take memory of the first of them",
        "install a build of torch for the CPU",
    )


def require_type_of_launch(keys: Store | RemoteControlStore, device: torch.device) -> None:
    """Make sure that the launch trains on the device type on which its first generation did; rank 0.

    Args:
        keys: The keys of the whole launch, which outlive a generation.

    Raises:
        DeviceError: *device* is of another type; the message names both.
    """
    if not keys.check([_BEGAN_ON]):
        keys.set(_BEGAN_ON, device.type)
        return
    began_on = keys.get(_BEGAN_ON).decode()
    if began_on != device.type:
        raise _changed("the launch began", began_on, device.type)


def require_type_of_snapshot(device: torch.device, wanted: str, versions: Mapping[str, Any]) -> None:
    """Make sure that this worker has a device of the type that the snapshot was taken on; any type that was asked for is right. Every rank.

    Args:
        versions: `versions` of the snapshot's manifest, as `environment.describe` gave them; empty in old snapshots.

    Raises:
        DeviceError: the snapshot was taken on another type; the message names both.
    """
    if not versions or wanted != AUTO:
        return
    taken_on = str(versions.get("device", "cuda" if "gpu" in versions else _CPU.type))
    if taken_on != device.type:
        raise _changed("the snapshot was taken", taken_on, device.type)


def _changed(before: str, was: str, now: str) -> DeviceError:
    on_purpose = (
        f'to go on with "{now}" on purpose, resume with --set nodes.device={now}; without a job file, set '
        f"{worker_environment.DEVICE}={now}"
    )
    why = f'`elasticflow doctor` tells why torch sees no "{was}" device; ' if now == _CPU.type else ""
    return DeviceError(
        f'{before} on a device of type "{was}", and this worker would train on "{now}"', why + on_purpose
    )


def require_one_type(identity: Identity, store: Store, device: torch.device, limit: timedelta) -> None:
    """Make sure that all ranks have devices of one type. Collective: every rank, before the process group is formed.

    A group with one backend on some ranks and another on the others would hang, or fail without naming the cause.

    Raises:
        DeviceError: the types differ; the message names the ranks, and every rank raises it. Ranks that have rank 0's type,
            which is the launch's, raise `OtherDeviceError`, and later than the others, whose nodes are to blame.
    """
    if identity.world_size == 1:
        return
    store.set(f"device/{identity.rank}", f"{device.type} {identity.node}")
    if identity.rank == 0:
        keys = [f"device/{rank}" for rank in range(identity.world_size)]
        store.wait(keys, limit)
        store.set("devices", _difference([store.get(key).decode() for key in keys]))
    store.wait(["devices"], limit)
    if difference := store.get("devices").decode():
        is_right = store.get("device/0").decode().partition(" ")[0] == device.type
        time.sleep(_WRONG_RANKS_FIRST_S if is_right else 0)
        raise (OtherDeviceError if is_right else DeviceError)(
            f"the workers' devices are of several types: {difference}",
            "run on nodes of one kind; where a node should have the others' device, run `elasticflow doctor` there",
        )


def _difference(texts: list[str]) -> str:
    """Return the first rank of each device type, with its node; empty if there is one type."""
    first: dict[str, str] = {}
    for rank, text in enumerate(texts):
        kind, _, node = text.partition(" ")
        first.setdefault(kind, f'"{kind}" on rank {rank} (node {node})')
    return ", ".join(first.values()) if len(first) > 1 else ""
