"""The examples of `elasticflow init`: the smallest, which it writes alone, and those of `--example NAME`, each a project of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.diagnostics.suggestions import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

JOB_FILE = "job.toml"
# In an installed package, the folder of examples/hatch_build.py; in a checkout, the examples themselves.
_FOLDERS = (Path(__file__).parent / "examples", Path(__file__).parents[2] / "examples")
_CODE = '''"""Three spirals in a plane: a small network that tells them apart, its data and its metric."""

import math

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    """A perceptron with two hidden layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
        )

    def forward(self, points: Tensor) -> Tensor:
        """Return the scores (samples, 3) of points (samples, 2)."""
        return self.layers(points)


def spirals(split: str = "train", samples: int = 3000) -> TensorDataset:
    """Return points and the number (0 to 2) of the spiral each lies on: the same ones on every machine."""
    random = torch.Generator().manual_seed(0 if split == "train" else 1)
    labels = torch.arange(samples) % 3
    radius = torch.rand(samples, generator=random)
    angle = 3.5 * radius + labels * (2 * math.pi / 3) + 0.15 * torch.randn(samples, generator=random)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), labels)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of samples whose highest score is the right one."""
    return (outputs.argmax(dim=1) == targets).float().mean()
'''


def examples() -> Mapping[str, str]:
    """Return a few words about each example, by its name."""
    return {folder.name: _about(folder) for folder in _folders()}


def files_of(name: str) -> Mapping[str, bytes]:
    """Return the files of an example by their names.

    Raises:
        ScaffoldError: there is no example of that name.
    """
    folders = {folder.name: folder for folder in _folders()}
    if name not in folders:
        near = nearest(name, folders)
        remedy = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(folders)}"
        raise ScaffoldError(f'there is no example "{name}"', remedy)
    # Folders inside are left over from runs.
    paths = (path for path in sorted(folders[name].iterdir()) if path.is_file())
    return {path.name: path.read_bytes() for path in paths if not path.name.startswith(".")}


def text_of_file(name: str) -> str:
    """Return a file of the examples by its path below their folder.

    Raises:
        ScaffoldError: the installation lacks the file.
    """
    for root in _FOLDERS:
        if (root / name).is_file():
            return (root / name).read_text(encoding="utf-8")
    raise ScaffoldError(f"this installation has no examples/{name}", "install elasticflow again")


def _folders() -> Iterator[Path]:
    root = next((folder for folder in _FOLDERS if folder.is_dir()), None)
    return iter(()) if root is None else (path.parent for path in sorted(root.glob(f"*/{JOB_FILE}")))


def _about(folder: Path) -> str:
    """Return the text after the name in the heading of an example's README."""
    with (folder / "README.md").open(encoding="utf-8") as lines:
        return lines.readline().partition(": ")[2].strip()


def spirals(name: str, *, epochs: int, batch_size: int, workers: int | str) -> tuple[str, dict[str, str]]:
    """Return the text of a job for the package *name*, and the package's files by path from the project's root."""
    from elasticflow.scaffold.job_text import text_of  # the completion of names does without it

    evaluation = (
        "[evaluation]",
        f'entry = "{name}:spirals"',
        'args = { split = "test", samples = 600 }',
        'every = "1 epoch" | or "100 steps"',
        f'metrics = {{ accuracy = "{name}:accuracy" }} | called with outputs and targets',
        'best = "max accuracy" | what keep.best means',
        "",
    )
    tables: dict[str, dict[str, Any]] = {
        "model": {
            "entry": f"{name}:Net",
            "args": {"width": 64},
            "loss": "torch.nn.functional:cross_entropy",
        },
        "optimizer": {"entry": "torch.optim:AdamW", "args": {"lr": 1e-2}},
        "dataset": {"entry": f"{name}:spirals", "global_batch_size": batch_size},
    }
    text = text_of(name, tables, evaluation=evaluation, epochs=epochs, workers=workers)
    return text, {f"{name}/__init__.py": _CODE}
