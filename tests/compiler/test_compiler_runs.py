from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticflow.compiler import compile_job
from elasticflow.snapshots.catalog import Catalog
from elasticflow.storage import Storage

ROOT = Path(__file__).resolve().parents[2]
JOB = f"""\
[job]
name = "all-features"
path = ["{ROOT}"]
[model]
entry = "examples.mnist:Net"
step = "tests.compiler.golden.pieces:training_step"
[optimizer]
entry = "tests.compiler.golden.pieces:optimizer_of"
args = {{ lr = 0.05, no_decay = ["head.2.bias"] }}
clip_grad_norm = 1.0
[lr_scheduler]
entry = "torch.optim.lr_scheduler:StepLR"
args = {{ step_size = 1 }}
interval = "epoch"
[dataset]
entry = "examples.mnist:digits"
args = {{ split = "test" }}
prepare = "tests.compiler.golden.pieces:download"
collate = "tests.compiler.golden.pieces:collate"
global_batch_size = 100
micro_batch_size = 40
[evaluation]
entry = "examples.mnist:digits"
args = {{ split = "test" }}
metrics = {{ top_1 = "tests.compiler.golden.pieces:top_1" }}
best = "max top_1"
[train]
epochs = 1
precision = "fp16"
ema = 0.9
[nodes]
nproc_per_node = 1
[snapshots]
uri = "shared"
every = "2 steps"
keep = {{ last = 2, best = 1 }}
"""


@pytest.mark.e2e
def test_all_features_of_the_template_run_together(tmp_path: Path) -> None:
    """A job with nearly everything switched on trains to its end as one process, from any folder."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "job.toml").write_text(JOB)
    compile_job(tmp_path / "job.toml", tmp_path / "out")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICFLOW")}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "out" / "train.py")],
        cwd="/",
        env={**environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    newest = Catalog(Storage(str(tmp_path / "shared")), "by-hand/").newest()
    assert newest is not None
    assert (newest.step, newest.epoch) == (4, 1)
