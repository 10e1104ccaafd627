"""How samples are drawn, as `plan` says it."""

from __future__ import annotations

from typing import Any

import pytest

from elasticflow.cli.write.plan_facts import drawn_in_words
from elasticflow.compiler.plan.forecast import Knowledge, KnownSets, forecast
from elasticflow.observe.terminal.formats import order_in_words
from tests.compiler.jobs import make_job


def mixture(*weights: float | None, **changes: Any) -> Any:
    """Return a job with so many sets."""
    sets = [
        {"entry": f"pieces:set{number}", **({} if weight is None else {"weight": weight})}
        for number, weight in enumerate(weights)
    ]
    return make_job(dataset__entry=None, dataset__mix=sets, **changes)


def test_nothing_is_said_of_the_order_of_every_job() -> None:
    """Each sample once per epoch, shuffled."""
    assert drawn_in_words(make_job(), None) is None


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"weights": "m:w"}, "as often as m:w says; an epoch is as many draws as there are samples"),
        (
            {"balance_by": "label", "draws": 1000},
            "each class of label equally often; an epoch is 1,000 draws",
        ),
        ({"bucket_by": "n"}, "in batches of like length (n), shuffled; each sample once per epoch"),
    ],
)
def test_samplers_are_told(sampler: dict[str, Any], words: str) -> None:
    """What is drawn, and what an epoch is."""
    assert words in (drawn_in_words(make_job(dataset__sampler=sampler), None) or "")


def test_mixtures_are_told_with_their_shares() -> None:
    """From the weights; by size once the sizes are known, with how often a sample comes."""
    assert (drawn_in_words(mixture(1.0, 3.0), None) or "").startswith(
        "25.0% pieces:set0, 75.0% pieces:set1; an epoch"
    )
    by_size = mixture(None, None, dataset__sampler={"temperature": 2.0})
    assert "by their sizes at temperature 2: shares are known with --deep" in (
        drawn_in_words(by_size, None) or ""
    )
    known = KnownSets((100, 300), (0.5, 0.5), "--deep")
    assert (drawn_in_words(by_size, known) or "").startswith(
        "50.0% pieces:set0 (100 samples, each 2 times an epoch), 50.0% pieces:set1 (300 samples, each 0.667 times an epoch) (--deep)"
    )


def test_draws_make_the_steps_of_an_epoch() -> None:
    """Also where nobody knows the length of the data."""
    job = make_job(
        dataset__sampler={"balance_by": "label", "draws": 640}, dataset__global_batch_size=64, train__epochs=3
    )
    assert forecast(job, Knowledge()).steps == 30


def test_a_run_tells_its_order() -> None:
    """In the words of the terminal."""
    facts = {"sets": [30, 10], "shares": [1, 3]}
    assert order_in_words({"kind": "mixed", "samples": 40, "facts": facts}) == (
        "mixture of 25.0% of 30 / 75.0% of 10 samples, 40 samples an epoch"
    )
    assert (
        order_in_words({"kind": "weighted", "samples": 9})
        == "drawn by weights, with replacement, 9 samples an epoch"
    )
