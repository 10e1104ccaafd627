"""An XOR over tensors of every kind: the same for the same content, another for a bit more."""

from __future__ import annotations

import pytest
import torch

from elasticflow.runtime import storable
from elasticflow.runtime.agreement import sums_of


@pytest.mark.parametrize("dtype", storable.DTYPES, ids=str)
@pytest.mark.parametrize("form", ["whole", "odd", "moved", "turned", "none"])
def test_sums_tell_contents_apart(dtype: torch.dtype, form: str) -> None:
    """Of any width, length, place in memory and layout."""
    shapes = {"whole": (4, 8), "odd": (3, 5), "moved": (3, 8), "turned": (8, 4), "none": (0, 4)}
    width = torch.empty((), dtype=dtype).element_size()

    def made(last: int) -> torch.Tensor:
        count = 32 if form != "odd" else 15
        data = torch.arange(count * width, dtype=torch.uint8) % 2
        data[-1] = last
        tensor = data.view(dtype)
        if form == "moved":
            return tensor[1:25].view(shapes[form])
        if form == "turned":
            return tensor.view(4, 8).t()
        return tensor[: 0 if form == "none" else count].view(shapes[form])

    assert sums_of({"x": made(0)}) == sums_of({"x": made(0).clone()})
    if form in ("whole", "odd", "turned"):
        assert sums_of({"x": made(0)}) != sums_of({"x": made(1)})
    assert set(sums_of({"x": made(0)})) == (set() if form == "none" else {"x"})
