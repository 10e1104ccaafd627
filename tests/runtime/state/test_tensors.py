"""Copies worked out once are the copies that torch makes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from elasticflow.runtime.state.tensors import DTYPES, Copies
from tests.runtime.stored import bits

WIDE = torch.randn(300, 300)  # more than what is copied as bytes

SOURCES = {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "wide": WIDE,
    "parameter": nn.Parameter(torch.randn(3, 4)),
    "turned": torch.randn(3, 4).t(),
    "slice": torch.randn(6, 4)[1:3],
    "column": torch.randn(6, 4)[:, 1],
    "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 3).expand(4, 3),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
    **{
        name: torch.arange(256, dtype=torch.uint8).view(dtype)
        for dtype, name in DTYPES.items()
        if name != "BOOL"
    },
}


@pytest.mark.parametrize("name", SOURCES)
def test_target_becomes_the_source(name: str) -> None:
    """Whatever dtype and form: the target has the source's elements, each time anew."""
    source = SOURCES[name]
    target = torch.zeros_like(source, memory_format=torch.contiguous_format)
    copies = Copies([(target, source)])
    copies.make()
    assert bits(source) == bits(target)
    target.zero_()
    copies.make()
    assert bits(source) == bits(target)


def test_other_dtype_is_converted() -> None:
    """Bytes are copied only where they mean the same."""
    target = torch.zeros(3)
    Copies([(target, torch.tensor([1, 2, 3], dtype=torch.int32))]).make()
    assert [1.0, 2.0, 3.0] == target.tolist()


def test_elements_of_a_vector_are_targets() -> None:
    """Scalars are packed into a vector; what is written into them later comes with the next copy."""
    vector = torch.zeros(3)
    scalars: list[Tensor] = [torch.tensor(float(number)) for number in range(3)]
    copies = Copies(zip(vector.unbind(), scalars, strict=True))
    scalars[1] += 5
    copies.make()
    assert [0.0, 6.0, 2.0] == vector.tolist()


def test_source_can_still_be_resized() -> None:
    """A tensor that is copied stays the job's own in every respect."""
    source = torch.ones(4)
    Copies([(torch.zeros(4), source)]).make()
    source.resize_(1000)
    assert 1000 == source.numel()
