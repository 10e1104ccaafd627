"""Metrics for `evaluation.metrics` of a job file that follow from the mean loss over the whole set.

The mean is over what the loss is a mean of: over samples or, where the job says how many items a loss is over
(`model.loss_count`, or a step that returns its count), over tokens. No output of the model is kept for them.
"""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """Return exp(loss): of the mean over all tokens of the set, not a mean of the batches' perplexities."""
    return math.exp(loss)


def bits(loss: float) -> float:
    """Return the loss in bits instead of nats: bits per token, or per character or byte where these are the tokens."""
    return loss / math.log(2)


perplexity.is_of_loss = bits.is_of_loss = True  # type: ignore[attr-defined]  # see runtime/evaluation/metric.py
