"""Handwritten digits: a small convolutional network, its data and its metric.

Ordinary PyTorch code that knows nothing of elasticflow; jobs/mnist.toml names its parts.
Shapes: B samples, H x W pixels (8 x 8 for the digits kept here, 28 x 28 for MNIST).
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from examples.mnist import idx

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Digits", "Net", "accuracy", "digits"]


class Net(nn.Module):
    """A small convolutional network for grey digits of any size from 8 x 8 pixels up.

    With BatchNorm and dropout, so that it has all that makes training hard to repeat.
    """

    def __init__(self, width: int = 32, dropout: float = 0.1) -> None:
        """Build it with *width* channels after the first layer."""
        super().__init__()
        self.features = nn.Sequential(
            *_layer(1, width),
            nn.MaxPool2d(2),
            *_layer(width, 2 * width),
            *_layer(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(4),  # the same head for 8 x 8 and 28 x 28
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(2 * width * 4 * 4, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Return class scores (B, 10) of images (B, 1, H, W)."""
        scores: Tensor = self.head(self.features(images))
        return scores


def _layer(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()


class Digits(Dataset[tuple[Tensor, int]]):
    """Labelled digits in memory, kept as bytes and scaled to 0..1 as they are taken.

    Attributes:
        source: Where they came from.
        fingerprint: Digest of every image and label: the same data anywhere has the same.
    """

    def __init__(self, images: Tensor, labels: Tensor, source: str) -> None:
        """Keep uint8 *images* (B, 1, H, W) and int64 *labels* (B)."""
        self.images = images
        self.labels = labels
        self.source = source
        digest = hashlib.sha256(repr(tuple(images.shape)).encode())
        digest.update(images.numpy().data)
        digest.update(labels.numpy().data)
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float().div_(255), int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return many samples at once: DataLoader calls this, several times as fast as one by one."""
        chosen = torch.as_tensor(indices)
        images = self.images[chosen].float().div_(255)
        return list(zip(images.unbind(), self.labels[chosen].tolist(), strict=True))


def digits(split: str, root: str | None = None) -> Digits:
    """Return the "train" or the "test" digits in MNIST's four files.

    They are read from *root*, a folder or any URL that fsspec knows (`s3://bucket/mnist`, `http://...`);
    by default they are the 1,797 digits kept beside this module (see its README.md).

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: another split, a file that is not MNIST's format, or images without labels.
    """
    if split not in idx.FILES:
        raise ValueError(f'split is "train" or "test", not "{split}"')
    place = root or str(Path(__file__).resolve().parent)
    images_name, labels_name = idx.FILES[split]
    (count, height, width), pixels = idx.read(place, images_name, dimensions=3)
    (labelled,), labels = idx.read(place, labels_name, dimensions=1)
    if count != labelled:
        raise ValueError(
            f"{idx.without_secrets(place)}: {count} images but {labelled} labels in the {split} files"
        )
    return Digits(
        torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(count, 1, height, width),
        torch.frombuffer(bytearray(labels), dtype=torch.uint8).long(),
        source=idx.without_secrets(place),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share (0..1) of *targets* (B) that have the highest score in *outputs* (B, 10)."""
    return (outputs.argmax(dim=1) == targets).float().mean()
