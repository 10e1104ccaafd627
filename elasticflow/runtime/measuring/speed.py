"""Speed as a share of the devices' peak: model FLOP/s utilization (MFU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

# Dense peak in FLOP/s of one device by a part of its name, the first that fits: of bf16 and fp16, of tf32, of fp32. From
# the vendors' data sheets; without sparsity.
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    ("GB200", (2500e12, 1250e12, 80e12)),
    ("B200", (2250e12, 1100e12, 75e12)),
    ("B100", (1750e12, 900e12, 60e12)),
    ("GH200", (989.5e12, 494.7e12, 67e12)),
    ("H200", (989.5e12, 494.7e12, 67e12)),
    ("H100 PCIe", (756e12, 378e12, 51e12)),
    ("H100 NVL", (835e12, 417.5e12, 60e12)),
    ("H100", (989.5e12, 494.7e12, 67e12)),
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
    ("V100", (125e12, 15.7e12, 15.7e12)),
    ("T4", (65e12, 8.1e12, 8.1e12)),
    ("RTX 4090", (165.2e12, 82.6e12, 82.6e12)),
    ("RTX 3090", (71e12, 35.6e12, 35.6e12)),
    ("MI300X", (1307.4e12, 653.7e12, 163.4e12)),
    ("MI250X", (383e12, 95.7e12, 95.7e12)),
)
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

    def of_peak(self, device: torch.device, world_size: int, model: nn.Module) -> float | None:
        """Return one sample a second as a share of the peak of *world_size* devices; None if the peak is not known."""
        if self.flops_per_sample is None:
            return None
        peak = self.peak_flops or peak_of(device_name(device), self.kind(model))
        return None if peak is None else self.flops_per_sample / (peak * world_size)

    def kind(self, model: nn.Module) -> int:
        """Return in which of its precisions a device computes for *model*, as `peak_of` takes it."""
        if self.is_half or any(p.dtype in _HALVES for p in model.parameters()):
            return 0
        return 2 if torch.get_float32_matmul_precision() == "highest" else 1


def device_name(device: torch.device) -> str:
    """Return the device's name, such as `NVIDIA H200`, or its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def peak_of(name: str, kind: int) -> float | None:
    """Return the peak in FLOP/s of the device called *name*; None if it is not known.

    Args:
        name: As torch has it.
        kind: 0: bf16 and fp16; 1: tf32; 2: fp32.
    """
    return next((peaks[kind] for part, peaks in _PEAKS if part in name), None)
