"""Diffusion (DDPM) with averaged weights: a small network takes noise off digits, and draws new ones of a given label.

`python diffusion.py WEIGHTS.safetensors` draws some with exported weights. Shapes: B images of 8 x 8 pixels, -1 to 1.
"""

from __future__ import annotations

import gzip
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FOLDER = Path(__file__).parent
STEPS = 50  # from a digit to noise, and back


class Block(nn.Module):
    """Two convolutions that add to what came in; time and label shift the features between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.shift = nn.Linear(width, width)
        self.second = nn.Sequential(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return (B, C, H, W) for the same and a condition (B, C)."""
        return x + self.second(self.first(x) + self.shift(condition)[:, :, None, None])


class Denoiser(nn.Module):
    """Tells the noise in images, given how far they are on their way to noise and their labels."""

    signal: Tensor  # (STEPS + 1)

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.time, self.label = nn.Embedding(STEPS, width), nn.Embedding(10, width)
        self.inputs = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.outputs = nn.Conv2d(width, 1, 3, padding=1)
        way = torch.arange(STEPS + 1) / STEPS
        signal = ((way * math.pi / 2).cos() ** 2).clamp(min=1e-3)  # what is left of the digit, in variance
        self.register_buffer("signal", signal, persistent=False)

    def forward(self, images: Tensor, time: Tensor, labels: Tensor) -> Tensor:
        """Return the noise in images (B, 1, 8, 8) at times (B) from 0 to STEPS - 1."""
        x, condition = self.inputs(images), self.time(time) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        return self.outputs(x)

    @torch.no_grad()
    def sample(self, labels: Tensor) -> Tensor:
        """Return new digits (B, 1, 8, 8) with these labels."""
        x = torch.randn(len(labels), 1, 8, 8, device=labels.device)
        for time in reversed(range(STEPS)):
            noise = self(x, torch.full_like(labels, time), labels)
            now, before = self.signal[time + 1], self.signal[time]
            digit = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
            kept = now / before
            mean = (kept.sqrt() * (1 - before) * x + before.sqrt() * (1 - kept) * digit) / (1 - now)
            spread = ((1 - before) / (1 - now) * (1 - kept)).sqrt()  # 0 at the last step
            x = mean + spread * torch.randn_like(x)
        return x


def denoising_step(model: Denoiser, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the squared error of the noise that the model sees in digits, each at a time of its own."""
    images, labels = batch
    time, noise = torch.randint(STEPS, (len(images),), device=images.device), torch.randn_like(images)
    signal = model.signal[time + 1][:, None, None, None]
    return (model(signal.sqrt() * images + (1 - signal).sqrt() * noise, time, labels) - noise).square().mean()


class Digits(Dataset[tuple[Tensor, int]]):
    """Digits and their labels."""

    def __init__(self, split: str = "train") -> None:
        name = "train" if split == "train" else "t10k"
        self.images = _read(f"{name}-images-idx3-ubyte.gz", header=16).view(-1, 1, 8, 8) / 127.5 - 1
        self.labels = _read(f"{name}-labels-idx1-ubyte.gz", header=8)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def _read(name: str, header: int) -> Tensor:
    return torch.frombuffer(bytearray(gzip.decompress((FOLDER / name).read_bytes())), dtype=torch.uint8)[
        header:
    ]


def legible(model: Denoiser, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the share of new digits whose nearest neighbour among real ones has the label that was asked for."""
    real, (_, labels) = Digits("train"), batch
    nearest = torch.cdist(model.sample(labels).flatten(1).cpu(), real.images.flatten(1)).argmin(dim=1)
    return (real.labels[nearest] == labels.cpu()).float().mean()


def show(context: Any) -> None:
    """Log ten digits, 0 to 9, that the averaged weights draw; a hook."""
    digits = context.ema.sample(torch.arange(10, device=context.device))
    context.log_image("digits", (digits[:, 0].clamp(-1, 1) + 1).div(2).transpose(0, 1).reshape(8, 80))


if __name__ == "__main__":
    from safetensors.torch import load_file

    model = Denoiser()
    model.load_state_dict(load_file(sys.argv[1]))
    for row in model.eval().sample(torch.arange(10))[:, 0].transpose(0, 1).reshape(8, 80):
        print("".join(" .:*#"[int((value.clamp(-1, 0.99) + 1) * 2.5)] for value in row))
