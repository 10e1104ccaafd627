"""What `init` finds in source: models, data, losses, steps, each with its file and line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import ScaffoldError
from elasticflow.scaffold.candidates import candidates_in, locate_module, method_of, resolver_of, wholes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.scaffold.candidates import Candidate

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
    def __len__(self): ...
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
def vae_loss(recon, x, mu, logvar): ...
def training_step(model, batch): ...
def helper(x): ...
"""


def _found(folder: Path, text: str, name: str = "nets.py") -> list[Candidate]:
    (folder / name).write_text(text, errors="surrogateescape")
    location = locate_module(folder / name, folder)
    return candidates_in(folder / name, location, resolver_of(location, folder))


def _names(found: Sequence[Candidate]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for each in found:
        names.setdefault(each.role, []).append(each.name)
    return names


def test_what_a_file_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Role by role, parts that others build upon and private names last; what is nothing of these is left out."""
    monkeypatch.chdir(tmp_path)
    found = _found(tmp_path, FILE)
    assert _names(found) == {
        "model": ["Deep", "Stack", "build", "_Hidden", "Block", "Net"],
        "dataset": ["Faces", "Plain", "load_data"],
        "loss": ["my_loss"],
        "step": ["training_step"],
    }
    assert ("nets:Deep", "nets.py:11") == (found[0].entry, found[0].definition.where)
    assert ["Deep", "Stack", "build"] == [each.name for each in wholes(found, "model")]


def test_neighbours_offer_all_but_models(tmp_path: Path) -> None:
    """Tests and files that are no Python are passed over."""
    for name in ("other.py", "test_other.py"):
        (tmp_path / name).write_text(FILE)
    (tmp_path / "broken.py").write_text("def broken(:\n")
    found = _found(tmp_path, "import torch\nclass Net(torch.nn.Module): ...\n")
    assert [each.entry for each in found if each.role in {"model", "loss"}] == ["nets:Net", "other:my_loss"]
    assert ["other:my_loss"] == [each.entry for each in wholes(found, "loss")]
    found = _found(tmp_path, "def own_loss(outputs, targets): ...\n")
    assert ["nets:own_loss"] == [each.entry for each in wholes(found, "loss")]


def test_bases_elsewhere_and_under_other_names(tmp_path: Path) -> None:
    """`import torch.nn as N`, `from torch.nn import Module as M`, a base of the project's own or of what is not installed."""
    (tmp_path / "base.py").write_text("import torch.nn as N\nclass Base(N.Module): ...\n")
    found = _found(
        tmp_path,
        "from torch.nn import Module as M\nfrom base import Base\nimport torch.nn as N\nimport absent as a\n"
        "class One(N.Sequential): ...\nclass Two(M): ...\nclass Three(Base): ...\nclass Four(a.PreTrainedModel): ...\n"
        "class Later(One): ...\nclass Data(a.LightningDataModule): ...\nclass Config(dict): ...\n"
        "def made() -> Three: ...\ndef other():\n    return Two()\n",
    )
    assert _names(found) == {"model": ["Four", "Later", "made", "other", "One", "Two", "Three"]}


def test_methods_of_a_model(tmp_path: Path) -> None:
    """Its own and inherited ones; nothing else that a name stands for."""
    text = "from torch import nn\nclass A(nn.Module):\n    def training_step(self, batch): ...\nclass B(A): ...\n"
    _found(tmp_path, text)
    resolver = resolver_of(locate_module(tmp_path / "nets.py", tmp_path), tmp_path)
    found = method_of("nets:B", "training_step", resolver)
    assert found is not None
    assert found.node.lineno == 3
    assert method_of("nets:B", "absent", resolver) is None
    assert method_of("nets:absent", "training_step", resolver) is None


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("nets.py", "def broken(:\n", "not Python of this version: .*nets.py, line 1"),
        ("nets.py", "\udcff", "cannot be read"),
        ("my-nets.py", "", "is no module's name"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, told: str) -> None:
    """Each is refused with its reason."""
    with pytest.raises(ScaffoldError, match=told):
        _found(tmp_path, text, name)


def test_where_a_module_is_found_from(tmp_path: Path) -> None:
    """The path begins below the last folder that can be no package; a package is named by its folder."""
    assert ("nets", "my-code") == locate_module(tmp_path / "my-code" / "nets.py", tmp_path)
    assert ("a.b", ".") == locate_module(tmp_path / "a" / "b" / "__init__.py", tmp_path)
    with pytest.raises(ScaffoldError, match="lies outside of the project"):
        locate_module(tmp_path.parent / "nets.py", tmp_path)
