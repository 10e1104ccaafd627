"""Scripts that can be tried: those whose steps elasticflow is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import TrialRefusedError
from elasticflow.jobfile.load import require_job
from elasticflow.trials.trial import require_own_loop

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job


def job_with(root: Path, script: str, key: str = 'entry = "train.py"', trainer: str = "import json") -> Job:
    """Return the job of a project whose script and module `trainer` have these texts."""
    (root / "pyproject.toml").touch()
    (root / "train.py").write_text(script)
    (root / "trainer.py").write_text(trainer)
    (root / "job.toml").write_text(f'[job]\nname = "own"\n[script]\n{key}\n')
    loaded = require_job(root / "job.toml")
    return loaded.job


_JOINS = "import elasticflow as ef"


@pytest.mark.parametrize(
    "script",
    [
        _JOINS,
        "def main():\n    from elasticflow import join",
        "import trainer",
        "from importlib import import_module\nimport_module(f'loops.{name}')",
        "import hydra, json\nhydra.utils.instantiate(json.load(open('loop.json')))",
    ],
)
@pytest.mark.parametrize("key", ['entry = "train.py"', 'module = "train"'])
def test_a_script_that_joins_or_may_do_so_further_inside_is_tried(
    tmp_path: Path, script: str, key: str
) -> None:
    """Imports of the project's modules are followed."""
    require_own_loop(job_with(tmp_path, script, key, trainer=_JOINS), tmp_path)


def test_a_script_in_a_folder_may_join_in_a_module_beside_it(tmp_path: Path) -> None:
    """Python finds that first; modules of the project root it finds, too."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "loop.py").write_text(_JOINS)
    for module in ("loop", "trainer"):
        (tmp_path / "src" / "main.py").write_text(f"import {module}")
        require_own_loop(job_with(tmp_path, "", 'entry = "src/main.py"', trainer=_JOINS), tmp_path)


@pytest.mark.parametrize("script", ["import torch, json", "from trainer import fit"])
@pytest.mark.parametrize("key", ['entry = "train.py"', 'module = "train"'])
def test_a_script_without_elasticflow_is_refused_before_it_trains(
    tmp_path: Path, key: str, script: str
) -> None:
    """It might train for days, write over its checkpoint, and nothing of it could be compared.

    An installed package may have the loop: the remedy says how to have the script tried then.
    """
    with pytest.raises(
        TrialRefusedError, match=r"neither train(\.py)? nor a module of the project"
    ) as refused:
        require_own_loop(job_with(tmp_path, script, key), tmp_path)
    assert "import elasticflow in the script" in (refused.value.remedy or "")
    require_own_loop(job_with(tmp_path, f"{script}\nimport elasticflow", key), tmp_path)
