from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.jobfile.load import require_job
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from tests.forked import ForkedPrograms

ROOT = Path(__file__).resolve().parents[3]
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
collate = {{ entry = "tests.compiler.golden.pieces:batches_of", args = {{ size = 8 }} }}
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


def run_by_hand(forked: ForkedPrograms, folder: Path) -> str:
    """Run the compiled job as one process from elsewhere; return what it printed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICFLOW")}
    environ["PYTHONPATH"] = str(ROOT)
    program = forked.start(folder / "train.py", environment=environ, cwd=Path("/"))
    assert program.wait(300) == 0, program.stderr.read_text()
    return program.stdout.read_text()


def steps_of(folder: Path, generation: int) -> list[tuple[int, int]]:
    """Return step and world size of each line of a step in the log of that generation's rank 0."""
    log = (folder / "logs" / f"g{generation:04}" / "rank0.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in log]
    return [(line["step"], line["world_size"]) for line in lines if line["event"] == "step"]


@pytest.mark.timeout(600)
@pytest.mark.e2e
def test_all_features_of_the_template_run_together_and_once(forked: ForkedPrograms, tmp_path: Path) -> None:
    """A job with nearly everything switched on trains to its end as one process, from any folder.

    Run again it finds the last snapshot, trains no step, and ends well.
    """
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "job.toml").write_text(JOB)
    loaded = require_job(tmp_path / "job.toml")
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    materialize(
        tmp_path / "out", launch_files(plan, loaded.job, tmp_path / "out", project_root=loaded.project_root)
    )
    assert "training.finished" in run_by_hand(forked, tmp_path / "out")
    newest = Catalog(Storage(str(tmp_path / "shared")), "by-hand/").newest()
    assert newest is not None
    assert (newest.step, newest.epoch) == (4, 1)
    assert (4, 1) == steps_of(tmp_path / "out", 1)[-1]

    run_by_hand(forked, tmp_path / "out")
    assert [] == steps_of(tmp_path / "out", 2)
