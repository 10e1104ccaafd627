"""Instructions and answers for a causal language model, which is trained on the answers only.

Tokens are bytes, so that no tokenizer has to be fetched. Shapes: B samples, T tokens of the longest one.
"""

from __future__ import annotations

import random
import string
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from collections.abc import Sequence

IGNORED = -100  # the label of a token that is not trained on, in every model of transformers
ANSWERS = {"say": "{0}", "twice": "{0}{0}", "thrice": "{0}{0}{0}", "first": "{0[0]}"}

Sample = dict[str, Tensor]


class Instructions(Dataset[Sample]):
    """Made-up instructions such as "twice: abcd" with their answers, "abcdabcd"."""

    def __init__(self, split: str = "train", samples: int = 4000) -> None:
        draw = random.Random(split)
        self.pairs = []
        for _ in range(samples):
            verb, word = draw.choice([*ANSWERS]), "".join(draw.choices(string.ascii_lowercase, k=4))
            self.pairs.append((f"{verb}: {word}\n", ANSWERS[verb].format(word)))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        instruction, answer = (torch.tensor(list(text.encode())) for text in self.pairs[index])
        answer = torch.cat((answer, torch.tensor([0])))  # the end
        return {
            "input_ids": torch.cat((instruction, answer)),
            "labels": torch.cat((torch.full_like(instruction, IGNORED), answer)),
        }


def padded(samples: Sequence[Sample]) -> Sample:
    """Return a batch, each tensor (B, T)."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad_sequence([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def exact_match(model: nn.Module, batch: Sample) -> Tensor:
    """Return the share of answers of which every token is the likeliest one."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    likeliest, labels = logits[:, :-1].argmax(dim=-1), batch["labels"][:, 1:]
    return ((likeliest == labels) | (labels == IGNORED)).all(dim=1).float().mean()
