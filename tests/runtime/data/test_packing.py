"""Outputs on their way to rank 0."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from torch import nn

from elasticflow.runtime.data.packing import packed, unpacked


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_a_tensor_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of any type and shape, without a gradient, and writable."""
    tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
    (back,) = unpacked(packed([tensor]).getbuffer())
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)
    assert back.data_ptr() == 0 or back.zero_() is back


def test_a_view_takes_its_own_elements_along_only() -> None:
    """The last token's logits of a long text are small; in whatever order they lay, they are contiguous afterwards."""
    whole = torch.randn(1000, 8)
    part = whole[:2].T
    data = packed(part).getbuffer()
    assert len(data) < 1000
    assert unpacked(data).is_contiguous()
    assert torch.equal(unpacked(data), part)


def test_a_large_tensor_is_copied_once_each_way() -> None:
    """A loader process packs whole chunks of samples."""
    tensor = torch.ones(1 << 20, dtype=torch.uint8)
    tracemalloc.start()
    try:
        back = unpacked(packed(tensor).getvalue())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert torch.equal(back, tensor)
    assert peak < 2.5 * tensor.nbytes


def test_what_holds_tensors_stays_what_it_is() -> None:
    """Dicts, tuples and objects of classes that can be imported; parameters come as plain tensors."""
    value = {"logits": nn.Parameter(torch.ones(2)), "rest": (1, ["a"], torch.Size([2]))}
    back = unpacked(packed(value).getbuffer())
    assert type(back["logits"]) is torch.Tensor
    assert not back["logits"].requires_grad
    assert back["rest"] == value["rest"]


def test_what_cannot_be_pickled_is_an_error_of_one_kind() -> None:
    """The caller says what to do."""
    with pytest.raises((TypeError, ValueError, AttributeError)):
        packed(lambda: 1)
