"""An image classifier as one trains it today: residual blocks, augmentation, mixup, smoothed labels, averaged weights.

Shapes: B images, C channels, H x W pixels (8 x 8 here).
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

FOLDER = Path(__file__).parent
CLASSES = 10


class Block(nn.Module):
    """Depthwise convolution, then a perceptron for each pixel; adds to what came in (ConvNeXt)."""

    def __init__(self, width: int, drop_path: float) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 5, padding=2, groups=width),
            nn.BatchNorm2d(width),
            nn.Conv2d(width, 4 * width, 1),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W) for (B, C, H, W); in training some samples skip the block."""
        y = self.layers(x)
        if self.training and self.drop_path:
            kept = torch.rand(len(x), 1, 1, 1, device=x.device) >= self.drop_path
            y = y * kept / (1 - self.drop_path)
        return x + y


class ConvNet(nn.Module):
    """Two stages of residual blocks, the second at half the resolution."""

    def __init__(self, width: int = 32, depth: int = 2, drop_path: float = 0.05) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            *(Block(width, drop_path) for _ in range(depth)),
            *(nn.BatchNorm2d(width), nn.Conv2d(width, 2 * width, 2, stride=2)),
            *(Block(2 * width, drop_path) for _ in range(depth)),
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores (B, 10) of images (B, 1, H, W)."""
        return self.head(self.features(images).mean(dim=(2, 3)))


class Digits(Dataset[tuple[Tensor, int]]):
    """Handwritten digits, 0 to 1, those to train on moved, turned and scaled a little, anew each time they are read."""

    def __init__(self, split: str = "train", augment: bool = False) -> None:
        name = "train" if split == "train" else "t10k"
        self.images = _read(f"{name}-images-idx3-ubyte.gz", header=16).view(-1, 1, 8, 8)
        self.labels = _read(f"{name}-labels-idx1-ubyte.gz", header=8)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index] / 255
        return moved(image) if self.augment else image, int(self.labels[index])


def _read(name: str, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress((FOLDER / name).read_bytes())), dtype=torch.uint8)[
        header:
    ]


def moved(image: Tensor, shift: float = 0.15, angle: float = 0.2, scale: float = 0.1) -> Tensor:
    """Return an image (C, H, W) moved by up to *shift* of half its side, turned by *angle* radians and scaled, at random."""
    turn, size = angle * (2 * torch.rand(()) - 1), 1 + scale * (2 * torch.rand(()) - 1)
    rotation = size * torch.stack((turn.cos(), -turn.sin(), turn.sin(), turn.cos())).view(2, 2)
    offset = shift * (2 * torch.rand(2, 1) - 1)
    grid = F.affine_grid(torch.cat((rotation, offset), dim=1)[None], [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, align_corners=False)[0]


def mixup_step(model: nn.Module, batch: tuple[Tensor, Tensor], alpha: float = 0.2) -> Tensor:
    """Return the loss of images laid over each other, two by two; both labels count by their image's share."""
    images, labels = batch
    if not model.training:  # evaluation asks for the loss, too
        return F.cross_entropy(model(images), labels)
    share = torch.distributions.Beta(alpha, alpha).sample()
    order = torch.randperm(len(images))
    scores = model(share * images + (1 - share) * images[order])
    losses = [F.cross_entropy(scores, each, label_smoothing=0.1) for each in (labels, labels[order])]
    return share * losses[0] + (1 - share) * losses[1]


def accuracy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the share of images whose highest score is their label's."""
    images, labels = batch
    return (model(images).argmax(dim=1) == labels).float().mean()
