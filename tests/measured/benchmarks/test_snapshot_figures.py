"""The snapshot benchmark runs, and says what it measured; how long anything took is not looked at here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.measured.benchmarks import snapshot_figures as figures
from tests.measured.benchmarks.snapshot import GROUP

if TYPE_CHECKING:
    from pathlib import Path

STATE = 1000


def made(ours_s: float, share: float, saving: float) -> figures.Figures:
    """Return figures in which each way takes a second to save and load, the copy 10 ms, ours *ours_s*."""
    save = {name: [1.0, 1.0] for name in figures.WAYS}
    save |= {figures.COPY: [0.01, 0.01], figures.OURS: [ours_s, ours_s]}
    load = {name: [ours_s if name == figures.OURS else 1.0] * 2 for name in figures.LOADS}
    times = figures.of_times({"state": STATE, "saves": [save, save, save], "loads": [load]})
    worlds = figures.of_worlds({2: {"bytes": [1, int(share * STATE)], "state": STATE, "saves": [save]}})
    memory = figures.of_memory(
        {
            which: {figures.OURS: [int(saving * most * STATE), 0], "state": STATE}
            for which, most in figures.MOST_MEMORY.items()
        }
    )
    return {"times": times, "worlds": worlds, "memory": memory}


def test_targets_are_met() -> None:
    """Everything just inside its bound."""
    met = figures.targets(made(0.02, 0.52, 1.0))

    assert all(met.values()), met
    assert 10 == len(met)
    assert "stall 2.00 of a plain copy's, at most 2" in met


@pytest.mark.parametrize(
    ("ours_s", "share", "saving", "missed"), [(0.021, 0.5, 1.0, 1), (1.1, 0.5, 1.0, 7), (0.02, 0.6, 1.1, 3)]
)
def test_missed_targets_are_told(ours_s: float, share: float, saving: float, missed: int) -> None:
    """A stall a little too long; everything slower than the others; too many bytes on a rank and in memory."""
    assert missed == list(figures.targets(made(ours_s, share, saving)).values()).count(False)


def test_table_has_a_line_for_each_way() -> None:
    """Ways that load nothing have no figure there; multiples of the state have two digits."""
    lines = figures.table(made(0.02, 0.5, 1.0)).splitlines()

    assert "| elasticflow | 20 | 20 | 20 | 20 |" in lines
    assert "| 2 | 500 | 0.500 | 20 | 10 |" in lines
    assert "| elasticflow, double buffers | 2.10 | 0.00 |" in lines


@pytest.mark.campaign
def test_every_way_saves_and_loads(tmp_path: Path) -> None:
    """A group of one process with a tiny model goes through all ways and leaves its rows."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    argv += [str(GROUP), str(tmp_path), "--what=times", "--parameters=20000", "--rounds=1"]
    ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr

    result = json.loads((tmp_path / "result.json").read_text())
    assert [set(figures.WAYS)] == [set(row) for row in result["saves"]]
    assert [set(figures.LOADS)] == [set(row) for row in result["loads"]]
    assert result["bytes"][0] >= result["state"] > 0
