from __future__ import annotations

from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticflow.errors import RanksDifferError, StateError
from elasticflow.runtime.snapshot import checksums
from elasticflow.runtime.state.state import State


def compared(*ranks: dict[str, Tensor]) -> list[str]:
    """Have threads as ranks compare what they hold; return what each was told."""
    meeting, texts, told = Barrier(len(ranks)), [""] * len(ranks), [""] * len(ranks)

    def act(rank: int) -> None:
        def gather(text: str) -> list[str]:
            texts[rank] = text
            meeting.wait(60)
            found = list(texts)
            meeting.wait(60)
            return found

        me: Any = SimpleNamespace(world_size=len(ranks), gather_text=gather)
        try:
            checksums.require_same(me, ranks[rank])
        except RanksDifferError as error:
            told[rank] = error.message

    threads = [Thread(target=act, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def tensors() -> dict[str, Tensor]:
    """Every kind that lies in memory in its own way."""
    return {
        "float": torch.arange(35.0).view(5, 7),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "small": torch.ones(5, dtype=torch.float8_e4m3fn),
        "complex": torch.ones(3, dtype=torch.complex64),
        "flags": torch.ones(9, dtype=torch.bool),
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0),
        "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.arange(10.0)[1:],
        "transposed": torch.arange(24.0).view(4, 6).t(),
    }


def test_equal_ranks_agree() -> None:
    """What is the same, however it lies in memory, is taken for the same."""
    assert ["", "", ""] == compared(tensors(), tensors(), tensors())


@pytest.mark.parametrize("key", [key for key, tensor in tensors().items() if tensor.numel()])
def test_a_tensor_that_differs_is_named_on_every_rank(key: str) -> None:
    """One other element on one rank is noticed by all, and the tensor and the rank are named."""
    other = tensors()
    other[key].view(-1)[-1:].zero_() if other[key].is_contiguous() else other[key][-1].zero_()
    told = f"all ranks loaded the same snapshot, and now rank 1 has another {key} than rank 0"
    assert [told] * 3 == compared(tensors(), other, tensors())


def test_ones_are_not_zeros() -> None:
    """An even number of equal elements does not cancel out."""
    assert "" not in compared({"norm": torch.ones(64)}, {"norm": torch.zeros(64)})


def test_parts_of_a_large_tensor_that_changed_places_are_noticed() -> None:
    """A sum alone would be the same."""
    tensor = torch.arange(1 << 16).float()
    assert "" not in compared({"w": tensor}, {"w": tensor.view(64, -1).flip(0).flatten()})


def test_how_a_tensor_lies_does_not_matter() -> None:
    """The same elements in another memory format, or elsewhere in their memory, are the same."""
    there = {key: tensor.contiguous().clone() for key, tensor in tensors().items()}
    assert ["", ""] == compared(tensors(), there)


class Noting(nn.Linear):
    """A layer with a state of its own."""

    def get_extra_state(self) -> dict[str, Tensor]:
        """See nn.Module."""
        return {"seen": torch.arange(3)}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """See nn.Module."""
        self.kept = state["seen"]


def test_live_state_keeps_no_view_of_what_was_loaded() -> None:
    """Once applied, nothing of a model, its extra state or its optimizer lies in the memory that was read to."""
    model = Noting(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = State(model=model, optimizer=optimizer)
    captured = state.capture()
    loaded = {key: tensor.clone() for key, tensor in captured.tensors.items()}
    state.apply(captured.tree, loaded, captured.memory_formats)
    for tensor in loaded.values():
        tensor.fill_(9)
    live = state.capture().tensors
    assert not any(bool((live[key] == 9).any()) for key in live if live[key].numel())
    assert [0, 1, 2] == model.kept.tolist()


def test_a_difference_may_not_come_again() -> None:
    """A bit that flipped once is no fault of the code: the run is tried again, as after any crash."""
    assert not RanksDifferError.is_final
    assert StateError.is_final
