"""Gradients that `Run.gradients` adds up until an optimizer uses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD

from elasticflow.errors import StateError
from elasticflow.runtime.loop.kept import parts_of
from elasticflow.runtime.loop.passes import Pass
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from subprocess import CompletedProcess


def test_gradients_wait_for_the_optimizer_of_their_parameters() -> None:
    """Of two optimizers, as a GAN has: a step of one leaves what was added up for the other, and its own begins anew."""
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    one, other = (next(part.parameters()) for part in model)
    optimizers = {"one": SGD([one], lr=0.1), "other": SGD([other], lr=0.1)}
    passes = Pass()
    passes.watch(State(**parts_of({"model": model, **optimizers})), computes_gradients=False)

    def add(**gradients: float) -> dict[str, float | None]:
        with passes.adding_gradients():
            for name, parameter in (("one", one), ("other", other)):
                if name in gradients:
                    parameter.grad = torch.full((1, 1), gradients[name])
        return {
            name: None if parameter.grad is None else parameter.grad.item()
            for name, parameter in (("one", one), ("other", other))
        }

    assert add(one=1.0) == {"one": 1.0, "other": None}
    assert add(other=10.0) == {"one": 1.0, "other": 10.0}
    assert add(one=2.0, other=20.0) == {"one": 3.0, "other": 30.0}
    optimizers["one"].step()
    optimizers["one"].zero_grad()
    assert add(one=4.0, other=40.0) == {"one": 4.0, "other": 70.0}
    optimizers["other"].zero_grad()
    assert add(other=80.0) == {"one": 4.0, "other": 80.0}


def test_pruned_weights_are_those_after_the_step() -> None:
    """As after a restart: a script that prunes by them before the next forward prunes alike."""
    model: Any = nn.Linear(3, 4)
    prune.l1_unstructured(model, "weight", amount=2)  # type: ignore[no-untyped-call]
    optimizer, passes = SGD(model.parameters(), lr=0.1), Pass()
    passes.watch(State(**parts_of({"model": model, "optimizer": optimizer})))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    passes.settle(is_pending=False)
    assert torch.equal(model.weight_mask * model.weight_orig, model.weight)


def test_a_move_before_the_first_pass_is_told_from_one_after_a_step() -> None:
    """A search for the learning rate, between `run.keep` and the loop: no call of `run.step` is to blame."""
    model = nn.Linear(3, 4)
    optimizer, passes = SGD(model.parameters(), lr=0.1), Pass()
    passes.watch(State(**parts_of({"model": model, "optimizer": optimizer})))
    batch: Any = SimpleNamespace(end=SimpleNamespace(step=1))
    optimizer.step()
    with pytest.raises(StateError, match=r"moved between run.keep and the first pass") as refused:
        passes.open(batch)
    assert "come before run.keep" in str(refused.value)
    passes.settle(is_pending=False)
    optimizer.step()
    with pytest.raises(StateError, match=r"an optimizer moved after run.step"):
        passes.open(batch)


def test_a_batch_has_its_gradients_once() -> None:
    """Its samples are read by then: a second call in the pass would find none."""
    passes = Pass()
    passes.note_gradients()
    with pytest.raises(StateError, match=r"run.gradients was called a second time in one pass"):
        passes.note_gradients()
    batch: Any = SimpleNamespace(end=SimpleNamespace(step=2))
    passes.open(batch)
    passes.note_gradients()


SCRIPT = """
import json, os
import elasticflow, torch
from torch.utils.data import DataLoader, TensorDataset

def measured():
    run.worker.vote.leave_wanted = True  # as by SIGTERM
    told.append(run.evaluate(dataset, loss=lambda outputs, targets: outputs.mean()))
    run.worker.vote.leave_wanted = False

told = []
run = elasticflow.join(name="own", folder="run", threads=1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
dataset = TensorDataset(torch.ones(6, 2), torch.ones(6))
for epoch in run.epochs(1):
    for batch in run.batches(dataset, size=2):
        model(batch.inputs).mean().backward()
        if batch.number == 1:
            optimizer.step()
            measured()
            optimizer.zero_grad()
        run.step(loss=0.0)
    measured()
for epoch in run.epochs(1):
    for (inputs, _) in DataLoader(dataset, batch_size=2):
        optimizer.zero_grad()
        model(inputs).mean().backward()
        optimizer.step()
        run.step(loss=0.0, samples=2)
    measured()
print(len(told))
os._exit(0)
"""


def test_a_request_to_exit_waits_for_an_evaluation_that_no_snapshot_may_end(
    plain_python: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    """Behind the optimizer's move, while an epoch's last gradients wait, and in an epoch of a loader without a state.

    A snapshot there would have a restart learn from samples twice, or lose gradients.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    assert plain_python("script.py").stdout.split()[-1] == "3"


def test_a_state_of_whole_steps() -> None:
    """Not once the optimizer or a buffer has moved in a pass, nor after a pass that left gradients for the next."""
    model = nn.BatchNorm1d(1)
    optimizer = SGD(model.parameters(), lr=0.1)
    passes = Pass()
    passes.watch(State(**parts_of({"model": model, "optimizer": optimizer})))
    batch: Any = SimpleNamespace(end=SimpleNamespace(step=1))
    passes.open(batch)
    assert passes.is_between_steps
    model(torch.ones(2, 1)).sum().backward()
    assert not passes.is_between_steps
    passes.close()
    passes.settle(is_pending=passes.is_pending())
    assert not passes.is_between_steps
    passes.open(batch)
    optimizer.step()
    assert not passes.is_between_steps
    passes.close()
    passes.settle(is_pending=passes.is_pending())
    assert passes.is_between_steps


def test_a_pass_over_own_data_may_be_open_at_any_time() -> None:
    """Nothing says that it has begun: a buffer that moved since the last step belongs to it."""
    model = nn.BatchNorm1d(1)
    passes = Pass()
    passes.watch(State(**parts_of({"model": model, "optimizer": SGD(model.parameters(), lr=0.1)})))
    passes.close()
    passes.settle(is_pending=False)
    assert passes.is_between_steps
    model(torch.ones(2, 1))
    assert not passes.is_between_steps
