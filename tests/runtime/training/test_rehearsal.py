"""A model is traced before it is needed, and nothing but what was traced stays."""

from __future__ import annotations

import functools
import os
import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from elasticflow.runtime import torch_private
from elasticflow.runtime.process import compiler
from elasticflow.runtime.training.rehearsal import rehearse
from elasticflow.runtime.training.rehearsal_record import RehearsalRecord, describe

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FACTORIES = """
import torch
from torch import nn

dataset = None

def build_model():
    torch.manual_seed(7)
    import rehearsed_model
    return rehearsed_model.Net(dataset.values["width"])

def training_step(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)
"""
MODEL = """
import itertools
import random
from torch import nn

built = 0
names = []
numbers = itertools.count()
own = random.Random(1)

class Net(nn.Module):
    made = 0

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(2, width)
        {change}

    def forward(self, x):
        {call}
        return self.linear(x).relu()
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yield the graphs that were traced, which are computed as they are: writing kernels would take seconds."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(plain, backend=backend))
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()
    compiler.forget()
    sys.modules.pop("rehearsed_model", None)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model, which is imported from there."""
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, change: str = "pass", call: str = "pass") -> None:
    """Write the job's code, which changes something when a model is built or called."""
    (folder / "factories.py").write_text(FACTORIES)
    (folder / "rehearsed_model.py").write_text(MODEL.format(change=change, call=call))


def record(**changes: Any) -> RehearsalRecord:
    """Return what a worker wrote of a first step with batches of 4 and 3."""
    batches = [describe([torch.ones(n, 2), torch.ones(n, 3)]) for n in (4, 3)]
    facts: dict[str, Any] = {
        "rank": 1,
        "world_size": 2,
        "batches": batches,
        "precision": "fp32",
        "ddp": None,
        "has_group": True,
        "variables": {"RANK": "1", "WORLD_SIZE": "2"},
        "flags": torch_private.tracing_flags(),
        "values": {"width": 3},
    }
    return RehearsalRecord(**facts | changes)


def state_of_process() -> tuple[Any, ...]:
    """Return what a rehearsal must leave as it was."""
    draws = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002
    return draws, torch_private.tracing_flags(), list(sys.path), dict(os.environ), dist.is_initialized()


@pytest.mark.parametrize("ddp", [None, {"gradient_as_bucket_view": True}])
def test_another_model_of_the_class_is_not_traced_again(
    project: Path, compiled: list[Any], ddp: dict[str, Any] | None
) -> None:
    """Its training step runs what was traced before; state of the process is as it was."""
    import rehearsed_model  # type: ignore[import-not-found]

    before = state_of_process()
    assert ([], None) == rehearse(project / "factories.py", record(ddp=ddp), [str(project)])
    assert before == state_of_process()
    assert compiled
    traced = len(compiled)

    model = rehearsed_model.Net(3)
    model.compile()
    model.train()
    model(torch.randn(4, 2)).sum().backward()
    model(torch.randn(3, 2)).sum().backward()
    assert traced == len(compiled)


def test_settings_are_those_of_the_worker(project: Path, compiled: list[Any]) -> None:
    """A model that is traced under other ones would be traced again."""
    write(project, change="import torch; self.deterministic = torch.are_deterministic_algorithms_enabled()")
    flags = {**torch_private.tracing_flags(), "deterministic": 2, "threads": torch.get_num_threads() + 1}
    before = state_of_process()
    assert ([], None) == rehearse(project / "factories.py", record(flags=flags), [str(project)])
    assert before == state_of_process()
    traced = len(compiled)
    import rehearsed_model

    with torch_private.tracing_under(flags):
        model = rehearsed_model.Net(3)
        assert model.deterministic
        model.compile()
        model(torch.randn(4, 2))
    assert traced == len(compiled)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("globals()['built'] += 1", "built"),
        ("names.append('layer')", "names"),
        ("next(numbers)", "numbers"),
        ("own.random()", "own"),
        ("Net.made += 1", "Net.made"),
    ],
)
def test_what_the_model_changes_of_its_modules_is_told(
    project: Path, compiled: list[Any], change: str, name: str
) -> None:
    """A standby would train with it, and a worker that was started anew would not."""
    write(project, change=change)
    import rehearsed_model

    del rehearsed_model
    assert ([f"rehearsed_model.{name}"], None) == rehearse(project / "factories.py", record(), [str(project)])
    assert compiled


def test_rank_and_size_are_those_of_the_worker(project: Path, compiled: list[Any]) -> None:
    """The compiler takes them for constants, without a guard: a model that asks would compute with another's."""
    asks = "import torch.distributed as dist; return self.linear(x) * (10 * dist.get_rank() + dist.get_world_size())"
    write(project, change="import os; assert os.environ['RANK'] == '1'", call=asks)
    import rehearsed_model

    assert ([], None) == rehearse(project / "factories.py", record(), [str(project)])
    traced = len(compiled)
    model, x = rehearsed_model_with_ones(rehearsed_model), torch.ones(4, 2)
    torch_private.form_group_of(1, 2)
    try:
        assert 12 * 3 == model(x)[0, 0].item()
    finally:
        dist.destroy_process_group()
    assert traced == len(compiled)


def rehearsed_model_with_ones(module: Any) -> nn.Module:
    """Return a compiled model all of whose parameters are one."""
    os.environ["RANK"] = "1"
    try:
        model: nn.Module = module.Net(3)
    finally:
        del os.environ["RANK"]
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model.compile()
    return model


def test_what_changes_before_it_fails_is_told(project: Path, compiled: list[Any]) -> None:
    """A layer counter that went half of its way."""
    write(project, change="globals()['built'] += 1; raise ValueError('no file')")
    import rehearsed_model

    del rehearsed_model
    changed, error = rehearse(project / "factories.py", record(), [str(project)])
    assert (["rehearsed_model.built"], "no file") == (changed, str(error))
    assert [] == compiled


def test_traced_in_vain_is_told(project: Path, compiled: list[Any]) -> None:
    """Something was traced again: the next standby need not try."""
    rehearse(project / "factories.py", record(), [str(project)])
    compilation = compiler.Compilation()
    assert compilation.facts()["rehearsed"]
    compilation.begin()
    compilation.end()
    assert compiler.has_rehearsed_in_vain()
    assert not compilation.facts()["rehearsed"]
    assert compiled


def test_what_raises_leaves_nothing(project: Path, compiled: list[Any]) -> None:
    """Process group and settings are gone, and what was traced."""
    write(project, call="raise ValueError('zeros')")
    before = state_of_process()
    changed, error = rehearse(project / "factories.py", record(ddp={}), [str(project)])
    assert ([], "zeros") == (changed, str(error))
    assert before == state_of_process()
    assert not compiler.Compilation().has_happened


def test_an_interruption_ends_it(project: Path, compiled: list[Any]) -> None:
    """It is raised inside, where the model is built and traced, and passes through."""

    class CalledError(BaseException):
        pass

    @contextmanager
    def interrupted() -> Iterator[None]:
        raise CalledError
        yield

    before = state_of_process()
    changed, error = rehearse(project / "factories.py", record(), [str(project)], interrupted())
    assert [] == changed
    assert isinstance(error, CalledError)
    assert before == state_of_process()
    assert [] == compiled


def test_kernels_that_are_not_in_the_cache_are_not_kept(
    project: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers use those of the cache: others might add in another order."""
    monkeypatch.setattr(torch_private, "compiled_graphs", lambda: (0, 1))
    assert ([], None) == rehearse(project / "factories.py", record(), [str(project)])
    assert not compiler.Compilation().has_happened


@pytest.mark.parametrize(("place", "is_kept"), [((1, 2), True), ((0, 2), False), ((1, 3), False)])
def test_it_is_kept_for_the_worker_of_that_place(
    project: Path, compiled: list[Any], place: tuple[int, int], is_kept: bool
) -> None:
    """Another rank's micro-batches may be a sample larger."""
    rehearse(project / "factories.py", record(), [str(project)])
    compiler.forget_if_other(*place)
    assert is_kept == compiler.Compilation().has_happened
