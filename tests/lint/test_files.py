"""Which files of a folder are linted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.project import files_below

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
