from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.observe.runs import list_runs
from elasticflow.run_folder import RunFolder, make_runs_folder, path_from_root

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("snapshots", "snapshots"),
        ("./a/b", "./a/b"),
        ("file://snapshots", "snapshots"),
        ("file:///shared/x", None),
        ("/shared/x", None),
        ("~/x", None),
        ("file://~/x", None),
        ("s3://bucket/x", None),
        ("simplecache::s3://bucket/x", None),
    ],
)
def test_only_relative_local_places_start_at_the_project_root(uri: str, path: str | None) -> None:
    """A place that depends on the working folder is told from one that means the same everywhere."""
    assert path_from_root(uri) == path


def test_git_ignores_the_folder_that_a_run_makes(tmp_path: Path) -> None:
    """All of it, by a file that is no run; a folder that exists is left as it is, and one elsewhere is not made."""
    run = RunFolder.of(tmp_path, "mnist", "a")
    make_runs_folder(run)
    ignored = tmp_path / "runs" / ".gitignore"
    assert "*" in ignored.read_text().splitlines()
    run.launches.mkdir(parents=True)
    assert [run] == list_runs(tmp_path)

    ignored.unlink()
    make_runs_folder(run)
    assert not ignored.exists()

    make_runs_folder(RunFolder(tmp_path / "elsewhere" / "mnist" / "a"))
    assert not (tmp_path / "elsewhere").exists()
