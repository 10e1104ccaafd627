"""What modules of the job draw at import: of the seed and their name, in whatever process and order they are imported."""

# ruff: noqa: NPY002  # the global generator is what modules draw from
from __future__ import annotations

import importlib
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from elasticflow.runtime.process import seeded_imports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DRAWS = """
import random
import numpy as np
import torch
{imports}
drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
"""
NAMES = ("drawn_alone", "drawn_after_it", "drawn_broken")


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return what imports modules anew under a seed, in an order, and gives what each has drawn."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "drawn_alone.py").write_text(DRAWS.format(imports=""))
    (tmp_path / "drawn_after_it.py").write_text(DRAWS.format(imports="import drawn_alone"))
    (tmp_path / "drawn_broken.py").write_text("import random\nrandom.random()\n1 / 0")

    def forget() -> None:
        for name in NAMES:
            sys.modules.pop(name, None)

    def do(seed: int, *names: str) -> dict[str, Any]:
        forget()
        seeded_imports.install(seed)
        return {name: importlib.import_module(name).drawn for name in names}

    yield do
    forget()


def test_what_a_module_draws_depends_on_seed_and_name_alone(imported: Callable[..., Any]) -> None:
    """Neither on what was imported before it, nor on whether another module imports it, nor on what was drawn."""
    first = imported(7, "drawn_alone", "drawn_after_it")
    random.random()
    assert imported(7, "drawn_after_it", "drawn_alone") == first
    assert len({first["drawn_alone"], first["drawn_after_it"]}) == 2
    assert imported(8, "drawn_alone")["drawn_alone"] != first["drawn_alone"]


def test_an_import_leaves_the_generators_as_they_were(imported: Callable[..., Any]) -> None:
    """Also one that fails: the process continues drawing what it would have drawn."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = [draw() for draw in (random.random, np.random.rand, lambda: float(torch.rand(())))]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    imported(7, "drawn_after_it")
    with pytest.raises(ZeroDivisionError):
        imported(7, "drawn_broken")
    assert expected == [random.random(), np.random.rand(), float(torch.rand(()))]


def test_only_the_jobs_own_modules_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages and python's own do not."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    place = tmp_path / "site-packages"
    place.mkdir()
    (place / "drawn_installed.py").write_text("import random\ndrawn = random.random()")
    monkeypatch.syspath_prepend(place)
    seeded_imports.install(7)
    random.seed(1)
    monkeypatch.delitem(sys.modules, "drawn_installed", raising=False)
    drawn = importlib.import_module("drawn_installed").drawn
    sys.modules.pop("drawn_installed")
    assert drawn == random.Random(1).random()
