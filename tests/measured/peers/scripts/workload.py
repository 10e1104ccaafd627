"""The work that every peer does, and the records that judge it; it imports torch alone.

The proof is in the weights. `Counted` holds a parameter with one number for each sample, and its loss is the mean of the numbers
of the samples in a batch. The optimizer subtracts the gradient of that parameter as it is. So after any number of steps, of
restarts and of averages over workers, the number of a sample says how often the weights have learned from that sample, and the
numbers' sum says how many steps they have made. `CountedSGD` reads it after each step and appends a line to a file: the step, its
samples, and a digest of the numbers before and after. From the last digest back, these lines are the lineage of the final weights.
The script of a peer holds none of this.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SAMPLES = 4800
BATCH = 48  # of all workers together: as many for each of 1, 2, 3 or 4
EPOCHS = int(os.environ.get("PEERS_EPOCHS", "10"))
STEPS = SAMPLES * EPOCHS // BATCH
SAVE_EVERY = 50
SEED = 1234
LEARNING_RATE = 0.01
MODEL = os.environ.get("PEERS_MODEL", "mlp")
FOLDER = Path(os.environ.get("PEERS_FOLDER", "."))  # for the records
STATE = Path(os.environ.get("PEERS_STATE", "."))  # for the peer's checkpoints
FEATURES, CLASSES = 64, 10
LETTERS, CONTEXT = 96, 32


class MLP(nn.Sequential):
    """A million parameters."""

    def __init__(self) -> None:
        width = 960
        super().__init__(
            nn.Linear(FEATURES, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, CLASSES),
        )


class GPT(nn.Module):
    """Two blocks of attention over letters."""

    def __init__(self) -> None:
        super().__init__()
        width = 128
        self.letters, self.places = nn.Embedding(LETTERS, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, LETTERS)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next letters."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        found = self.blocks(self.letters(text) + self.places.weight, mask=mask, is_causal=True)
        return self.out(found).transpose(1, 2)


class Counted(nn.Module):
    """The model, and a count of every sample that its weights have learned from."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.model = MLP() if MODEL == "mlp" else GPT()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores, and the batch's numbers; the first column of *inputs* names the samples."""
        numbers = inputs[:, 0].long()
        return self.model(inputs[:, 1:]), self.count[numbers]


def loss_of(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    scores, counts = outputs
    return functional.cross_entropy(scores, targets) + counts.mean()


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that every process makes alike; it appends the number of each that is read to a file."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        numbers = torch.arange(SAMPLES)[:, None]
        if MODEL == "mlp":
            features = torch.randn(SAMPLES, FEATURES, generator=generator)
            self._targets = features[:, :CLASSES].argmax(1)
            self._inputs = torch.cat([numbers.float(), features], 1)
        else:
            text = torch.randint(LETTERS, (SAMPLES, CONTEXT + 1), generator=generator).sort(1).values
            self._targets = text[:, 1:].contiguous()
            self._inputs = torch.cat([numbers, text[:, :-1]], 1)
        self._reads = Records("reads", "bin")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Return inputs, the first of which is the sample's number, and target."""
        self._reads.append(int(number).to_bytes(4, "little"))
        return self._inputs[number], self._targets[number]


class Records:
    """A file of one process' records, opened at the first of them: a process may fork, and be pickled, before."""

    def __init__(self, kind: str, ending: str) -> None:
        self._kind, self._ending = kind, ending
        self._pid, self._file = 0, -1

    def append(self, record: bytes) -> None:
        """Append *record*, which a kill of this process cannot undo."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            path = FOLDER / f"{self._kind}-{self._pid}.{self._ending}"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(self._file, record)


class CountedSGD(torch.optim.SGD):
    """SGD with momentum for the model, plain subtraction for the counts, and a line of each step."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        every = list(params)
        [self._count] = [p for p in every if p.dtype == torch.float64]
        weights = [p for p in every if p.dtype != torch.float64]
        self._weights = weights
        self._lines = Records("steps", "jsonl")
        groups: list[dict[str, Any]] = [
            {"params": weights},
            {"params": [self._count], "lr": 1.0, "momentum": 0},
        ]
        super().__init__(groups, lr=LEARNING_RATE, momentum=0.9)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the step, and say so."""
        before = self._count.detach().clone()
        loss = super().step(closure)
        after = self._count.detach()
        shares = before - after
        ids = shares.nonzero().flatten()
        step = math.ceil(-float(after.sum()) - 1e-6)  # a replica that joins adds nothing to its first step
        parts = (shares[ids] * BATCH).round(decimals=3).tolist()
        line = {
            "t": time.time(),
            "pid": os.getpid(),
            "rank": os.environ.get("PEERS_RANK") or os.environ.get("RANK"),
            "step": step,
            "before": digest([before]),
            "after": digest([after]),
            "ids": ids.tolist(),
            "parts": parts if set(parts) != {1.0} else [],
        }
        if step == STEPS:
            self._keep(line)
        self._lines.append((json.dumps(line) + "\n").encode())
        return loss

    def _keep(self, line: dict[str, Any]) -> None:
        """Write the final weights, as each process has them."""
        path = FOLDER / f"final-{os.getpid()}.pt"
        weights = [w.detach() for w in self._weights]
        final = {"weights": weights, "count": self._count.detach(), "digest": digest(weights), "t": line["t"]}
        torch.save({**final, "after": line["after"]}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of *tensors*."""
    found = 0
    for tensor in tensors:
        found = zlib.crc32(tensor.contiguous().numpy().tobytes(), found)
    return f"{found:08x}"
