"""Metrics for `evaluation.metrics` of a job file that follow from the mean loss over the whole set.

The mean is over samples or, if the job gives the number of items in a loss (`model.loss_count`, or a step that returns
its count), over these items, such as tokens. These metrics keep no output of the model.
"""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """Return exp(loss), with the mean loss over all tokens of the set: not the mean of the batches' perplexities."""
    return math.exp(loss)


def bits(loss: float) -> float:
    """Return the loss in bits instead of nats: bits per token, or per character or byte if these are the tokens."""
    return loss / math.log(2)


perplexity.is_of_loss = bits.is_of_loss = True  # type: ignore[attr-defined]  # see runtime/evaluation/metric.py
