from __future__ import annotations

import struct
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from elasticflow.errors import RanksDifferError, StateError
from elasticflow.runtime.process import checksums
from elasticflow.runtime.state.state import State
from tests.pretended_device import pretended
from tests.runtime.stored import bits


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


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that a device would run a kernel for: all but views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and run."""
        aliases = [result.alias_info for result in func._schema.returns]
        self.number += not any(alias is not None and not alias.is_write for alias in aliases)
        return func(*args, **(kwargs or {}))


def test_small_tensors_are_summed_up_together() -> None:
    """A device runs one kernel for each large tensor, and a few for all others."""
    small = {f"small {number}": torch.full((number % 50,), 3.0) for number in range(1000)}
    large = {f"large {number}": torch.full((10_000,), 3.0) for number in range(20)}
    apart = {f"apart {number}": torch.ones(4, 5).t() for number in range(10)}
    sums = checksums.Sums({**small, **large, **apart})
    with Operations() as operations:
        started = sums.start()
    assert len(large) + len(apart) <= operations.number <= len(large) + len(apart) + 15
    result = started.result()
    assert all(result[key] == checksums.sums_of({key: tensor})[key] for key, tensor in small.items())


def test_sums_are_of_the_bytes_in_words() -> None:
    """Each sum is what its definition says, by plain arithmetic; computed again, it is of the new values."""
    tensors = {
        f"{dtype} {count}": torch.randint(0, 2, (count, dtype.itemsize), dtype=torch.uint8).view(dtype)[:, 0]
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64)
        for count in (0, 1, 7, 100, 4099, 40_003)
    }
    sums = checksums.Sums(tensors)
    for _ in range(2):
        assert sums.start().result() == {key: _by_hand(tensor) for key, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.copy_(tensor.flip(0))


def _by_hand(tensor: Tensor) -> int:
    data = bits(tensor)[2]
    count = len(data) // 8
    words: tuple[int, ...] = struct.unpack_from(f"<{count}q", data)
    length = count // 64 if count >= 64 * 64 else 0
    total = sum(data[8 * count :]) + sum(words[64 * length :])
    total += sum((2 * part + 1) * sum(words[part * length : (part + 1) * length]) for part in range(64))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("is_fetched", [False, True])
def test_a_device_computes_the_same_sums(is_fetched: bool) -> None:
    """On a device they are those of the CPU, and the host does not wait where they are started."""
    here = {key: tensor for key, tensor in tensors().items() if key not in {"complex", "small", "flags"}}
    here["large"] = torch.arange(10_001.0)
    with pretended() as device:
        sums = checksums.Sums({key: tensor.to(device.device) for key, tensor in here.items()})
        device.waits.clear()
        started = sums.start()
        if is_fetched:
            started.fetch()
        assert device.waits == []
        result = started.result()
        # Not for all that the device has to do.
        assert [wait.reason for wait in device.waits] == ["an event"]
    assert result == checksums.sums_of(here)


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
