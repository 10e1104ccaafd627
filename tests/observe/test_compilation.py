"""What torch.compile takes and what its cache saves, from the events of a run."""

from __future__ import annotations

from elasticflow import events
from elasticflow.observe.compilation import Compilation
from elasticflow.observe.history import RunHistory
from tests.observe.hand_made import event

FIRST = event(3, events.TRAINING_COMPILED, 1, seconds=26.702, from_cache=0, compiled=2)
SAVED = event(4, events.COMPILER_CACHE, 1, node="n0", action="saved", files=30, bytes=452_648, seconds=0.6)
SECOND = event(9, events.TRAINING_COMPILED, 2, seconds=0.412, from_cache=2, compiled=0)


def test_what_is_saved_is_told() -> None:
    """Seconds of the newest generation, those without the cache, and the cache's size."""
    assert "nothing compiled yet" == Compilation().in_words()
    first = RunHistory.of([FIRST]).compilation
    assert "26.7 s in generation 1, 2 graphs compiled" == first.in_words()
    assert {"compile_s": 26.702} == first.facts()
    both = RunHistory.of([FIRST, SAVED, SECOND]).compilation
    told = (
        "0.41 s in generation 2, 2 graphs from its cache; 26.7 s without that; 452.6 kB beside the snapshots"
    )
    assert told == both.in_words()
    facts = {"compile_s": 26.702, "compile_cached_s": 0.412, "compiler_cache_bytes": 452_648}
    assert facts == both.facts()


def test_graphs_of_both_kinds_are_told() -> None:
    """Another shape came: that generation stands for neither time without the cache."""
    third = event(12, events.TRAINING_COMPILED, 3, seconds=9.0, from_cache=2, compiled=1)
    found = RunHistory.of([FIRST, SECOND, third]).compilation
    told = "9.0 s in generation 3, 1 graph compiled, 2 graphs from its cache; 26.7 s without that"
    assert told == found.in_words()


def test_a_first_step_that_waited_for_another_worker_counts_as_one_without_the_cache() -> None:
    """Rank 0 tells, and finds what rank 1 has compiled meanwhile."""
    waited = event(1, events.TRAINING_COMPILED, 1, seconds=26.7, from_cache=2, compiled=0)
    assert {"compile_s": 26.7} == RunHistory.of([waited]).compilation.facts()
    found = RunHistory.of([waited, SECOND]).compilation.facts()
    assert {"compile_s": 26.7, "compile_cached_s": 0.412} == found
    on_another_machine = RunHistory.of([SAVED, SECOND]).compilation.facts()
    assert "compile_s" not in on_another_machine
