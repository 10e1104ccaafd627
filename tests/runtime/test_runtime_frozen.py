"""Which tensors are told to be frozen, and how they are shared out."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elasticflow.runtime.share import Sharing, balanced
from elasticflow.runtime.state import State


def tuned() -> State:
    """A model of two layers of which the first is frozen, after a step, with its average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[0].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    return State(model=model, optimizer=optimizer, ema=AveragedModel(model))


def test_frozen_are_the_parameters_that_take_no_gradient() -> None:
    """Neither buffers nor the average's copies, and an entry of the share says which they are."""
    captured = tuned().capture()
    frozen = {"model/0.weight", "model/0.bias"}
    assert frozen == captured.frozen
    share = Sharing(0, 1).share_of(captured)
    assert frozen == {entry.key for entry in share.entries if entry.frozen}


def test_thawed_layers_are_no_longer_told_to_be_frozen() -> None:
    """A layer that is trained from some step on counts as any other from the next snapshot on."""
    state = tuned()
    sharing = Sharing(0, 1)
    sharing.share_of(state.capture())
    state.model[0].requires_grad_(requires_grad=True)  # type: ignore[index]
    captured = state.capture()
    assert not captured.frozen
    assert not any(entry.frozen for entry in sharing.share_of(captured).entries)


sizes = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 1000), max_size=30)


@given(sizes, st.integers(1, 8), st.data())
def test_both_kinds_are_spread(found: dict[str, int], parts: int, data: st.DataObject) -> None:
    """Every tensor has one owner, and neither kind's bytes differ between ranks by more than its largest tensor."""
    frozen = data.draw(st.frozensets(st.sampled_from(sorted(found)))) if found else frozenset()
    shares = balanced(found, parts, frozen)
    assert sorted(found) == sorted(key for share in shares for key in share)
    for kind in (frozen, found.keys() - frozen):
        loads = [sum(found[key] for key in share if key in kind) for share in shares]
        assert max(loads) - min(loads) <= max((found[key] for key in kind), default=0)


def test_one_large_tensor_of_each_kind_goes_to_two_ranks() -> None:
    """What a rank copies at each snapshot is both kinds together."""
    shares = balanced({"moving": 1000, "still": 1000, "small": 1}, 2, {"still"})
    assert [["moving"], ["small", "still"]] == [sorted(share) for share in shares]
