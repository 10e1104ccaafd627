"""Which files of a folder are linted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.project import files_below
from elasticflow.lint.check import may_train

if TYPE_CHECKING:
    from pathlib import Path


def test_python_files_at_any_depth(tmp_path: Path) -> None:
    """Not those of hidden folders, environments, installed packages and runs."""
    names = ["a.py", "src/b.py", "src/deep/c.py", "notes.txt", ".git/d.py", "env/e.py", "runs/job/f.py", "x/site-packages/g.py", "x/__pycache__/h.py", "node_modules/i.py"]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()

    assert ["a.py", "src/b.py", "src/deep/c.py"] == [
        str(path.relative_to(tmp_path)) for path in files_below(tmp_path, ".py")
    ]


def test_a_script_of_a_librarys_trainer_is_read(tmp_path: Path) -> None:
    """It need not import torch itself."""
    (tmp_path / "train.py").write_text("from transformers import Trainer\nTrainer(model=make()).train()\n")
    (tmp_path / "other.py").write_text("import json\n")
    assert [may_train(tmp_path / name) for name in ("train.py", "other.py", "absent.py")] == [
        True,
        False,
        True,
    ]
