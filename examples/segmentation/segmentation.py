"""Segmentation: a small U-Net tells, for each pixel of a noisy canvas, which digit it belongs to, if any.

Shapes: B canvases, C channels, H x W pixels (24 x 24 here).
"""

from __future__ import annotations

import gzip
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FOLDER = Path(__file__).parent
SIDE = 24  # of a canvas, in pixels
DIGITS = 3  # on each canvas
CLASSES = 11  # 0 is the background, 1 to 10 are the digits


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions that keep H x W."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
    )


class UNet(nn.Module):
    """Two halvings of the resolution and back, each level beside what it was before."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([block(1, width), block(width, 2 * width)])
        self.bottom = block(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.merge = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (B, 11, H, W) of canvases (B, 1, H, W)."""
        levels = []
        for down in self.down:
            levels.append(down(x))
            x = nn.functional.max_pool2d(levels[-1], 2)
        x = self.bottom(x)
        for up, merge, level in zip(self.up, self.merge, reversed(levels), strict=True):
            x = merge(torch.cat((up(x), level), dim=1))
        return self.head(x)


class Canvases(Dataset[tuple[Tensor, Tensor]]):
    """Canvases with three digits each at random places, and a mask of the same size.

    Those to train on are made anew each time that they are read; those to test on are always the same.
    """

    def __init__(self, split: str = "train") -> None:
        name = "train" if split == "train" else "t10k"
        self.images = _read(f"{name}-images-idx3-ubyte.gz", header=16).view(-1, 8, 8) / 255
        self.labels = _read(f"{name}-labels-idx1-ubyte.gz", header=8).long()
        self.fixed = split != "train"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index) if self.fixed else None
        canvas, mask = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE, dtype=torch.long)
        for digit in (index, *torch.randint(len(self), (DIGITS - 1,), generator=random).tolist()):
            top, left = torch.randint(SIDE - 8 + 1, (2,), generator=random).tolist()
            window = slice(top, top + 8), slice(left, left + 8)
            ink = self.images[digit] > 0.3
            canvas[window] = torch.where(ink, self.images[digit], canvas[window])
            mask[window] = torch.where(ink, self.labels[digit] + 1, mask[window])
        return (canvas + 0.1 * torch.randn(SIDE, SIDE, generator=random))[None], mask


def _read(name: str, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress((FOLDER / name).read_bytes())), dtype=torch.uint8)[
        header:
    ]


class MeanIoU:
    """The mean, over the classes, of the pixels that are rightly of a class by those that are or were said to be."""

    def __init__(self) -> None:
        self.pixels = torch.zeros(CLASSES, CLASSES)  # by true class and by predicted class

    def update(self, scores: Tensor, mask: Tensor) -> None:
        """Count the pixels of a batch."""
        pairs = CLASSES * mask + scores.argmax(dim=1)
        self.pixels += torch.bincount(pairs.flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES)

    def compute(self) -> Tensor:
        """Return the mean over all that was counted."""
        right = self.pixels.diagonal()
        return (right / (self.pixels.sum(dim=0) + self.pixels.sum(dim=1) - right)).mean()
