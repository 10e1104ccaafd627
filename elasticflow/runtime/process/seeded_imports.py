"""Imports the job's own modules in a random state that follows from the seed and the module's name.

A module may draw at import: a table of random features, an object that `snapshots.include` names. The fork server imports
the module once for all workers of a node; a worker that is spawned, or runs under plain torchrun, imports it later and in
another order. All workers see the same numbers, whatever ran before.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING

from elasticflow.runtime.process import random_streams
from elasticflow.system.installation import is_of_installed_package

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def install(seed: int) -> None:
    """Seed each of the job's modules that this process or its forks import from now on.

    After an import, random, numpy and torch on the CPU are in the state they had before. A second call changes the seed.
    """
    for finder in sys.meta_path:
        if isinstance(finder, _SeededImports):
            finder.seed = seed
            return
    sys.meta_path.insert(0, _SeededImports(seed))


class _SeededImports:
    """A finder that asks the other finders, and wraps the execution of the job's modules."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in sys.stdlib_module_names | {"elasticflow"}:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find else None
            if spec is not None:
                self._wrap(spec)
                return spec
        return None

    def _wrap(self, spec: ModuleSpec) -> None:
        loader, file = spec.loader, spec.origin or ""
        # Modules may share a loader of another kind. An installed package that draws does so in the state of the module
        # that imports it.
        if type(loader) is not SourceFileLoader or is_of_installed_package(file):
            return
        execute = loader.exec_module

        def seeded(module: ModuleType) -> None:
            with random_streams.put_back():
                random_streams.begin_import(self.seed, spec.name)
                execute(module)

        loader.exec_module = seeded  # type: ignore[method-assign]
