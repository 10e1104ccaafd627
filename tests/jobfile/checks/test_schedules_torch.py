"""What is said of schedules is what they do, step by step."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.jobfile.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic

JOB = """
[job]
name = "x"
[model]
entry = "torch.nn:Identity"
loss = "torch.nn.functional:mse_loss"
[optimizer]
entry = "torch.optim:SGD"
[lr_scheduler]
entry = "torch.optim.lr_scheduler:{name}"
args = {{ {args} }}
[dataset]
entry = "torch.utils.data:TensorDataset"
global_batch_size = 1
[train]
steps = 12
"""
STEPS = 12
CASES = [
    ("CosineAnnealingLR", "T_max"), ("CosineAnnealingWarmRestarts", "T_0"), ("ConstantLR", "total_iters"), ("LinearLR", "total_iters"),
    ("OneCycleLR", "total_steps"), ("PolynomialLR", "total_iters"), ("StepLR", "step_size"),
]  # fmt: skip


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float] | None]:
    """Return a function that steps a schedule as training does and returns the rates, or None where it raises."""
    torch = pytest.importorskip("torch", exc_type=ImportError)

    def run(name: str, args: dict[str, Any]) -> list[float] | None:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **args)
            for _ in range(STEPS):
                optimizer.step()
                try:
                    schedule.step()
                except ValueError:
                    return None
                found.append(optimizer.param_groups[0]["lr"])
        return found

    return run


def told(folder: Path, name: str, args: str) -> list[Diagnostic]:
    """Return what is said of a job of 12 steps with this schedule."""
    (folder / "job.toml").write_text(JOB.format(name=name, args=args))
    return [each for each in load_job(folder / "job.toml").diagnostics if each.code in {"EF320", "EF408"}]


@pytest.mark.integration  # it imports torch
@pytest.mark.parametrize("length", [4, 11, 12, 13, 20])
@pytest.mark.parametrize(("name", "key"), CASES)
def test_schedules_do_what_is_said(
    rates: Callable[..., list[float] | None], tmp_path: Path, name: str, key: str, length: int
) -> None:
    """Raises, rises again, stays at nought, or is cut off: said exactly when it happens."""
    more = {"max_lr": 1.0} if name == "OneCycleLR" else {}
    text = ", ".join([*(f"{option} = {value}" for option, value in more.items()), f"{key} = {length}"])
    found = told(tmp_path, name, text)
    seen = rates(name, {**more, key: length})
    assert (seen is None) == any(each.code == "EF320" for each in found)
    if seen is None:
        return
    assert bool(found) == is_worth_telling(name, length, seen)


def is_worth_telling(name: str, length: int, seen: list[float]) -> bool:
    """Return whether the rates show something to be told of."""
    match name:
        case "CosineAnnealingLR":
            rises = any(after > before for before, after in pairwise(seen))
            return rises or min(seen) > 1e-9
        case "CosineAnnealingWarmRestarts":
            return length > STEPS
        case "PolynomialLR":
            return seen.count(0.0) > 1 or 0.0 not in seen
        case "StepLR":
            return len(set(seen[:-1])) == 1  # a rate that changes after the last step is not used
        case "OneCycleLR":
            return seen[-2] > 1e-4  # what the last step trains with
        case _:  # warm-ups: the full rate is there in the end
            return seen[-1] < 1.0 - 1e-9


OURS = [
    ("warmup_stable_decay", 'warmup = 1, total = 12, decay = 3, shape = "cosin"', ["EF205"]),
    ("warmup_stable_decay", "warmup = 1, total = 12", ["EF204"]),
    ("warmup_cosine", "warmup = 1, totl = 12", ["EF204"]),
    ("warmup_cosine", "warmup = 1, total = 12, final = 0.1", []),
    ("warmup_cosin", "warmup = 1, total = 12", ["EF202"]),
]


@pytest.mark.parametrize(("name", "args", "expected"), OURS)
def test_entries_of_ours_are_checked_as_others_are(
    tmp_path: Path, name: str, args: str, expected: list[str]
) -> None:
    """Name, arguments and their types, read from the source of elasticflow itself."""
    text = JOB.format(name=name, args=args).replace("torch.optim.lr_scheduler", "elasticflow.schedules")
    (tmp_path / "job.toml").write_text(text)
    found = [each.code for each in load_job(tmp_path / "job.toml").diagnostics if each.severity == "error"]
    assert found == expected
