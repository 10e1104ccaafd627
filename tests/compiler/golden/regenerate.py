"""Makes the golden files again: `python tests/compiler/golden/regenerate.py`; then read the difference."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
CASES = (
    "one_worker",
    "four_workers",
    "elastic",
    "gpu",
    "exact",
    "iterable",
    "language_model",
    "own_steps",
    "sharded",
    "transformer",
)
FILES = ("plan.json", "train.py", "torchrun.sh")


def made(case: str) -> dict[str, str]:
    """Return what the compiler makes of a case's job file, by file name."""
    from elasticflow.compiler.launch_folder import launch_files
    from elasticflow.compiler.plan.launch_plan import plan_job
    from elasticflow.jobfile.load import require_job

    folder = HERE / case
    loaded = require_job(folder / "job.toml")
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    files = launch_files(plan, loaded.job, folder, project_root=loaded.project_root)
    return {name: files[name] for name in FILES}


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for each in CASES:
        for name, text in made(each).items():
            (HERE / each / name).write_text(text, encoding="utf-8")
