"""The cost of torch.compile in a run, and the saving of its cache, from the run's events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.observe.terminal.formats import plural, size, span
from elasticflow.system.records import float_of, int_of

if TYPE_CHECKING:
    from elasticflow.system.records import Record


@dataclass(frozen=True)
class FirstStep:
    """Cost of torch.compile in the first step of a generation.

    Attributes:
        compiled: Graphs that were compiled.
    """

    generation: int
    seconds: float
    from_cache: int
    compiled: int


@dataclass(frozen=True)
class Compilation:
    """Cost of torch.compile in a run.

    Attributes:
        without_cache: The newest generation that began with an empty cache.
        newest: The newest generation that compiled, or took graphs from the cache.
        cache_bytes: Size of the cache beside the snapshots; None: no cache is known there.
    """

    without_cache: FirstStep | None = None
    newest: FirstStep | None = None
    cache_bytes: int | None = None

    def after(self, event: Record) -> Compilation:
        """Return the cost after a `training.compiled` or `compiler.cache` record."""
        if event.get("event") == events.COMPILER_CACHE:
            return replace(self, cache_bytes=int_of(event, "bytes") or None)
        generation, seconds = int_of(event, "generation"), float_of(event, "seconds") or 0.0
        graphs = int_of(event, "from_cache"), int_of(event, "compiled")
        step = FirstStep(generation, seconds, *graphs)
        # Rank 0 reports, and may have waited for graphs that another worker of its node compiled.
        is_first = self.newest is None and self.cache_bytes is None
        return replace(
            self, newest=step, without_cache=step if is_first or not step.from_cache else self.without_cache
        )

    def facts(self) -> dict[str, float]:
        """Return the known facts under the names in `Knowledge`."""
        facts: dict[str, float] = {}
        if self.without_cache is not None:
            facts["compile_s"] = self.without_cache.seconds
        if self.newest is not None and self.newest is not self.without_cache:
            facts["compile_cached_s"] = self.newest.seconds
        if self.cache_bytes is not None:
            facts["compiler_cache_bytes"] = self.cache_bytes
        return facts

    def in_words(self) -> str:
        """Return `0.4 s in generation 3, 2 graphs from its cache; 26.7 s without that; 452.6 kB beside the snapshots`."""
        if self.newest is None:
            return "nothing compiled yet"
        newest, without = self.newest, self.without_cache
        made = (
            [f"{plural(newest.compiled, 'graph')} compiled"]
            if newest.compiled or not newest.from_cache
            else []
        )
        taken = [f"{plural(newest.from_cache, 'graph')} from its cache"] if newest.from_cache else []
        what = ", ".join([*made, *taken])
        parts = [f"{span(newest.seconds)} in generation {newest.generation}, {what}"]
        if without is not None and without is not newest:
            parts.append(f"{span(without.seconds)} without that")
        if self.cache_bytes is not None:
            parts.append(f"{size(self.cache_bytes)} beside the snapshots")
        return "; ".join(parts)
