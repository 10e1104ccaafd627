"""The model and the data of the programs whose model is shared among ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS = 11


class Block(nn.Module):
    """A layer of an odd size, with a parameter of a single row: most ranks hold nothing of it."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 7), nn.Linear(7, width)
        self.gain, self.drop = nn.Parameter(torch.ones(1)), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of input and output."""
        total: Tensor = x + self.gain * self.drop(self.down(torch.relu(self.up(self.norm(x)))))
        return total


class Net(nn.Module):
    """Tied weights, a frozen layer, and a buffer that counts if a program counts in it."""

    calls: Tensor

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(3))
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of words."""
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.frozen(x))
        return scores


class Sentences:
    """Four words, and the word that follows."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        words = torch.randint(0, WORDS, (4,), generator=torch.Generator().manual_seed(index))
        return words, int(words.sum()) % WORDS
