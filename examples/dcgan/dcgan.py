"""A DCGAN for handwritten digits of 8 x 8 pixels: two networks trained against each other, each with its own optimizer.

Shapes: B samples, Z numbers that an image is made from.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.optim import Adam, Optimizer

FILE = Path(__file__).with_name("train-images-idx3-ubyte.gz")
HEADER = 16  # bytes of an IDX file of images


class DCGAN(nn.Module):
    """A generator of images and a discriminator that tells them from real ones."""

    def __init__(self, latent: int = 32, width: int = 32) -> None:
        super().__init__()
        self.latent = latent
        self.generator = nn.Sequential(
            *(nn.ConvTranspose2d(latent, 2 * width, 2, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.ConvTranspose2d(width, 1, 4, 2, 1), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Conv2d(1, width, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(2 * width, 1, 2), nn.Flatten(0)),
        )
        self.apply(_init)

    def sample(self, count: int) -> Tensor:
        """Return new images (count, 1, 8, 8), -1 to 1."""
        device = next(self.parameters()).device
        return self.generator(torch.randn(count, self.latent, 1, 1, device=device))

    def configure_optimizers(self, lr: float, betas: tuple[float, float]) -> dict[str, Optimizer]:
        """Return an optimizer for each network."""
        return {
            "generator": Adam(self.generator.parameters(), lr, betas),
            "discriminator": Adam(self.discriminator.parameters(), lr, betas),
        }

    def training_step(self, images: Tensor, optimizers: dict[str, Optimizer]) -> dict[str, Tensor]:
        """Move the discriminator, then the generator, and return what to log: both losses, and how both sides fare."""
        fakes = self.sample(len(images))

        optimizers["discriminator"].zero_grad()
        real, fake = self.discriminator(images), self.discriminator(fakes.detach())
        loss_d = bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))
        loss_d.backward()
        optimizers["discriminator"].step()

        optimizers["generator"].zero_grad()
        fake = self.discriminator(fakes)
        loss_g = bce(fake, torch.ones_like(fake))
        loss_g.backward()
        optimizers["generator"].step()
        return {
            "loss": loss_d + loss_g,
            "loss_d": loss_d,
            "loss_g": loss_g,
            "real_seen": (real > 0).float().mean(),  # the share of real images that are taken for real
        }


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, std=0.02)


def digits() -> Tensor:
    """Return the images (1438, 1, 8, 8), -1 to 1."""
    pixels = bytearray(gzip.decompress(FILE.read_bytes()))[HEADER:]
    return torch.frombuffer(pixels, dtype=torch.uint8).view(-1, 1, 8, 8) / 127.5 - 1


def show(context: Any) -> None:
    """Log sixteen new images as one; a hook."""
    images = (context.model.sample(16) + 1) / 2
    context.log_image("digits", images.view(4, 4, 8, 8).transpose(1, 2).reshape(32, 32))
