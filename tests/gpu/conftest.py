"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.harness import project_at
from tests.gpu.marks import DEVICES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.harness import Project


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the type of device on which the test's processes train: the CPU, or in tests marked `gpu` a GPU."""
    if request.param == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return str(request.param)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Yield a project with the example job; afterwards nothing of its launches is alive."""
    with project_at(tmp_path) as made:
        made.fresh = True  # a start may touch the driver
        yield made
