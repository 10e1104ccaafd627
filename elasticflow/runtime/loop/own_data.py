"""Random draws and losses of a loop that reads its data itself, without `Run.batches`.

Such a loop draws its samples, or their order, from the global generators. Each pass begins in a state that follows from the seed
and the step, so that a restart draws what an undisturbed run draws. Where a script seeds all ranks alike, the state is the same on
all of them: they may draw one order together. Where it seeds them differently, as by `torch.manual_seed(1337 + rank)`, the state
depends on the rank, too: the ranks draw different samples.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from elasticflow.runtime.loop.loop_schedule import stage_seed
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.process.reachable import living, objects

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.process.context import Worker

_COMPARED_PASSES = 2
# A loader's parts that are looked into: their depth, and the items of a container; more are data.
_DEEPEST, _MOST_PARTS = 5, 100


def seeds() -> list[str]:
    """Return a text for the generators of Python, NumPy and torch: equal in all processes that have seeded them equally."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002  # scripts draw from the global generator
    # Not `hash`, which differs from process to process for None.
    states = repr(random.getstate()).encode(), numpy_state[1].tobytes() + repr(numpy_state[2:]).encode()
    return [*(sha256(state).hexdigest() for state in states), str(torch.initial_seed())]


def _may_hold(thing: Any, depth: int) -> bool:
    """Return whether *thing*, reached from a loader, may read what it holds: a dataset around another one, a sampler of batches."""
    is_data = isinstance(thing, str | bytes | torch.Tensor | np.ndarray)
    is_data = is_data or (isinstance(thing, Mapping | list | tuple) and len(thing) > _MOST_PARTS)
    return depth < _DEEPEST and not is_data and _is_read(thing)


def _is_read(thing: Any) -> bool:
    return any(hasattr(type(thing), name) for name in ("__iter__", "__getitem__"))


class OwnData:
    """Seeds the generators for each pass, and warns of what a restart cannot repeat. Every rank has one."""

    def __init__(self, worker: Worker, warn: Callable[[str], None]) -> None:
        self._worker, self._warn = worker, warn
        # The rank that seeds Python's, NumPy's and torch's generator; 0 where the script seeds all ranks alike.
        self._ranks = (0, 0, 0)
        self._losses: list[list[str]] = []
        self._looks_for_draws = self._has_looked_for_workers = False
        # The generators' states after `seed`, to notice draws.
        self._words_before: list[Any] | None = None

    def note_seeds(self) -> None:
        """Learn which generators the script has seeded differently on each rank. Collective: every rank."""
        told = [text.split() for text in self._worker.gather_text(" ".join(seeds()))]
        rank = self._worker.rank
        of_python, of_numpy, of_torch = (
            rank if len(set(each)) > 1 else 0 for each in zip(*told, strict=True)
        )
        self._ranks = of_python, of_numpy, of_torch

    def note_resumed(self) -> None:
        """Note that `seed` was not called before the first pass of a resumed run, which has ended: look if passes draw."""
        self._looks_for_draws, self._words_before = True, None

    def begin_pass(self, step: int) -> None:
        """Seed the generators again for the pass after *step*, if the code after `Run.step` may have drawn."""
        # Draws on a device are not seen.
        is_seen = self._worker.device.type == "cpu" and self._worker.generators.can_look
        if self._words_before is not None and not (is_seen and self._words_before == self._words()):
            self._words_before = None
            self.seed(step)

    def seed(self, step: int) -> None:
        """Seed the generators for the pass after *step*."""
        if self._looks_for_draws and self._words_before is not None and self._words_before != self._words():
            self._looks_for_draws = False
            self._warn(
                "the first pass after this restart drew the random numbers of the run's first pass, and other passes draw numbers, too: "
                "for step in run.steps(...) or run.epochs(...) seeds the generators before the first pass, as before all others"
            )
        self._seed(self._worker.seed, step, "own data")
        self._words_before = self._words()

    def seed_epoch(self, stage: int, epoch: int) -> None:
        """Seed the generators for the code before an epoch's batches: a restart in the middle of the epoch runs that code again."""
        self._worker.generators.before_data()  # which notes draws of the last pass
        self._seed(stage_seed(self._worker.seed, stage), epoch, "epoch")

    def seed_after(self, stage: int) -> None:
        """Seed the generators for the code after a stage's loop, in which ranks have drawn differently: a restart in a later stage runs that code again."""
        self._worker.generators.before_data()
        self._seed(self._worker.seed, stage, "after stage")

    def _seed(self, seed: int, place: int, use: str) -> None:
        of_python, of_numpy, of_torch = (
            random_streams.hook_key(seed, place, rank, use) for rank in self._ranks
        )
        self._worker.generators.seed_model(of_torch)
        random_streams.seed_two(of_python, of_numpy)

    def warn_of_workers(self) -> None:
        """Warn, after an epoch, of loader processes that outlive it: a restart lacks the states of their random generators."""
        if self._has_looked_for_workers:
            return
        self._has_looked_for_workers = True
        if any(loader.persistent_workers and loader.num_workers for loader in living(DataLoader)):
            self._warn(
                "a DataLoader has persistent_workers, whose random generators continue from epoch to epoch: samples that draw random numbers "
                "are others after a restart; without persistent_workers each epoch has the same ones again"
            )

    def warn_of_read_ahead(self, kept: Mapping[str, Any]) -> None:
        """Warn of *kept* objects that are not at the last step, since processes of a DataLoader read them, ahead or in copies."""
        names = {id(value): name for name, value in kept.items() if _is_read(value)}
        for loader in living(DataLoader) if names else []:
            if id(loader) in names or not loader.num_workers:
                continue
            parts = {"parts": (loader.dataset, loader.sampler, loader.batch_sampler)}
            name = next(
                (names[id(each)] for _, each, _ in objects(parts, _may_hold) if id(each) in names), None
            )
            if name is not None:
                self._warn(
                    f"{name} is kept, and a DataLoader with num_workers={loader.num_workers} reads it ahead of the steps, or copies of it: if it counts what "
                    "was read, a restart leaves samples out; num_workers=0, run.batches, or a kept loader that has a state, brings each sample once"
                )

    def end_pass(self, loss: Any, step: int) -> None:
        """Seed the generators for the pass after *step*, whose loss on this rank was *loss*. Collective: every rank."""
        self._compare(loss)
        self.seed(step)

    def _compare(self, loss: Any) -> None:
        """Warn if all ranks have the same losses in the first passes, since they learn from the same samples. Collective: every rank."""
        if self._worker.world_size == 1 or len(self._losses) == _COMPARED_PASSES:
            return
        self._losses.append(
            self._worker.gather_text(
                "" if loss is None else repr(float(getattr(loss, "detach", lambda: loss)()))
            )
        )
        told = [losses[0] for losses in self._losses]
        is_alike = all(len(set(losses)) == 1 and losses[0] for losses in self._losses)
        if len(self._losses) == _COMPARED_PASSES and is_alike and len(set(told)) == _COMPARED_PASSES:
            self._warn(
                f"every rank has the same loss, {told[0]} and {told[1]} in its first passes: all of them learn from the same samples, "
                "each of which counts as one only, unless the script averages the loss itself; seed the generator that draws samples "
                "by run.rank before run.keep, give each rank its part (DistributedSampler), or read the data by run.batches"
            )

    def _words(self) -> list[Any]:
        return [generator.word.value for generator in self._worker.generators.of_data]
