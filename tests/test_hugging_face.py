"""A model's own loss, weighed by the labels it is a mean over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from elasticflow import hugging_face
from elasticflow.runtime.training.loss import parse_loss

VOCABULARY = 11


class TinyForCausalLM(nn.Module):
    """Computes its loss as models of transformers do."""

    shift = 1

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=self.shift == 0)
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return the mean over the labels that count."""
        logits: Tensor = self.head(self.embed(input_ids))
        logits = logits[:, : logits.shape[1] - self.shift]
        return {
            "loss": cross_entropy(logits.flatten(0, 1), labels[:, self.shift :].flatten()),
            "logits": logits,
        }


class TinyForConditionalGeneration(TinyForCausalLM):
    """An encoder-decoder: no label is left out at the beginning."""

    shift = 0


class TunedModel(nn.Module):
    """Wraps a model as peft does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = inner
        self.inner = [inner]

    def forward(self, **batch: Tensor) -> Any:
        """Return what the model returns."""
        return self.inner[0](**batch)


def batch_of(rows: int) -> dict[str, Tensor]:
    """Return rows of different lengths, padded, the prompts of which count for nothing."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (rows, 9), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : row % 4] = -100
        labels[row, 9 - row % 5 :] = -100 if row % 5 else labels[row, 9:]
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("kind", [TinyForCausalLM, TinyForConditionalGeneration])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_parts_of_a_batch_have_the_whole_batchs_loss(kind: type[nn.Module], *, is_wrapped: bool) -> None:
    """Whoever gets which rows: the sum over all labels, divided by their number."""
    model = kind()
    if is_wrapped:
        model = TunedModel(model)
    whole = batch_of(12)
    expected = model(**whole)["loss"]
    for size in (1, 5, 12):
        total, count = torch.zeros(()), 0.0
        for start in range(0, 12, size):
            part = {key: value[start : start + size] for key, value in whole.items()}
            loss = parse_loss(hugging_face.training_step(model, part))
            assert loss.num_items is not None
            if loss.value is not None:
                total = total + loss.value
                count += float(loss.num_items)
        torch.testing.assert_close(total / count, expected)


def test_batch_without_labels_is_a_mean_over_samples() -> None:
    """As is one whose labels are numbers to be met."""
    model = TinyForCausalLM()
    assert hugging_face.num_items_in_batch(model, {"input_ids": torch.ones(2, 3)}) is None
    assert hugging_face.num_items_in_batch(model, {"labels": torch.ones(2, 3)}) is None
    assert hugging_face.num_items_in_batch(model, {"shift_labels": torch.tensor([[1, -100, 2]])}) == 2


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForCausalLM",
        "GPT2LMHeadModel",
        "BertForMaskedLM",
        "T5ForConditionalGeneration",
        "BertForTokenClassification",
    ],
)
def test_count_is_that_of_transformers_own_losses(name: str) -> None:
    """Parts of a batch have the whole batch's loss, with the library's own models."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": VOCABULARY + 1, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    configs = {
        "LlamaForCausalLM": ("LlamaConfig", {**small, "intermediate_size": 8}),
        "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}),
        "BertForMaskedLM": ("BertConfig", {**small, "intermediate_size": 8}),
        "BertForTokenClassification": ("BertConfig", {**small, "intermediate_size": 8, "num_labels": 12}),
        "T5ForConditionalGeneration": ("T5Config", {"vocab_size": 12, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "decoder_start_token_id": 0}),
    }  # fmt: skip
    kind, options = configs[name]
    model = getattr(transformers, name)(getattr(transformers, kind)(**options)).eval()
    whole = batch_of(12)
    expected = model(**whole)["loss"]
    total, count = torch.zeros(()), 0.0
    for start in range(0, 12, 5):
        part = {key: value[start : start + 5] for key, value in whole.items()}
        loss = parse_loss(hugging_face.training_step(model, part))
        assert loss.value is not None
        assert loss.num_items is not None
        total, count = total + loss.value, count + float(loss.num_items)
    torch.testing.assert_close(total / count, expected)
