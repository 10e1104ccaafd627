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
        ("NVIDIA B300 SXM6 AC", 2250e12, 75e12),
        ("NVIDIA GB300", 2500e12, 80e12),
        ("NVIDIA H200 NVL", 835e12, 60e12),
        ("Tesla V100-PCIE-16GB", 112e12, 14e12),
        ("Tesla V100-SXM2-16GB", 125e12, 15.7e12),
        ("AMD Instinct MI325X", 1307.4e12, 163.4e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8e12, 126e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9e12, 109.7e12),
        ("NVIDIA GeForce RTX 3090 Ti", 80e12, 40e12),
        ("cpu", None, None),
        ("NVIDIA GeForce GTX 1080", None, None),
    ],
)
def test_peaks_of_known_devices(name: str, half: float | None, single: float | None) -> None:
    """By the names that torch has for them; another device's is not guessed."""
    assert (peak_of(name, 0), peak_of(name, 2)) == (half, single)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A4000",
        "NVIDIA RTX A3000 Laptop GPU",
        "NVIDIA RTX A1000",
        "NVIDIA T400 4GB",
        "NVIDIA RTX 4000 SFF Ada Generation",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "GRID A100-10C",
        "NVIDIA A100-20C",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_no_peak_by_a_part_of_a_name(name: str) -> None:
    """An RTX A4000 is no A40, and a seventh of an H100 has not the peak of all of it."""
    assert [peak_of(name, kind) for kind in range(3)] == [None] * 3


def test_a_share_is_of_all_devices() -> None:
    """One sample a second of 3 GFLOP on two devices of 6 GFLOP/s is a quarter of what they can do."""
    measures = Measures(flops_per_sample=3e9, peak_flops=6e9)
    assert measures.of_peak(CPU, 2, nn.Linear(1, 1), "highest") == 0.25
    assert Measures(flops_per_sample=3e9).of_peak(CPU, 2, nn.Linear(1, 1), "highest") is None
    assert Measures(peak_flops=6e9).of_peak(CPU, 2, nn.Linear(1, 1), "highest") is None


def test_the_peak_is_that_of_the_precision() -> None:
    """Half precision by autocast or of the weights; tf32 where torch may use it."""
    single, half = nn.Linear(1, 1), nn.Linear(1, 1).to(torch.bfloat16)
    assert Measures().kind(single, "highest") == 2
    assert Measures().kind(half, "highest") == Measures(is_half=True).kind(single, "high") == 0
    assert Measures().kind(single, "high") == 1
