"""Contrastive pairs (SimCLR): two views of a digit are to lie close to each other, and far from those of all others.

No label is trained on; evaluation asks whether the nearest neighbour of each digit has its label.
Shapes: B pairs, E numbers of an embedding.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

FOLDER = Path(__file__).parent


class Encoder(nn.Module):
    """Images (B, 1, 8, 8) to embeddings (B, E) of length one."""

    def __init__(self, width: int = 32, embedding: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, 2, padding=1), nn.GroupNorm(4, 2 * width), nn.ReLU()),
            *(nn.Conv2d(2 * width, 2 * width, 3, 2, padding=1), nn.ReLU(), nn.Flatten()),
        )
        self.project = nn.Linear(8 * width, embedding)

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings (B, E)."""
        return F.normalize(self.project(self.features(images)), dim=1)


class Pairs(Dataset[tuple[Tensor, Tensor, int]]):
    """Two views of each digit, and its label; without *augment* both are the digit as it is."""

    def __init__(self, split: str = "train", augment: bool = False) -> None:
        name = "train" if split == "train" else "t10k"
        self.images = _read(f"{name}-images-idx3-ubyte.gz", header=16).view(-1, 1, 8, 8)
        self.labels = _read(f"{name}-labels-idx1-ubyte.gz", header=8)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        image = self.images[index] / 255
        views = (_view(image), _view(image)) if self.augment else (image, image)
        return *views, int(self.labels[index])


def _read(name: str, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress((FOLDER / name).read_bytes())), dtype=torch.uint8)[
        header:
    ]


def _view(image: Tensor) -> Tensor:
    """Return an image (1, H, W) moved, turned, scaled, lit and blurred by noise, each a little, at random."""
    turn, size = 0.3 * (2 * torch.rand(()) - 1), 1 + 0.2 * (2 * torch.rand(()) - 1)
    rotation = size * torch.stack((turn.cos(), -turn.sin(), turn.sin(), turn.cos())).view(2, 2)
    offset = 0.2 * (2 * torch.rand(2, 1) - 1)
    grid = F.affine_grid(torch.cat((rotation, offset), dim=1)[None], [1, *image.shape], align_corners=False)
    view = F.grid_sample(image[None], grid, align_corners=False)[0]
    return view * (0.6 + 0.8 * torch.rand(())) + 0.05 * torch.randn_like(view)


def info_nce(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], temperature: float = 0.2) -> Tensor:
    """Return the loss of telling, among the views of all pairs at hand, the other one of each pair (NT-Xent)."""
    first, second, _ = batch
    pairs = len(first)
    embeddings = model(torch.cat((first, second)))
    scores = embeddings @ embeddings.T / temperature
    scores.fill_diagonal_(-torch.inf)  # a view is not its own partner
    partners = torch.arange(2 * pairs, device=scores.device).roll(pairs)
    return F.cross_entropy(scores, partners)


def neighbour_accuracy(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the share of digits whose nearest neighbour among the others has their label."""
    images, _, labels = batch
    embeddings = model(images)
    scores = (embeddings @ embeddings.T).fill_diagonal_(-torch.inf)
    return (labels[scores.argmax(dim=1)] == labels).float().mean()
