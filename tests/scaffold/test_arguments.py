"""What arguments take, told by annotations, defaults, uses and names; and texts turned into that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.scaffold.answers import coerced
from elasticflow.scaffold.candidates import candidates

if TYPE_CHECKING:
    from elasticflow.scaffold.arguments import Argument

FILE = """\
import dataclasses
import pathlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Literal, Optional, Sequence, Type, Union
import torch.nn as N

@dataclass
class Base:
    seed: int = 1

@dataclasses.dataclass
class Config(Base):
    vocab: int
    dim: int = 8
    rate: float = 0.5
    name: Optional[str] = None
    sizes: list[int] = field(default_factory=list)

class Net(N.Module):
    def __init__(self, {arguments}):
        {body}
"""


def _argument(argument: str, body: str = "pass") -> Argument:
    text = FILE.replace("{arguments}", argument).replace("{body}", body)
    (net,) = [each for each in candidates(text) if each.name == "Net"]
    (found,) = net.arguments
    return found


REFUSED = object()


@pytest.mark.parametrize(
    ("argument", "text", "expected"),
    [
        ("n: int", "4", 4),
        ("n: int", "four", REFUSED),
        ("n: int", "4.5", REFUSED),
        ("n: int", "9" * 40, REFUSED),
        ("x: float", "1e-3", 1e-3),
        ("x: float", "4", 4.0),
        ("x: float", "nan", REFUSED),
        ("x: 'float'", "much", REFUSED),
        ("b: bool", "Yes", True),
        ("b: bool", "false", False),
        ("b: bool", "1", REFUSED),
        ("s: str", "4", "4"),
        ("s: str", '"a b"', "a b"),
        ("p: Path", "/data/x", "/data/x"),
        ("p: pathlib.Path | None", "4", "4"),
        ("p: Union[str, Path]", "4", "4"),
        ("n: Optional[int]", "7", 7),
        ("n: int | None", "seven", REFUSED),
        ("n: int | str", "7", 7),
        ("n: str | int", "seven", "seven"),
        ("l: list[int]", "1, 2,3", [1, 2, 3]),
        ("l: List[int]", "[1, 2]", [1, 2]),
        ("l: Sequence[str]", "a,b", ["a", "b"]),
        ("l: list[float]", "1,x", REFUSED),
        ("l: tuple[int, ...]", "3", [3]),
        ("c: Literal['sum', 'mean']", "mean", "mean"),
        ("c: Literal['sum', 'mean']", "max", REFUSED),
        ("c: Literal[1, 2]", "2", 2),
        ("d: dict[str, int]", "{ a = 1 }", {"a": 1}),
        ("d: dict[str, int]", "4", REFUSED),
        ("num_classes", "four", REFUSED),
        ("num_classes", "10", 10),
        ("num_classes", "[1, 2]", [1, 2]),
        ("image_size", "32,64", [32, 64]),
        ("dropout", "0.1", 0.1),
        ("root", "4", "4"),
        ("split", "train", "train"),
        ("whatever", "4", 4),
        ("whatever", "four", "four"),
        ("width=3", "5", 5),
        ("width=3", "wide", REFUSED),
        ("bias=True", "no", False),
        ("act='relu'", "4", "4"),
        ("rates=(0.1, 0.2)", "0.5,1", [0.5, 1.0]),
        ("block: Type[N.Module]", "x", REFUSED),
        ("act: Callable", "x", REFUSED),
    ],
)
def test_a_text_becomes_what_the_argument_takes(argument: str, text: str, expected: Any) -> None:
    """Each kind of annotation, default and name; what does not fit is refused and never written."""
    takes = _argument(argument).takes
    if expected is REFUSED:
        with pytest.raises(ValueError, match=r".*"):
            coerced(takes, text)
    else:
        found = coerced(takes, text)
        assert (found, type(found)) == (expected, type(expected))
    assert takes.words


@pytest.mark.parametrize(
    ("argument", "body", "expected"),
    [
        ("config: Config", "pass", "Config"),
        ("config: 'Config | None'", "pass", "Config"),
        ("config: Optional[Config]", "pass", "Config"),
        ("config", "self.a = config.vocab * config.dim", "Config"),
        ("cfg", "pass", None),
        ("setup", "self.a = setup.seed", None),
    ],
)
def test_an_argument_is_an_object_of_a_dataclass(argument: str, body: str, expected: str | None) -> None:
    """By its annotation; without one by the fields that are read, where only one class has them."""
    assert expected == _argument(argument, body).takes.config


def test_the_fields_of_a_dataclass() -> None:
    """Its own and inherited ones, with their defaults where a job file can give them."""
    text = FILE.replace("{arguments}", "config: Config").replace("{body}", "pass")
    fields = candidates(text)[0].configs["Config"].fields
    assert {each.name: (each.is_required, each.default) for each in fields} == {
        "seed": (False, 1),
        "vocab": (True, None),
        "dim": (False, 8),
        "rate": (False, 0.5),
        "name": (False, None),
        "sizes": (False, None),
    }


@pytest.mark.parametrize(
    ("argument", "body"), [("block", "self.a = block(3)"), ("config", "self.a = config.b")]
)
def test_an_argument_that_is_called_or_read_is_an_object(argument: str, body: str) -> None:
    """A job file cannot give it."""
    assert _argument(argument, body).takes.is_object


def test_texts_compared_with_make_an_argument_a_text() -> None:
    """`if rnn_type in ["LSTM", "GRU"]`."""
    found = _argument("rnn_type", "self.a = rnn_type in ['LSTM', 'GRU']")
    assert "4" == coerced(found.takes, "4")
