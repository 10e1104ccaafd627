"""Parts of elasticflow on a GPU, without a launch: the group of one rank, copies, forks after NVML was asked.

Each also runs on the CPU, where it says less.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD

from elasticflow.observe.profile_trace import read_trace
from elasticflow.protocol.messages import ProfileRequest
from elasticflow.runtime.process.step_profiler import _Trace
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner, view_of
from elasticflow.runtime.snapshot.staging_copy import copier_for
from elasticflow.runtime.state.state import State
from elasticflow.runtime.state.tensors import BY_NAME
from tests.end_to_end.harness import ROOT
from tests.runtime.stored import bits, take_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_FORMED = """
import json, os, sys, threading, time
from types import SimpleNamespace
import torch
import torch.distributed as dist
from elasticflow.runtime.process import process_group

device = torch.device(sys.argv[1], *([0] if sys.argv[1] == "cuda" else []))
began = time.monotonic()
process_group.form(SimpleNamespace(shares_device=False, world_size=1, rank=0), None, device)
formed = time.monotonic()
tensor = torch.arange(4.0, device=device)
dist.all_reduce(tensor)
total = tensor.sum().item()
itself = torch.zeros_like(tensor)
dist.all_to_all_single(itself, tensor)
told = {"formed_s": formed - began, "first_s": time.monotonic() - formed, "total": total, "backend": dist.get_backend()}
told["to_itself"] = itself.equal(tensor)
told["threads"] = sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task"))
print(json.dumps(told), flush=True)
os._exit(0)
"""


def test_group_of_one_rank_forms_sums_and_exits(
    device: str, record_property: Callable[[str, object], None]
) -> None:
    """Its threads, nccl's watchdog among them, do not keep a process from its exit, which is `os._exit`."""
    told = _printed(_FORMED, device)
    for name, value in told.items():
        record_property(name, str(value))
    assert told["total"] == 6.0
    # By the calls of nccl that `batch_isend_irecv` makes, which itself refuses a rank that sends to itself.
    assert told["to_itself"]
    assert ("nccl" in told["backend"]) == (device == "cuda")


_FORKED = """
import json, os, sys
import torch

def files():
    names = (os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd"))
    return sorted({os.readlink(name) for name in names if os.path.islink(name)})

def of_device():
    return [name for name in files() if name.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))]

is_available = torch.cuda.is_available()
asked = of_device()
read, write = os.pipe()
if os.fork() == 0:
    try:
        value = torch.ones(2, device=sys.argv[1]).sum().item()
        answer = {"sum": value, "opened": of_device()}
    except BaseException as error:
        answer = {"error": repr(error)}
    os.write(write, json.dumps(answer).encode())
    os._exit(0)
os.close(write)
child = json.loads(os.fdopen(read).read())
os.wait()
print(json.dumps({"is_available": is_available, "asked": asked, "child": child, "after": of_device()}))
"""


def test_fork_after_nvml_was_asked_may_use_the_device(
    device: str, record_property: Callable[[str, object], None]
) -> None:
    """The check by NVML opens no file that CUDA itself opens, and a child forked after it computes."""
    told = _printed(_FORKED, device, PYTORCH_NVML_BASED_CUDA_CHECK="1")
    for name, value in told.items():
        record_property(name, str(value))
    assert told["is_available"] == (device == "cuda")
    assert told["child"].get("sum") == 2.0, told
    assert "/dev/nvidia-uvm" not in told["asked"]
    assert ("/dev/nvidia-uvm" in told["child"]["opened"]) == (device == "cuda")


def test_slow_copy_holds_the_state_after_its_step(device: str) -> None:
    """Parameters that a forward writes, as `max_norm` of an embedding does, while the copy has not begun on the device."""
    model = nn.Embedding(1000, 64, max_norm=1.0, device=device)
    with torch.no_grad():
        model.weight.mul_(10)  # longer than max_norm: the forward shortens what it looks up
    optimizer = SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(1000, device=device)
    captured = State(model=model, optimizer=optimizer).capture()
    shard = ShardPlanner(0, 1).shard_of(captured)
    expected = {key: bits(tensor.cpu()) for key, tensor in shard.tensors.items()}
    target = memoryview(mmap.mmap(-1, shard.nbytes))  # shared, as staging memory is
    copier: Any = copier_for(torch.device(device), [optimizer])
    told: list[object] = []
    if device == "cuda":
        with copier._stream:
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]  # half a second
    copier.start(shard, target, captured.stepped)
    copier.then(lambda *overtaken: told.append(*overtaken or (None,)))
    loss = model(inputs).square().sum()
    loss.backward()
    optimizer.step()
    copier.finish()
    staged = {
        entry.key: bits(view_of(target, BY_NAME[entry.dtype], entry.shape, entry.offset).clone())
        for entry in shard.entries
    }
    # Right, or refused by name: a copy that was overtaken names the tensor, and is not committed.
    assert len(told) == 1
    assert staged == expected or told[0] == "model/weight"


def test_trace_of_steps_says_how_long_the_device_was_idle(
    device: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The kernels of a GPU are in the trace; a step on the CPU has none."""
    steps, trace = 8, tmp_path / "trace.json.gz"
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(device)
    optimizer, inputs = SGD(model.parameters(), lr=0.1), torch.ones(32, 64, device=device)
    tracing = _Trace(ProfileRequest(steps=steps), trace, 0, device_type=device)
    for step in range(1, steps + 2):
        take_step(model, optimizer, inputs)
        if step == steps + 1 and device == "cuda":
            torch.cuda.synchronize()
        tracing.step(step)
    assert tracing.end()
    told = read_trace(trace)
    assert len(told.steps_us) == steps
    assert bool(told.kernels) == (device == "cuda")
    # Kernels of one stream do not overlap.
    idle = 1 - sum(kernel.total_us for kernel in told.kernels) / sum(told.steps_us)
    record_property("idle_share", f"{idle:.3f}")
    assert (0 < idle < 1) if device == "cuda" else idle == 1


def _printed(program: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """Return the last line that a Python program prints, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told
