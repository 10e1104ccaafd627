"""What `init` finds in source: models, data, losses, and the shapes that layers tell."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.jobfile.diagnostics.toml_literals import to_toml
from elasticflow.scaffold.candidates import candidates
from elasticflow.scaffold.example import loss_for, made_up_data
from elasticflow.scaffold.shapes import Shapes, shapes_of

if TYPE_CHECKING:
    from pathlib import Path

FILE = """\
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

class _Hidden(nn.Module): ...
class Block(nn.Module):
    def __init__(self, n): ...
class Net(nn.Module):
    def __init__(self, width, depth=2, *, rate=0.1):
        self.block = Block(width)
class Deep(Net): ...
class Stack(nn.Sequential): ...
class FocalLoss(nn.Module): ...
class Faces(Dataset):
    def __init__(self, root): ...
    def __getitem__(self, index): ...
class Plain:
    def __len__(self): ...
    def __getitem__(self, index): ...
class Stream(IterableDataset):
    def __iter__(self): ...
class Config: ...

def build(width: int = 4) -> nn.Module: ...
def load_data(root="x"):
    return []
def my_loss(outputs, targets): ...
def training_step(model, batch): ...
def helper(x): ...
"""


def test_what_a_file_offers() -> None:
    """Kind by kind, parts that others build upon and private names last; what is nothing of these is left out."""
    found: dict[str, list[str]] = {}
    for each in candidates(FILE):
        found.setdefault(each.role, []).append(each.name)
    assert {
        "model": ["Deep", "Stack", "build", "Block", "Net", "_Hidden"],
        "dataset": ["Faces", "Plain", "load_data"],
        "loss": ["my_loss"],
        "step": ["training_step"],
    } == found
    net = next(each for each in candidates(FILE) if each.name == "Net")
    deep = next(each for each in candidates(FILE) if each.name == "Deep")
    assert (("width",), {"depth": 2, "rate": 0.1}) == (net.required, net.defaults)
    assert ("width",) == deep.required


def test_functions_that_make_a_model() -> None:
    """By their annotation, or by what they return through others; what they make tells shapes and loss."""
    text = (
        "import torch.nn as nn\nclass Part(nn.Module): ...\nclass Net(nn.Module):\n    def __init__(self, block): ...\n"
        "def _make(kind, **named) -> Net:\n    return build(kind, **named)\n"
        "@register\ndef small(pretrained=False, **named) -> 'Net':\n    return _make('small', **named)\n"
        "def large():\n    net = Net(Part)\n    return net\n"
        "def larger():\n    return large()\n"
        "def conv(width) -> nn.Conv2d:\n    return nn.Conv2d(width, width)\n"
        "def either(deep):\n    if deep:\n        return Net(Part)\n    return 3\n"
    )
    found = candidates(text)
    assert ["small", "larger", "Part", "Net", "large", "_make"] == [each.name for each in found]
    assert {"small": "Net", "large": "Net", "larger": "Net"} == {
        each.name: each.made.name
        for each in found
        if each.made is not None and each.name in {"small", "large", "larger"}
    }


def _shapes(body: str, arguments: str = "", **given: Any) -> Shapes | None:
    text = f"class Net(nn.Module):\n    def __init__(self{arguments}):\n"
    text += "".join(f"        {line}\n" for line in body.splitlines())
    return shapes_of(candidates(text)[0], given)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("self.a = nn.Linear(4, 8)\nself.b = nn.Linear(8, 3)", Shapes((4,), 3)),
        ("self.a = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))", Shapes((784,), 10)),
        ("self.a = nn.Linear(out_features=1, in_features=6)", Shapes((6,), 1)),
        ("self.e = nn.Embedding(100, 8)\nself.o = nn.Linear(8, 2)", Shapes((32,), 2, tokens=100)),
        ("self.c = nn.Conv1d(3, 8, 3)", None),
        ("self.c = nn.Conv1d(3, 8, 3)\nself.f = nn.Linear(n, 4)", Shapes((3, 32), 4)),
        (
            (
                "self.c = nn.Conv2d(3, 6, 5)\nself.p = nn.MaxPool2d(2, 2)\nself.d = nn.Conv2d(6, 16, 5)\n"
                "self.q = nn.MaxPool2d(2, 2)\nself.f = nn.Linear(16 * 5 * 5, 10)"
            ),
            Shapes((3, 32, 32), 10),
        ),
        (
            "self.c = nn.Conv2d(1, 4, 3)\nself.p = nn.AdaptiveAvgPool2d(1)\nself.f = nn.Linear(4, 7)",
            Shapes((1, 28, 28), 7),
        ),
        ("self.c = layer(1, 4)\nself.p = nn.AdaptiveAvgPool2d(4)\nself.f = nn.Linear(64, 7)", None),
        ("self.x = something(4)", None),
    ],
)
def test_shapes_that_layers_tell(body: str, expected: Shapes | None) -> None:
    """Sizes are read off the first layer, classes off the last linear one; images get the side that fits."""
    assert expected == _shapes(body)


def test_shapes_that_arguments_tell() -> None:
    """A default, or what was given instead of it."""
    body, arguments = "self.width = width\nself.a = nn.Linear(width * 2, classes)", ", width=3, classes=4"
    assert Shapes((6,), 4) == _shapes(body, arguments)
    assert Shapes((10,), 4) == _shapes(body, arguments, width=5)
    assert _shapes(body, ", width, classes") is None


@pytest.mark.parametrize(
    ("shapes", "target", "loss"),
    [
        (Shapes((1, 8, 8), 10), (), "torch.nn.functional:cross_entropy"),
        (Shapes((4,), None), (), "torch.nn.functional:cross_entropy"),
        (Shapes((4,), 1), (1,), "torch.nn.functional:mse_loss"),
        (Shapes((16,), 3, tokens=50), (), "torch.nn.functional:cross_entropy"),
    ],
)
def test_made_up_data_has_the_shape(
    tmp_path: Path, shapes: Shapes, target: tuple[int, ...], loss: str
) -> None:
    """The module that is written works, gives the same samples each time, and fits the loss."""
    path = tmp_path / "data.py"
    path.write_text(made_up_data("Net", shapes))
    one, again = (runpy.run_path(str(path))["samples"](20) for _ in range(2))
    assert 20 == len(one)
    inputs, targets = one[3]
    assert (shapes.sample, target) == (tuple(inputs.shape), tuple(targets.shape))
    assert (inputs == again[3][0]).all()
    assert (targets == again[3][1]).all()
    assert loss == loss_for(shapes)


def test_values_as_toml() -> None:
    """Texts, numbers, lists and tables as the file format has them."""
    assert '{ a = [1, 2.5], b = "x\\"y", c = true }' == to_toml({"a": [1, 2.5], "b": 'x"y', "c": True})
