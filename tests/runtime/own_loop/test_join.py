"""The call by which a process joins a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.forked import ROOT

if TYPE_CHECKING:
    from pathlib import Path

GENERATED = ROOT / "tests" / "compiler" / "golden" / "one_worker" / "train.py"


@pytest.mark.usefixtures("real_processes")
def test_an_edited_train_py_of_an_earlier_version_still_trains(tmp_path: Path) -> None:
    """It calls `elasticflow.join` with the digest of its job."""
    text = GENERATED.read_text()
    assert "    run = join_job(\n" in text
    text = text.replace("join_job(", "elasticflow.join(").replace("STEPS = 200", "STEPS = 3")
    text = text.replace('compare_replicas="1000 steps"', 'compare_replicas="2 steps", measures=Measures()')
    text = text.replace(
        "from elasticflow.runtime.own_loop.join import join_job",
        "from elasticflow.runtime.measuring.speed import Measures",
    )
    (tmp_path / "train.py").write_text(
        text.replace('(HERE / "../../../..").resolve()', f"Path({str(ROOT)!r})")
    )
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3]
    assert any(line["event"] == "training.finished" for line in lines)
