"""MFU: a sample's operations against what the devices could do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elasticflow.runtime.measuring.speed import Measures, peak_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "half", "single"),
    [
        ("NVIDIA H200", 989.5e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989.5e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A10G", 70e12, 35e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("cpu", None, None),
        ("NVIDIA GeForce GTX 1080", None, None),
    ],
)
def test_peaks_of_known_devices(name: str, half: float | None, single: float | None) -> None:
    """By the names that torch has for them; another device's is not guessed."""
    assert (peak_of(name, 0), peak_of(name, 2)) == (half, single)


def test_a_share_is_of_all_devices() -> None:
    """One sample a second of 3 GFLOP on two devices of 6 GFLOP/s is a quarter of what they can do."""
    measures = Measures(flops_per_sample=3e9, peak_flops=6e9)
    assert measures.of_peak(CPU, 2, nn.Linear(1, 1)) == 0.25
    assert Measures(flops_per_sample=3e9).of_peak(CPU, 2, nn.Linear(1, 1)) is None
    assert Measures(peak_flops=6e9).of_peak(CPU, 2, nn.Linear(1, 1)) is None


def test_the_peak_is_that_of_the_precision() -> None:
    """Half precision by autocast or of the weights; tf32 where torch may use it."""
    single, half = nn.Linear(1, 1), nn.Linear(1, 1).to(torch.bfloat16)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert [Measures().kind(single), Measures().kind(half), Measures(is_half=True).kind(single)] == [
            2,
            0,
            0,
        ]
        torch.set_float32_matmul_precision("high")
        assert Measures().kind(single) == 1
    finally:
        torch.set_float32_matmul_precision(before)
