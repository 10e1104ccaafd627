"""What `elasticflow init` asks a person for, one key after the other, and what it takes for an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import pytest
import tomli

from elasticflow.cli.write.init_files import InitOptions
from elasticflow.cli.write.init_model import job_for_model

if TYPE_CHECKING:
    from pathlib import Path

MODEL = """\
from torch import nn
class Part:
    def __init__(self, size: int, scale: float = 1.0, note: str | None = None): ...
class Net(nn.Module):
    def __init__(self, {argument}): ...
"""


def _made(folder: Path, monkeypatch: pytest.MonkeyPatch, argument: str, answers: list[str]) -> dict[str, Any]:
    """Return the job for a file of one model, whose questions get *answers*; all of them are asked for."""
    (folder / "nets.py").write_text(MODEL.replace("{argument}", argument))
    (folder / "data.py").write_text("def samples(): return [1]\ndef step(model, batch): ...\n")
    monkeypatch.setattr(click, "prompt", lambda *_, **__: answers.pop(0))
    options = InitOptions(dataset="data:samples", workers=2, may_ask=True)
    job = job_for_model(options, folder / "nets.py", folder, quiet=True)
    assert answers == []
    return tomli.loads(job.text)


LOSS = "cross_entropy"


@pytest.mark.parametrize(
    ("argument", "answers", "expected"),
    [
        ("n: int", ["four", "4.5", "4"], 4),
        ("x: float", ["much", "1e-3"], 1e-3),
        ("b: bool", ["7", "true"], True),
        ("s: str", ["4"], "4"),
        ("s: 'str'", ["a b"], "a b"),
        ("n: int | None", ["seven", "7"], 7),
        ("l: list[int]", ["1, 2,3"], [1, 2, 3]),
        ("l: tuple[int, ...]", ["3"], [3]),
        ("d: dict[str, int]", ["4", "{ a = 1 }"], {"a": 1}),
        ("whatever", ["4"], 4),
        ("whatever", ["four"], "four"),
        ("act: nn.Module", ['{ entry = "torch.nn:GELU" }'], {"entry": "torch.nn:GELU"}),
        ("part: Part", ["big", "3"], {"entry": "nets:Part", "args": {"size": 3, "scale": 1.0}}),
        ("*, n: int", ["4"], 4),
    ],
)
def test_a_value_is_asked_for_until_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, answers: list[str], expected: Any
) -> None:
    """By the annotation, as the check of a job has it; an object of the job's own is asked for field by field."""
    job = _made(tmp_path, monkeypatch, argument, [*answers, LOSS])
    (value,) = job["model"]["args"].values()
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["torch.nn.functional:l1_loss"], {"loss": "torch.nn.functional:l1_loss"}),
        (["no_such", "mse_loss"], {"loss": "torch.nn.functional:mse_loss"}),
        (["nets:absent", "", "data:step"], {"step": "data:step"}),
    ],
)
def test_a_loss_or_a_step_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str], expected: dict[str, str]
) -> None:
    """One of torch's by its name; without one, a step; what does not exist is asked for again."""
    job = _made(tmp_path, monkeypatch, "n=1", answers)
    assert job["model"] == {"entry": "nets:Net", **expected}
