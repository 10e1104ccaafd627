"""Marks of tests that need a GPU; most of these tests run on the CPU, too, so that no test's own code first runs on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Test = TypeVar("Test", bound="Callable[..., object]")

ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # A warning of CUDA's libraries about a device of this age or load is no fault of ours.
    pytest.mark.filterwarnings("default"),
)
DEVICES = (pytest.param("cpu", marks=pytest.mark.e2e), pytest.param("cuda", marks=ON_A_GPU))
# On the CPU a launch shows here no more than launches in tests/end_to_end do: .ci/nightly sees to it that the tests' own code works.
LAUNCHED_ON = (pytest.param("cpu", marks=pytest.mark.nightly), pytest.param("cuda", marks=ON_A_GPU))


def on_a_gpu(test: Test) -> Test:
    """Have *test* run on a GPU only."""
    for mark in ON_A_GPU:
        test = mark(test)
    return test
