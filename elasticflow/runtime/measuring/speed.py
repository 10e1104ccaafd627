"""Speed as a share of the devices' peak: model FLOP/s utilization (MFU)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

# Dense peak in FLOP/s of one device by whole words of its name, the first that fits: of bf16 and fp16, of tf32, of fp32; without
# sparsity. Sources: NVIDIA's data sheets of each product (tensor core rates "with sparsity" are halved) and of DGX, HGX and
# NVL72 systems (divided by their GPUs), the architecture papers of the RTX cards (fp16 with fp32 accumulate), AMD's data sheets
# of MI200 and MI300. torch counts each of the two dies of an MI250X as a device.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("GB300", (2500e12, 1250e12, 80e12)),
    ("B300", (2250e12, 1125e12, 75e12)),
    ("GB200", (2500e12, 1250e12, 80e12)),
    ("B200", (2250e12, 1100e12, 75e12)),
    ("B100", (1750e12, 900e12, 60e12)),
    ("GH200", (989.5e12, 494.7e12, 67e12)),
    ("H200 NVL", (835e12, 417.5e12, 60e12)),
    ("H200", (989.5e12, 494.7e12, 67e12)),
    ("H100 PCIe", (756e12, 378e12, 51e12)),
    ("H100 NVL", (835e12, 417.5e12, 60e12)),
    ("H100", (989.5e12, 494.7e12, 67e12)),
    ("H800 PCIe", (756e12, 378e12, 51e12)),
    ("H800", (989.5e12, 494.7e12, 67e12)),
    ("H20", (148e12, 74e12, 44e12)),
    ("A100", (312e12, 156e12, 19.5e12)),
    ("A800", (312e12, 156e12, 19.5e12)),
    ("A40", (149.7e12, 74.8e12, 37.4e12)),
    ("A30", (165e12, 82e12, 10.3e12)),
    ("A10G", (70e12, 35e12, 35e12)),
    ("A10", (125e12, 62.5e12, 31.2e12)),
    ("L40S", (362e12, 183e12, 91.6e12)),
    ("L40", (181e12, 90.5e12, 90.5e12)),
    ("L4", (121e12, 60e12, 30.3e12)),
    ("V100-PCIE", (112e12, 14e12, 14e12)),
    ("V100", (125e12, 15.7e12, 15.7e12)),
    ("T4", (65e12, 8.1e12, 8.1e12)),
    ("RTX PRO 6000 Blackwell Max-Q", (438.9e12, 219.5e12, 109.7e12)),
    ("RTX PRO 6000 Blackwell Server", (480e12, 240e12, 120e12)),
    ("RTX PRO 6000", (503.8e12, 251.9e12, 126e12)),
    ("RTX 4090 D", (147.1e12, 73.5e12, 73.5e12)),
    ("RTX 4090", (165.2e12, 82.6e12, 82.6e12)),
    ("RTX 3090 Ti", (80e12, 40e12, 40e12)),
    ("RTX 3090", (71e12, 35.6e12, 35.6e12)),
    ("MI325X", (1307.4e12, 653.7e12, 163.4e12)),
    ("MI300X", (1307.4e12, 653.7e12, 163.4e12)),
    ("MI250X", (191.5e12, 47.9e12, 47.9e12)),
)
# A part of a device (MIG, virtual GPUs such as "GRID A100-10C"), or a slower product of the same name.
_NOT_WHOLE = re.compile(r"\b(MIG|GRID|Laptop)\b|-\d+[ABCQ]\b")
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Measures:
    """Figures of speed that a job asks for.

    Attributes:
        count_name: Name of the items that `count` counts: it names the field, such as `tokens_per_s`.
        flops_per_sample: Floating-point operations of training on one sample, forward and backward; None: no MFU.
        peak_flops: Peak of one device, in FLOP/s; None: looked up by the device's name.
        is_half: The model is run in half precision, by autocast.
    """

    count_name: str = "items"
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    is_half: bool = False

    def of_peak(
        self, device: torch.device, world_size: int, model: nn.Module, matmul_precision: str
    ) -> float | None:
        """Return one sample a second as a share of the peak of *world_size* devices; None if the peak is not known.

        Args:
            matmul_precision: Precision of float32 products, in the words of `torch.get_float32_matmul_precision`.
        """
        if self.flops_per_sample is None:
            return None
        peak = self.peak_flops or peak_of(device_name(device), self.kind(model, matmul_precision))
        return None if peak is None else self.flops_per_sample / (peak * world_size)

    def kind(self, model: nn.Module, matmul_precision: str) -> int:
        """Return in which of its precisions a device computes for *model*, as `peak_of` takes it."""
        if self.is_half or any(p.dtype in _HALVES for p in model.parameters()):
            return 0
        return 2 if matmul_precision == "highest" else 1


def device_name(device: torch.device) -> str:
    """Return the device's name, such as `NVIDIA H200`, or its type."""
    if device.type == "cpu":
        return device.type
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name_of is None else str(name_of(device))


def peak_of(name: str, kind: int) -> float | None:
    """Return the peak in FLOP/s of the device called *name*; None if it is not known, and for a part of a device.

    Args:
        kind: 0: bf16 and fp16; 1: tf32; 2: fp32.
    """
    if _NOT_WHOLE.search(name):
        return None
    return next((peaks[kind] for words, peaks in _PEAKS if re.search(rf"\b{words}\b", name)), None)
