"""The switches by which torch computes products of float32 numbers from fewer bits, such as TF32: read, and set for a job.

torch has two interfaces to them: from 1.7 on `allow_tf32` and `set_float32_matmul_precision`, from 2.9 on `fp32_precision` of
each backend and operation. A job may use either. The new one always answers; the getters of the old one raise once a switch was
set to a value that they cannot express (torch 2.13 to 2.15, aten/src/ATen/Context.cpp).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from elasticflow.errors import JobKeyError

_KEY = "train.tf32"
# In the words of `torch.get_float32_matmul_precision`.
_HIGHEST = "highest"
_WORDS = {"tf32": "high", "bf16": "medium"}


def matmul_precision(device: torch.device) -> str:
    """Return the precision of matrix products on *device* in torch's words: "highest", "high" (TF32) or "medium" (bf16)."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return _WORDS.get(_precisions(device)["matmul"], _HIGHEST)


def precision_facts(device: torch.device) -> dict[str, str]:
    """Return the switches that count on *device*, by name: facts of `environment.describe`.

    `matmul_precision` and `cudnn_tf32` stand in older snapshots, too, with the same values.
    """
    precisions = _precisions(device)
    found = {"matmul_precision": matmul_precision(device)}
    if device.type == "cuda":
        found["cudnn_tf32"] = _cudnn_tf32(precisions)
    return {**found, "conv_precision": precisions["conv"], "rnn_precision": precisions["rnn"]}


def _cudnn_tf32(precisions: dict[str, str]) -> str:
    with suppress(RuntimeError):
        return str(torch.backends.cudnn.allow_tf32)
    return str(precisions["conv"] == precisions["rnn"] == "tf32")


def _precisions(device: torch.device) -> dict[str, str]:
    """Return "ieee", "tf32" or "bf16" for each kind of operation on *device*."""
    backends: Any = torch.backends  # torch's type hints lack the switches
    of_cuda = device.type == "cuda"
    others = backends.cudnn if of_cuda else backends.mkldnn
    matmul = backends.cuda.matmul if of_cuda else backends.mkldnn.matmul
    switches = {"matmul": matmul, "conv": others.conv, "rnn": others.rnn}
    # "none" means that it was not set, which is as precise as "ieee".
    read = {name: str(switch.fp32_precision) for name, switch in switches.items()}
    return {name: "ieee" if precision == "none" else precision for name, precision in read.items()}


def set_tf32(*, enabled: bool) -> None:
    """Have CUDA compute all float32 products of matrices, convolutions and recurrent layers by TF32, or none; no effect elsewhere.

    The old interface is used: inductor of torch 2.13 to 2.15 reads it when it tunes kernels (`select_algorithm.py`,
    `kernel/conv.py`), and the new one then shows the same.

    Raises:
        JobKeyError: a switch of the job's own code, `torch.backends.fp32_precision`, wins over the key.
    """
    torch.backends.cuda.matmul.allow_tf32 = enabled
    torch.backends.cudnn.allow_tf32 = enabled
    if any((precision == "tf32") != enabled for precision in _precisions(torch.device("cuda")).values()):
        raise JobKeyError(
            _KEY,
            f"{_KEY} = {str(enabled).lower()}, and the job's own code has set torch.backends.fp32_precision to "
            f'"{torch.backends.fp32_precision}"',  # type: ignore[attr-defined]
            f"take out one of them: {_KEY} sets all of CUDA's operations",
        )
