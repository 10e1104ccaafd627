"""Projects as people have them: a right job has nothing to complain of, wherever its code lies and however it is written."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from elasticflow.jobfile.entry_points import check
from elasticflow.jobfile.load import load_job

JOB = """
[job]
name = "x"
path = {path}
[model]
entry = "{model}"
args = {args}
loss = "{loss}"
[optimizer]
entry = "{optimizer}"
[dataset]
entry = "{dataset}"
global_batch_size = 8
[train]
epochs = 1
"""
CODE = """
from __future__ import annotations
import torch
from torch import nn, Tensor
from torch.utils.data import Dataset
class Net(nn.Module):
    def __init__(self, width: int = 8, *, act: str = "relu", **rest) -> None: ...
class Data(Dataset[Tensor]):
    def __init__(self, root: str = ".") -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Tensor: ...
def loss(outputs: Tensor, targets: Tensor, weight: float = 1.0) -> Tensor: ...
def optimizer(model: nn.Module, lr: float = 0.1): ...
"""
ENTRIES = {"model": "{}:Net", "dataset": "{}:Data", "loss": "{}:loss", "optimizer": "{}:optimizer"}
ADAM = "torch.optim:AdamW"
Layout = tuple[dict[str, str], str, dict[str, str]]
PROJECTS: dict[str, Layout] = {
    "one file beside the job": ({"train_code.py": CODE}, "job.toml", {"in": "train_code"}),
    "jobs in a folder": ({"pyproject.toml": "", "pkg/__init__.py": "", "pkg/nets.py": CODE}, "jobs/job.toml", {"in": "pkg.nets"}),
    "src layout": ({"pyproject.toml": "", "src/pkg/__init__.py": CODE}, "jobs/job.toml", {"in": "pkg", "path": '["src"]'}),
    "src layout, tests and notebooks beside": (
        {"pyproject.toml": "", "src/pkg/__init__.py": "from .nets import *", "src/pkg/nets.py": CODE, "tests/pkg/x.py": "",
         "notebooks/a.ipynb": "{}", "pkg/readme.md": ""},
        "job.toml", {"in": "pkg", "path": '["src"]'},
    ),
    "monorepo, the project below": (
        {".git/config": "", "teams/vision/pyproject.toml": "", "teams/vision/net.py": CODE, "net.py": "raise 1"},
        "teams/vision/job.toml", {"in": "net"},
    ),
    "monorepo, one root": (
        {"pyproject.toml": "", "libs/shared/shared/__init__.py": CODE, "apps/a/app.py": "from shared import *"},
        "apps/a/job.toml", {"in": "app", "path": '["apps/a", "libs/shared"]'},
    ),
    "no __init__ anywhere": ({"pyproject.toml": "", "pkg/deep/nets.py": CODE}, "jobs/job.toml", {"in": "pkg.deep.nets"}),
    "a namespace in two folders": (
        {"pyproject.toml": "", "one/ns/a.py": CODE, "two/ns/b.py": "from ns.a import Net, Data, loss, optimizer"},
        "job.toml", {"in": "ns.b", "path": '["one", "two"]'},
    ),
    "relative imports and re-exports": (
        {"pyproject.toml": "", "pkg/__init__.py": "from .sub import Net, Data\nfrom .sub.more import loss as loss, opt as optimizer",
         "pkg/sub/__init__.py": "from ..base import Net, Data", "pkg/sub/more.py": "from ..base import loss\nfrom ..base import optimizer as opt",
         "pkg/base.py": CODE},
        "job.toml", {"in": "pkg"},
    ),
    "imports that may fail": (
        {"pyproject.toml": "", "m.py": f"try:\n    import apex\nexcept ImportError:\n    apex = None\n{CODE}"}, "job.toml", {"in": "m"}),
    "types for checkers only": (
        {"pyproject.toml": "", "m.py": f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from collections.abc import Sequence\n{CODE}"},
        "job.toml", {"in": "m", "args": "{ width = 3 }"},
    ),
    "a registry": (
        {"pyproject.toml": "", "m.py": f"REG = {{}}\ndef register(f):\n    REG[f.__name__] = f\n    return f\n{CODE}\n@register\ndef build(): ..."},
        "job.toml", {"in": "m", "model": "m:build", "args": "{ anything = 1 }"},
    ),
    "a lazy package": (
        {"pyproject.toml": "", "pkg/__init__.py": "import importlib\ndef __getattr__(name):\n    return getattr(importlib.import_module('.m', __name__), name)",
         "pkg/m.py": CODE},
        "job.toml", {"in": "pkg"},
    ),
    "names of the standard library and of packages": (
        {"pyproject.toml": "", "queue.py": CODE, "click.py": "from queue import *"}, "job.toml", {"in": "click"}),
    "a configuration as a dataclass": (
        {"pyproject.toml": "", "m.py": CODE + "from dataclasses import dataclass, field\n@dataclass\nclass Config:\n    width: int = 1\n"
         "    sizes: list[int] = field(default_factory=list)\ndef build(config: Config | None = None, *, sizes: tuple[int, ...] = ()): ..."},
        "job.toml", {"in": "m", "model": "m:build", "args": "{ sizes = [1, 2] }"},
    ),
    "a model of lightning": (
        {"pyproject.toml": "", "m.py": "import lightning as L\n" + CODE.replace("nn.Module):", "L.LightningModule):")},
        "job.toml", {"in": "m", "args": "{ width = 2, unknown = 3 }"},
    ),
    "a model of transformers": (
        {"pyproject.toml": "", "m.py": CODE}, "job.toml",
        {"in": "m", "model": "transformers:AutoModel.from_pretrained", "args": '{ pretrained_model_name_or_path = "x" }'},
    ),
    "an attrs class and a pydantic model": (
        {"pyproject.toml": "", "m.py": CODE + "import attrs\nimport pydantic\n@attrs.define\nclass A:\n    x: int\nclass B(pydantic.BaseModel):\n    x: int"},
        "job.toml", {"in": "m", "model": "m:A", "args": "{ x = 1, y = 2 }"},
    ),
    "a model of functions": (
        {"pyproject.toml": "", "m.py": CODE + "from functools import partial\nsmall = partial(Net, 8, act='x')\nbig = partial(small, act='y')"},
        "job.toml", {"in": "m", "model": "m:big", "args": '{ act = "z" }'},
    ),
    "a model by a class method": (
        {"pyproject.toml": "", "m.py": CODE + "class Big(Net):\n    @classmethod\n    def of(cls, size: str = 's'): ..."},
        "job.toml", {"in": "m", "model": "m:Big.of", "args": '{ size = "m" }'},
    ),
    "a subset of a dataset": (
        {"pyproject.toml": "", "m.py": CODE + "from torch.utils.data import Subset\ndef part(split='train'):\n    return Subset(Data(), range(3))"},
        "job.toml", {"in": "m", "dataset": "m:part"},
    ),
    "a data set of hugging face": (
        {"pyproject.toml": "", "m.py": CODE + "import datasets\ndef hf():\n    return datasets.load_dataset('x')"}, "job.toml", {"in": "m", "dataset": "m:hf"}),
    "a mixin that gives the length": (
        {"pyproject.toml": "", "m.py": CODE + "class Sized:\n    def __len__(self): ...\nclass D(Sized, Dataset):\n    def __getitem__(self, i): ..."},
        "job.toml", {"in": "m", "dataset": "m:D"},
    ),
    "torch's own": ({"pyproject.toml": "", "m.py": CODE}, "job.toml", {"in": "m", "optimizer": "torch.optim:SGD", "loss": "torch.nn.functional:cross_entropy"}),
    "with a byte order mark": ({"pyproject.toml": "", "m.py": f"\ufeff{CODE}"}, "job.toml", {"in": "m"}),
    "with an encoding line and an old quirk": ({"pyproject.toml": "", "m.py": f"# -*- coding: utf-8 -*-\n'\\d'\n{CODE}"}, "job.toml", {"in": "m"}),
}  # fmt: skip


@pytest.mark.parametrize("has_torch", [True, False])
@pytest.mark.parametrize("name", PROJECTS)
def test_a_right_job_has_no_errors_and_no_warnings(
    name: str, has_torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch and in a hook's environment without it."""
    files, job, facts = PROJECTS[name]
    if not has_torch:
        monkeypatch.setattr(check, "installed_folders", _standard_library)
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, "utf-8")
    entries = {key: facts.get(key, text.format(facts["in"])) for key, text in ENTRIES.items()}
    (tmp_path / job).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / job).write_text(
        JOB.format(path=facts.get("path", '["."]'), args=facts.get("args", "{}"), **entries), "utf-8"
    )
    monkeypatch.chdir(tmp_path)
    found = load_job(Path(job)).diagnostics
    assert [(each.code, each.message) for each in found if each.severity != "note"] == []


def _standard_library() -> tuple[Path, ...]:
    return (Path(inspect.__file__).parent,)
