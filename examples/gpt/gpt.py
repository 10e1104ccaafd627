"""A character-level GPT, the sonnets it learns to write, and its loss.

Shapes: B samples, T characters of one sample, C channels, V characters of the alphabet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

TEXT = Path(__file__).with_name("sonnets.txt")


@dataclass
class GPTConfig:
    """The size of a GPT."""

    vocab_size: int
    block_size: int = 64  # T, at most
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 64  # C
    dropout: float = 0.1


class Block(nn.Module):
    """Causal self-attention, then a perceptron for each position; each adds to what came in."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head, self.p = config.n_head, config.dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x: Tensor) -> Tensor:
        """Return (B, T, C): what each position finds at those up to it."""
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, C) for (B, T, C)."""
        x = x + self.dropout(self.attend(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.ln = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.wte.weight  # tied
        self.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores (B, T, V) of the character that follows each of (B, T)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.ln(self.blocks(self.wte(tokens) + self.wpe(places))))

    @torch.no_grad()
    def generate(self, tokens: Tensor, length: int) -> Tensor:
        """Return (B, T + length): *tokens* and what the model lets follow, drawn at random."""
        for _ in range(length):
            scores = self(tokens[:, -self.block_size :])[:, -1]
            tokens = torch.cat((tokens, scores.softmax(-1).multinomial(1)), dim=1)
        return tokens


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class Sonnets(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of Shakespeare's sonnets, each with the characters that follow: the first nine tenths to train on, or the rest.

    Pieces to train on begin at every character; those to evaluate on lie end to end.
    """

    def __init__(self, split: str = "train", block_size: int = 64) -> None:
        text = TEXT.read_text()
        self.alphabet = "".join(sorted(set(text)))
        cut = len(text) * 9 // 10
        part = text[:cut] if split == "train" else text[cut:]
        self.tokens = torch.tensor([self.alphabet.index(character) for character in part])
        self.block_size = block_size
        self.stride = 1 if split == "train" else block_size

    @property
    def vocab_size(self) -> int:
        """How many characters the text has: V."""
        return len(self.alphabet)

    def __len__(self) -> int:
        return (len(self.tokens) - self.block_size - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.tokens[index * self.stride :][: self.block_size + 1]
        return piece[:-1], piece[1:]

    def decode(self, tokens: Tensor) -> str:
        """Return the text that *tokens* stand for."""
        return "".join(self.alphabet[token] for token in tokens.tolist())


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per character of scores (B, T, V) and targets (B, T)."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def num_tokens(batch: tuple[Tensor, Tensor]) -> int:
    """Return over how many characters that mean is."""
    return batch[1].numel()


def write_verse(context: Any, length: int = 400) -> None:
    """Log what the model writes by itself, after a line break; a hook."""
    text = Sonnets("val")
    start = torch.full((1, 1), text.alphabet.index("\n"), device=context.device)
    context.log_text("verse", text.decode(context.model.generate(start, length)[0]))
