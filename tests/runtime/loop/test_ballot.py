"""Losses, scalars and requests of steps that the ranks have not met over yet."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from elasticflow.runtime.loop.ballot import Ballot
from elasticflow.runtime.process.stopping import Stopped


def test_numbers_are_those_of_the_call_though_the_script_counts_on_in_place(me: Any) -> None:
    """Tensors and arrays that a script adds to; a loss and scalars that are NaN count nothing on a rank without samples."""
    ballot = Ballot(me)
    hits, seen, loss = torch.zeros(()), np.zeros(()), torch.zeros(1, requires_grad=True)
    told = []
    for number in (1.0, 2.0, 3.0):
        hits += 1
        seen += 1
        ballot.note({"hits": hits, "seen": seen})
        mean, scalars = ballot.add(loss, 4)
        told.append((mean, scalars, number))
        with torch.no_grad():
            loss += 1
    ballot.note({"hits": math.nan})
    mean, scalars = ballot.add(torch.tensor(math.nan), 0)
    ballot.meet()

    assert [(float(mean), scalars) for mean, scalars, _ in told] == [
        (number - 1, {"hits": number, "seen": number}) for *_, number in told
    ]
    assert math.isnan(float(mean))
    assert scalars == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (ValueError("no gain"), "no gain"),
        ("a\udcff", "a\\udcff"),
        (" ", "no reason given"),
        ("x" * 5000, "x" * 1000),
    ],
)
def test_a_reason_to_stop_is_a_text_that_ranks_can_exchange(me: Any, given: Any, told: str) -> None:
    """Whatever a script gives `run.stop`: an exception, a path that is no UTF-8, nothing, pages of it."""
    me.gather_text = lambda text: [text.encode().decode()]
    ballot = Ballot(me)
    ballot.request_end(given)
    ballot.agree_on_end(3)
    assert me.stopped == Stopped(told, 0)
