"""What the scripts of this folder train: a classifier of points, and a language model of letters. Small enough for a laptop.

Shapes: B samples, T characters of one sample, V characters of the alphabet.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

TEXT = Path(__file__).parents[1] / "gpt" / "sonnets.txt"
BLOCK = 24  # T


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of a square, and whether each lies within the unit circle."""

    def __init__(self, size: int) -> None:
        self.points = torch.rand(size, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
        self.labels = (self.points.square().sum(1) < 1).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def load_train_objs() -> tuple[Dataset[tuple[Tensor, Tensor]], nn.Module, torch.optim.Optimizer]:
    """Return the dataset, the model and its optimizer."""
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    return Points(2000), model, torch.optim.Adam(model.parameters(), lr=0.01)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss."""
    return F.cross_entropy(outputs, targets)


class Letters(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of a text, each with the characters that follow: *part* says which tenths of it."""

    def __init__(self, part: range) -> None:
        text = TEXT.read_text()[:20_000]
        self.alphabet = "".join(sorted(set(text)))
        tenth = len(text) // 10
        text = text[part.start * tenth : part.stop * tenth]
        self.tokens = torch.tensor([self.alphabet.index(letter) for letter in text])

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.alphabet)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // BLOCK

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.tokens[index * BLOCK :][: BLOCK + 1]
        return piece[:-1], piece[1:]


class GPT(nn.Module):
    """A decoder of one layer."""

    def __init__(self, vocab_size: int, width: int = 32) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(vocab_size, width), nn.Embedding(BLOCK, width)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, vocab_size)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores (B, T, V), and the mean loss of *targets* (B, T)."""
        hidden = self.letters(tokens) + self.places.weight
        scores = self.head(self.block(hidden, src_mask=self.mask, is_causal=True))
        return scores, F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def configure_optimizers(self, learning_rate: float) -> torch.optim.Optimizer:
        """Return AdamW that lets biases and norms decay no weight."""
        decayed = [weight for weight in self.parameters() if weight.dim() >= 2]
        others = [weight for weight in self.parameters() if weight.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
