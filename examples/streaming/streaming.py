"""A byte-level language model on text that is read in order, from shards: files of one JSON record per line, compressed.

Shapes: B samples, T bytes of one sample.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path("data")
FILES = 8
BLOCK = 64  # T
END = b"\n"


def write_shards(lines: int = 4000) -> None:
    """Make files of sums to learn from, {"text": "17+25=42"} in each line; files that are there stay. Once per node."""
    FOLDER.mkdir(exist_ok=True)
    for number in range(FILES):
        path = FOLDER / f"{number:05}.jsonl.gz"
        if path.exists():
            continue
        draw = random.Random(number)
        pairs = ((draw.randrange(100), draw.randrange(100)) for _ in range(lines))
        text = "".join(json.dumps({"text": f"{a}+{b}={a + b}"}) + "\n" for a, b in pairs)
        unfinished = path.with_suffix(".part")
        unfinished.write_bytes(gzip.compress(text.encode()))
        unfinished.rename(path)  # never half a file under its name


def packed_text(shard: int, shards: int) -> Iterator[Tensor]:
    """Yield the samples of one data shard: the texts of every file that is its own, end to end, cut into blocks of T + 1 bytes."""
    buffer = bytearray()
    for path in sorted(FOLDER.glob("*.jsonl.gz"))[shard::shards]:
        with gzip.open(path, "rt") as lines:
            for line in lines:
                buffer += json.loads(line)["text"].encode() + END
                while len(buffer) > BLOCK:
                    yield torch.tensor(list(buffer[: BLOCK + 1]))
                    del buffer[:BLOCK]


class ByteLSTM(nn.Module):
    """Tells from the bytes so far what the next one is."""

    def __init__(self, width: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """Return scores (B, T, 256) of the byte that follows each of (B, T)."""
        return self.head(self.lstm(self.embed(text))[0])


def next_byte_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Return the mean loss in nats per byte of text (B, T + 1)."""
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
