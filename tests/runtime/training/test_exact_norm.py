"""A norm whose bits do not depend on how tensors are shared out, and which is the norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticflow.runtime.training import exact_norm as norms
from elasticflow.runtime.training.exact_norm import exact_norm

SHAPES = st.lists(
    st.sampled_from([(1,), (3,), (7, 5), (300, 300), (64, 1024), (2, 3, 4)]), min_size=1, max_size=5
)


def drawn(shapes: list[tuple[int, ...]], scale: float, seed: int) -> list[Tensor]:
    """Return tensors whose elements differ by several orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * scale * 10 ** (3 * torch.rand(shape, generator=generator))
        for shape in shapes
    ]


@given(SHAPES, st.sampled_from([1e-30, 1e-8, 1.0, 1e8, 1e30]), st.integers(0, 1000))
def test_it_is_the_norm(shapes: list[tuple[int, ...]], scale: float, seed: int) -> None:
    """As exact as single precision."""
    tensors = drawn(shapes, scale, seed)
    true = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
    assert float(exact_norm(tensors)) == pytest.approx(true, rel=1e-6)


@given(SHAPES, st.integers(0, 1000))
def test_any_order_has_the_same_bits(shapes: list[tuple[int, ...]], seed: int) -> None:
    """Rows in another order are summed in another order, as where ranks share them out."""
    tensors = drawn(shapes, 1.0, seed)
    others = [tensor[torch.randperm(len(tensor))] for tensor in tensors]
    assert torch.equal(exact_norm(tensors), exact_norm(others))
    plain = torch.cat([tensor.reshape(-1) for tensor in tensors])
    assert float(exact_norm([plain])) == pytest.approx(float(exact_norm(tensors)), rel=1e-6)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    """A step with such a gradient is left out, or ends the run: it must be seen."""
    assert not math.isfinite(float(exact_norm([torch.tensor([1.0, value])])))
    assert float(exact_norm([torch.zeros(3)])) == 0.0


def test_torch_s_own_call_uses_it_once_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """`clip_grad_norm_` looks its norm up at each call, also where it was imported by name before."""
    module: Any = nn.utils.clip_grad
    for owner, name in ((module, "_get_total_norm"), (nn.utils, "get_total_norm")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    parameter = nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    expected = exact_norm([parameter.grad])
    norms.use_exact_norm()
    from torch.nn.utils import clip_grad_norm_

    assert torch.equal(expected, clip_grad_norm_([parameter], 1.0))
    assert float(exact_norm([parameter.grad])) == pytest.approx(1.0, rel=1e-5)
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_([_with_grad(math.nan)], 1.0, error_if_nonfinite=True)
    assert float(clip_grad_norm_([_with_grad(3.0)], 1.0, norm_type=math.inf)) == 3.0


def _with_grad(value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([value])
    return parameter
