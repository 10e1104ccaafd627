"""The machine that trials run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticflow.trials import verify_elastic
from elasticflow.trials.verify_elastic import count_gpus

TORCH = """
class accelerator:
    device_count = staticmethod(lambda: 3)
"""


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("driver", "count"), [("/dev/nvidiactl", 3), ("/dev/kfd", 3), ("/dev/dri", 3), (None, 0)]
)
def test_accelerators_of_any_make_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str | None, count: int
) -> None:
    """By torch, in a process of its own, and only where there is a driver; torch is a stand-in."""
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == driver)
    assert count == count_gpus()


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize(
    ("extra", "count"),
    [
        ("print('a library says hello', end='')", 3),
        ("import os; os._exit(0)", 0),
        ("import time; time.sleep(600)", 0),
    ],
)
def test_a_torch_that_prints_or_hangs_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, count: int
) -> None:
    """Lines before the number are left out; a driver that does not answer is waited for a while."""
    (tmp_path / "torch.py").write_text(f"{extra}\n{TORCH}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/kfd")
    monkeypatch.setattr(verify_elastic, "_DRIVER_S", 1.0 if "sleep" in extra else 60.0)
    assert count == count_gpus()
