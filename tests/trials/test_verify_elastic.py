"""The machine that trials run on."""

from __future__ import annotations

from pathlib import Path

import pytest

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
