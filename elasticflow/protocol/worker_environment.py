"""Conventions between agent and workers: environment variables, and the memory of heartbeats.

The agent or `torchrun.sh` sets the variables; with a plain `python train.py` they are not set. Only `runtime/worker.py` reads
them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RUN_ID = "ELASTICFLOW_RUN_ID"  # also the mark by which every process of a run can be found
LAUNCH_ID = (
    "ELASTICFLOW_LAUNCH_ID"  # the same of what was forked: agents are started before their run is known
)
RUN_FOLDER = "ELASTICFLOW_RUN_FOLDER"  # absolute path of runs/<job>/<run id>
GENERATION = "ELASTICFLOW_GENERATION"  # number of the worker group, the same on every node
NODE = "ELASTICFLOW_NODE"  # id of the node inside the launch
RENDEZVOUS = "ELASTICFLOW_RENDEZVOUS"  # where the launch's keys are (`protocol/store_address.py`)
NUMA = "ELASTICFLOW_NUMA"  # how torch binds a worker to the cores near its GPU, if it does
ADDRESS = "ELASTICFLOW_ADDRESS"  # under which other machines reach this one, where `nodes.interface` says it
DEVICE = "ELASTICFLOW_DEVICE"  # the device type that workers train on: nodes.device
SHARE_DEVICE = "ELASTICFLOW_SHARE_DEVICE"  # 1: all workers of a machine share device 0; for tests (`runtime/process/devices.py`)
WRITER = "ELASTICFLOW_WRITER"  # address of the node's snapshot writer
FAILED_AT = "ELASTICFLOW_FAILED_AT"  # monotonic time of the failure this generation answers, if any
HEARTBEAT_FD = "ELASTICFLOW_HEARTBEAT_FD"  # shared memory of the node's heartbeats: one slot per local rank
COMPILER_CACHE = (
    "ELASTICFLOW_COMPILER_CACHE"  # workers compile; the node's folder for it, or nothing: torch's own
)
LOOP = "ELASTICFLOW_LOOP"  # what the job file says to a script that calls `elasticflow.join` (`protocol/child_processes.py`, `loop_settings.py`)
ACCEPT_DRIFT = "ELASTICFLOW_ACCEPT_DRIFT"  # 1: what changes the trajectory of a script's loop is wanted
TRAJECTORY = "ELASTICFLOW_WITNESS"  # folder of the records of the state after every step

# torchrun's, by which a process knows its rank. A module that reads one of these at import would freeze one value for all.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

HEARTBEAT = struct.Struct("<qq16s")  # beats, finished steps, phase
# Phases of a worker that has finished its first step.
TRAINING_PHASES = frozenset({"step", "data", "evaluate", "snapshot"})
HELD = struct.Struct("<q")  # after that: newest step whose state this rank holds in memory; 0: none
PROFILE = struct.Struct(
    "<q"
)  # after that, written by the agent: number of the newest request for a trace; 0: none
FIGURES = struct.Struct(
    "<qdd4q16s"
)  # after that: `windows`, `own_s`, `step_s`, usage and device of `RankFigures` in messages.py
HEARTBEAT_SLOT = 128  # bytes per local rank: whole cache lines, so that ranks do not disturb each other

# Without a fixed workspace cuBLAS may add in another order each time; with CUDA this value fixes it.
# Source: https://docs.nvidia.com/cuda/cublas/index.html#results-reproducibility
CUBLAS_WORKSPACE_CONFIG, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"

_CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# Variables that hide accelerators from a process that has not asked for them yet; ROCm's devices have CUDA's type.
HIDING = (_CUDA_VISIBLE_DEVICES, "HIP_VISIBLE_DEVICES")


def hides_gpus(environ: Mapping[str, str]) -> bool:
    """True if the environment hides all GPUs of CUDA's type."""
    return environ.get(_CUDA_VISIBLE_DEVICES, "all").strip() in {"", "-1"}


class DeviceUsage(NamedTuple):
    """Memory and use of a worker's accelerator.

    Attributes:
        memory_allocated: Bytes in tensors of the worker.
        memory_reserved: Bytes that its allocator has taken from the device.
        memory_peak: Most bytes in tensors since the worker began.
        utilization: Percentage of time in which kernels ran, of all processes; None: unknown.
    """

    memory_allocated: int
    memory_reserved: int
    memory_peak: int
    utilization: int | None = None


def numbers_of_usage(usage: DeviceUsage | None) -> Sequence[int]:
    """Return the fields of *usage* as numbers for shared memory, with -1 for each that is unknown."""
    return [-1 if field is None else field for field in usage or [None] * len(DeviceUsage._fields)]


def usage_of_numbers(numbers: Sequence[int]) -> DeviceUsage | None:
    """Return the usage that `numbers_of_usage` turned into *numbers*."""
    allocated, reserved, peak, utilization = numbers
    if allocated < 0:
        return None
    return DeviceUsage(allocated, reserved, peak, None if utilization < 0 else utilization)
