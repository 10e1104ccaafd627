"""A snapshot holds one state: ranks that have different ones are told which, in a real group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from elasticflow.runtime.snapshot import replicas
from elasticflow.runtime.snapshot.replicas import CaptureCheck
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from tests.forked import ForkedPrograms

PROGRAM = Path(__file__).parents[1] / "programs" / "compare_states.py"


@pytest.mark.e2e
def test_ranks_that_differ_are_named(forked: ForkedPrograms, tmp_path: Path) -> None:
    """Whatever differs in JSON, in the form of a tensor or in an object of the job's own is named on every rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = ("2", str(tmp_path / "store"))
    ranks = [forked.start(PROGRAM, rank, *arguments, environment=environment) for rank in ("0", "1")]
    assert [0, 0] == [rank.wait(100) for rank in ranks]
    told: list[list[str]] = [json.loads(rank.stdout.read_text()) for rank in ranks]
    assert told[0] == told[1]
    start = "a snapshot holds one state, and rank 1's "
    tensor = "include.queue/items is a tensor of torch."
    sums = "(3,), its bits together"
    square = "a tensor of torch.float32, (2, 2)"
    lost = f"{tensor}float32, {sums} 3f8000bf, rank 0's a tensor of torch.float32, {sums} 3f8000003f8000bf"
    expected: list[Any] = [
        "alike",
        "alike",  # what DDP keeps equal is not read again
        f"{start}scheduler/gamma is 0.5, rank 0's 0.1",
        f"{start}include.queue/level is 2, rank 0's 1",
        f"{start}{lost}",
        None,
        f"{start}include.queue/late/$float is \"inf\", rank 0's not there",
        f"{start}model/weight is {square}, laid out as permuted:1,0, rank 0's {square}",
        f"{start}model/bias is a tensor, tied to model/weight, rank 0's a tensor of torch.float32, (2,)",
        "alike",  # rank 0's buffers count, of any module
        None,
    ]  # fmt: skip
    for message, words in zip(told[0], expected, strict=True):
        if words is not None:
            assert words == message
    assert told[0][-1].startswith(f"{start}include.critic/weight is a tensor of torch.float32")
    assert told[0][5].startswith(f"{start}{tensor}float64, (3,)")


def test_one_rank_is_like_itself() -> None:
    """Without other ranks nothing is asked."""
    model = nn.Linear(1, 1)
    state = State(model=model, optimizer=SGD(model.parameters()))
    check = CaptureCheck(SimpleNamespace(world_size=1))  # type: ignore[arg-type]  # all it needs of a worker
    check.start(state.capture())
    assert not check.is_pending
    check.finish(state.capture)


class Files:
    """An object of the job's own, with names of files as keys."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def state_dict(self) -> dict[str, int]:
        """Return how often each file was read."""
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take them over."""
        self.seen = state


def test_keys_that_are_no_utf8_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may hold files with such names."""
    sent: list[str | None] = []
    monkeypatch.setattr(replicas, "DigestComparison", sent.append)
    files, model = Files(), nn.Linear(1, 1)
    state = State(model=model, optimizer=SGD(model.parameters()), include={"files": files})
    check = CaptureCheck(SimpleNamespace(world_size=2, vote=SimpleNamespace(stop_wanted=None)))  # type: ignore[arg-type]
    for name in (b"\xe4.txt", b"\xf6.txt"):
        files.seen = {os.fsdecode(name): 1}
        check.start(state.capture())
    assert len(set(sent)) == 2


def test_an_optimizer_that_is_shared_out_among_the_ranks_has_a_remedy_of_its_own() -> None:
    """Muon may hold the momentum of a parameter on one rank only."""
    model, texts = nn.Linear(1, 1), list[str]()

    def gather_text(text: str) -> list[str]:
        texts.append(text)
        return texts

    check = CaptureCheck(SimpleNamespace(gather_text=gather_text))  # type: ignore[arg-type]
    for parameter in model.parameters():
        optimizer = SGD(model.parameters(), momentum=0.9)
        optimizer.state[parameter] = {"momentum_buffer": torch.zeros(1)}
        error = check._difference(State(model=model, optimizer=optimizer).capture())
        assert ("let each rank update the state of all" in str(error)) == (len(texts) == 2)
