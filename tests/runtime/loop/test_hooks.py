"""Hooks are called apart from training: draws, modes and gradients of theirs leave no trace, and changes are found out."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from elasticflow import StopTraining
from elasticflow.errors import HookError, StepResultError
from elasticflow.protocol.points import read_points
from elasticflow.runtime.loop.hooks import Hook, Hooks, apart
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.process.sharded_tensors import require_whole_scalars
from elasticflow.runtime.process.torch_private import HashStore
from tests.pretended_device import pretended

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.runtime.loop.context import HookContext


def at(step: int) -> Position:
    """Return the position after *step*."""
    return Position(step, step, 0, step * 4, is_epoch_end=False)


class Model(nn.Module):
    """A layer, a frozen BatchNorm, a buffer that snapshots hold, and one that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.seen: Tensor
        self.cache: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.norm.eval()


@pytest.fixture
def started(me: Any, tmp_path: Path) -> Callable[..., Hooks]:
    """Return what makes the hooks of rank 0, training begun."""
    me.run_folder = SimpleNamespace(path=tmp_path)
    me.progress.loss, me.progress.scalars = 0.5, {"kl": 0.1}

    def make(model: nn.Module, *, is_exact: bool = False, step: int = 0, **calls: Any) -> Hooks:
        hooks: dict[str, Any] = {
            name: call if isinstance(call, Hook) else Hook(call, f"mine:{name}")
            for name, call in calls.items()
        }
        made = Hooks(me, model, is_exact=is_exact, **hooks)
        made.start(at(step))
        return made

    return make


def generators() -> list[Any]:
    """Return the state of all global generators."""
    name, words, *more = np.random.get_state(legacy=True)  # noqa: NPY002
    return [random.getstate(), (name, list(words), *more), torch.get_rng_state().tolist()]


def test_nothing_is_left_of_a_call(started: Callable[..., Hooks]) -> None:
    """Whatever it draws and switches, training's generators, modes and gradient mode are what they were."""
    model = Model()
    seen: dict[str, Any] = {}

    def hook(context: HookContext) -> None:
        seen["draws"] = [random.random(), np.random.rand(), torch.rand(()).item()]  # noqa: NPY002
        seen["modes"] = [context.model.training, model.norm.training, torch.is_grad_enabled()]
        context.model.train()
        model.cache.add_(1)

    random.seed(1)
    torch.manual_seed(2)
    np.random.seed(3)  # noqa: NPY002
    hooks, before = started(model, on_step=hook), generators()
    hooks.after_step(at(1))
    first = seen["draws"]
    assert seen["modes"] == [False, False, False]
    assert [model.training, model.layer.training, model.norm.training] == [True, True, False]
    assert torch.is_grad_enabled()
    assert generators() == before
    hooks.after_step(at(2))
    assert seen["draws"] != first
    torch.manual_seed(77)
    hooks.after_step(at(1))
    assert seen["draws"] == first  # of seed, hook, step and rank, and of nothing else


def add_in_place(model: Model) -> None:
    """Change a weight as PyTorch sees it."""
    model.layer.weight.add_(1)


def behind_its_back(model: Model) -> None:
    """Change a weight as PyTorch does not see it."""
    model.layer.weight.data.add_(1)


def count_in_a_buffer(model: Model) -> None:
    """Change a buffer that snapshots hold."""
    model.seen += 1


def freeze(model: Model) -> None:
    """Have a parameter trained no more."""
    model.layer.bias.requires_grad = False


def replace(model: Model) -> None:
    """Put another parameter in the place of one."""
    model.layer.bias = nn.Parameter(torch.zeros(2))


def swap_data(model: Model) -> None:
    """Give a parameter other memory."""
    model.layer.bias.data = torch.zeros(2)


def grow(model: Model) -> None:
    """Add a part."""
    model.extra = nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("change", "words", "needs_exact"),
    [
        (add_in_place, "changed layer.weight", False),
        (behind_its_back, "changed layer.weight", True),
        (count_in_a_buffer, "changed seen", False),
        (freeze, "froze layer.bias", False),
        (replace, "replaced layer.bias", False),
        (swap_data, "replaced layer.bias", False),
        (grow, "added extra.weight", False),
    ],
)
def test_a_change_of_what_is_trained_is_found_out(
    started: Callable[..., Hooks], change: Callable[[Model], None], words: str, *, needs_exact: bool
) -> None:
    """One that PyTorch does not count, too: at a hook's first call, and in exact mode at each."""
    for is_exact in (False, True):
        for calls_before in (0, 1):
            model = Model()

            def hook(context: HookContext, model: Model = model) -> None:
                if context.step == 9:
                    change(model)

            hooks = started(model, is_exact=is_exact, on_step=hook)
            for _ in range(calls_before):
                hooks.after_step(at(8))
            if needs_exact and not is_exact and calls_before:
                hooks.after_step(at(9))
                continue
            with pytest.raises(HookError) as refused:
                hooks.after_step(at(9))
            assert refused.value.message.startswith(
                f'hooks.on_step = "mine:on_step" {words}, which is trained'
            )


def test_draws_on_a_device_are_a_hooks_own() -> None:
    """A call draws there from its own seed, and training goes on in its stream."""
    with pretended() as device:
        generator = torch.get_device_module(device.device).default_generators[0]
        before, drawn = generator.get_state(), []
        for _ in range(2):
            with apart(nn.Linear(2, 2).to(device.device), None, device.device, 7):
                drawn.append(torch.rand(3, generator=generator).tolist())
        assert drawn[0] == drawn[1]
        assert torch.equal(generator.get_state(), before)


def test_each_is_called_when_it_says(started: Callable[..., Hooks], me: Any, tmp_path: Path) -> None:
    """With what is known by then; points are read back in their order."""
    calls: list[tuple[str, int, Any]] = []

    def hook(context: HookContext) -> None:
        calls.append((context.hook, context.step, context.snapshot))
        context.log_scalar(f"{context.hook}/kl", context.metrics["kl"])
        context.log_text("eval", str(context.metrics.get("eval")))

    names = ("on_start", "on_evaluation", "on_snapshot", "on_finish")
    hooks = started(Model(), step=3, on_step=Hook(hook, "mine:hook", every=2), **dict.fromkeys(names, hook))
    for step in (4, 5, 6):
        hooks.after_step(at(step))
    me.moments.evaluation[0](at(6), {"accuracy": 0.5})
    me.moments.snapshot[0](at(6), "name")
    me.moments.finish[0](at(6))
    expected = [
        ("on_start", 3, None), ("on_step", 4, None), ("on_step", 6, None), ("on_evaluation", 6, None),
        ("on_snapshot", 6, "name"), ("on_finish", 6, None),
    ]  # fmt: skip
    assert calls == expected
    points = read_points(tmp_path)
    assert [(p["hook"], p["step"]) for p in points if p["kind"] == "scalar"] == [c[:2] for c in expected]
    assert [p["value"] for p in points if p["kind"] == "text"] == ["None"] * 3 + ["{'accuracy': 0.5}"] * 3


def test_other_ranks_call_what_all_ranks_are_to(me: Any, tmp_path: Path) -> None:
    """And make no file where there is nothing to call."""
    me.rank, me.run_folder = 1, SimpleNamespace(path=tmp_path)
    me.progress.loss = None
    calls: list[str] = []
    for_all = Hook(lambda context: calls.append(f"{context.hook} {context.metrics}"), "m:f", all_ranks=True)
    Hooks(me, Model(), on_step=Hook(lambda _: calls.append("wrong"), "m:f")).start(at(0))
    assert list(tmp_path.iterdir()) == []
    hooks = Hooks(me, Model(), on_start=for_all, on_step=Hook(lambda _: calls.append("wrong"), "m:f"))
    hooks.start(at(0))
    hooks.after_step(at(1))
    assert calls == ["on_start {}"]


def test_ranks_learn_of_the_stop_that_a_hook_of_all_ranks_requests(
    me: Any, started: Callable[..., Hooks]
) -> None:
    """Before a snapshot is taken; a hook that rank 0 alone calls tells rank 0 alone, which writes the snapshot's record."""
    shared: list[str | None] = []
    me.share_request = lambda: shared.append(me.vote.stop_wanted)

    def hook(context: HookContext) -> None:
        if context.step == 2:
            raise StopTraining("enough")

    started(Model(), on_step=hook).after_step(at(1))
    assert [] == shared
    hooks = started(Model(), on_step=Hook(hook, "mine:f", all_ranks=True))
    hooks.after_step(at(1))
    hooks.after_step(at(2))
    assert [None, "enough"] == shared


def test_an_error_tells_which_hook(started: Callable[..., Hooks]) -> None:
    """Its traceback is the job's own; the model's mode is put back all the same."""
    model = Model()

    def hook(_: HookContext) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as raised:
        started(model, on_step=hook).after_step(at(5))
    assert raised.value.__notes__ == ['raised in hooks.on_step = "mine:on_step", after step 5']
    assert model.training


def test_a_hook_may_end_training(started: Callable[..., Hooks], me: Any) -> None:
    """As the step may: all ranks agree at the next one."""

    def hook(_: HookContext) -> None:
        raise StopTraining("good enough")

    started(Model(), on_step=hook).after_step(at(5))
    assert me.vote.stop_wanted == "good enough"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (lambda c: c.log_scalar("a b", 1), "is no name to log under"),
        (lambda c: c.log_scalar("a", torch.ones(2)), "logs one number"),
        (lambda c: c.log_scalar("a", "1"), "logs a number"),
        (lambda c: c.log_text("a", 1), "logs a str"),
        (lambda c: c.log_text("a", "x" * 1_000_001), "1,000,000 at most"),
        (lambda c: c.log_image("a", "x.png"), "an image is a tensor"),
        (lambda c: c.log_image("a", torch.ones(2, 2, 2, 2)), "an image is a tensor"),
    ],
)
def test_what_cannot_be_logged_says_what_can(started: Callable[..., Hooks], log: Any, words: str) -> None:
    """Wherever it is noticed, before a line is written."""
    with pytest.raises((TypeError, ValueError), match=words):
        started(Model(), on_step=log).after_step(at(1))


def test_a_number_of_sharded_parameters_is_that_of_the_whole(
    started: Callable[..., Hooks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm is logged as ranks gather it, not as this rank's rows have it."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(DTensor, "full_tensor", lambda _: torch.tensor(5.0))
    try:
        model = Model()
        fully_shard(model, mesh=DeviceMesh("cpu", [0]))
        started(
            model,
            on_step=Hook(
                lambda context: context.log_scalar(
                    "norm", context.model.get_parameter("layer.weight").norm()
                ),
                "mine:f",
                all_ranks=True,
            ),
        ).after_step(at(1))
        with pytest.raises(
            StepResultError, match="the scalar norm was made of a parameter of a sharded model"
        ):
            require_whole_scalars({"kl": torch.tensor(1.0), "norm": model.layer.weight.norm()})
    finally:
        dist.destroy_process_group()
    assert [5.0] == [point["value"] for point in read_points(tmp_path)]


def test_a_sharded_model_is_for_hooks_of_all_ranks(started: Callable[..., Hooks]) -> None:
    """A forward on rank 0 alone would wait for the others; a hook of all ranks may compute, and leaves no parameter gathered."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = Model()
        fully_shard(model, mesh=DeviceMesh("cpu", [0]))
        seen: list[Any] = []

        def compute(context: HookContext) -> None:
            seen.append(context.model)

        started(model, on_step=Hook(lambda context: context.log_scalar("a", 1), "mine:f")).after_step(at(1))
        with pytest.raises(HookError, match=r"on_step reads context\.model on rank 0 alone") as caught:
            started(model, on_step=Hook(compute, "mine:f")).after_step(at(1))
        assert "all_ranks = true" in str(caught.value.remedy)
        before = list(model.parameters())
        next(module for module in model.modules() if isinstance(module, FSDPModule)).unshard()
        assert any(now is not was for now, was in zip(model.parameters(), before, strict=True))
        started(model, on_step=Hook(compute, "mine:f", all_ranks=True)).after_step(at(1))
        assert seen == [model]
        assert all(now is was for now, was in zip(model.parameters(), before, strict=True))
    finally:
        dist.destroy_process_group()
