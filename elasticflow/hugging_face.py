"""Trains models of transformers unchanged, as `model.step` of a job file.

The trained model imports transformers and torch; this module does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

_IGNORED = -100  # label that transformers' losses leave out of their mean
# Class names and transformers' `loss_type` of models that shift labels by one, unless they are
# encoder-decoders.
_PREDICT_NEXT = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
# Attributes in which DistributedDataParallel, torch.compile, peft's model and its tuner keep the wrapped
# model.
_INSIDE = ("module", "_orig_mod", "base_model", "model")


def training_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the model's own loss of one micro-batch, and the number of labels that it is a mean over.

    The batch's loss is then the mean over all its labels that count, however the batch is cut into micro-batches and
    distributed among workers: transformers' Trainer calls this number `num_items_in_batch`. A model that predicts the
    next token has no label for the first token of a row. If a batch has no `labels`, the loss is a mean over its
    samples.

    Args:
        model: A model of transformers, or of peft around such a model, that returns a loss if it gets labels.
        batch: Arguments of the model's forward by name: a dict, or a BatchEncoding of transformers.
    """
    outputs = model(**batch)
    loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    count = num_items_in_batch(model, batch)
    return {"loss": loss} if count is None else {"loss": loss, "count": count}


def num_items_in_batch(model: nn.Module, batch: Any) -> Any:
    """Return the number of labels of *batch* that the model's loss is a mean over; None if it has no integer labels."""
    labels = batch.get("shift_labels")
    if labels is None:
        labels = batch.get("labels")
        if labels is not None and _predicts_next(model) and labels.dim() > 1:
            labels = labels[..., 1:]
    if labels is None or labels.is_floating_point():
        return None
    return (labels != _IGNORED).sum()


def _predicts_next(model: nn.Module) -> bool:
    """Return True if the model shifts labels by one before it compares them with its predictions."""
    inner: Any = model
    names: list[str] = []
    while inner is not None and not any(map(_is_known, names)):
        names = [type(inner).__name__, str(vars(inner).get("loss_type"))]
        config = getattr(inner, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return False
        inside = getattr(inner, "_modules", {})
        inner = next((inside[name] for name in _INSIDE if name in inside), None)
    return any(map(_is_known, names))


def _is_known(name: str) -> bool:
    return any(part in name for part in _PREDICT_NEXT)
