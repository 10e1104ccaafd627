"""Bases: files that others extend are checked for what they hold, not for what they leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticflow.cli.main import call
from elasticflow.jobfile.load import load_job
from elasticflow.jobfile.project import is_base


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base.toml", True),
        ("base.job.toml", True),
        ("large.base.toml", True),
        ("_large.toml", True),
        ("mnist.toml", False),
        ("baseline.toml", False),
        ("database.toml", False),
        ("mnist_base.toml", False),
        ("mnist.job.toml", False),
    ],
)
def test_bases_are_told_by_their_names(name: str, expected: bool) -> None:
    """A name says so before its ending, or begins with an underscore."""
    assert expected == is_base(Path("jobs") / name)


def test_a_base_is_not_asked_for_what_it_leaves_out(tmp_path: Path) -> None:
    """No missing table, key or length; whatever is there is checked."""
    path = tmp_path / "base.toml"
    path.write_text('[train]\nprecision = "bf16"\n\n[optimizer]\nargs = { lr = 1e-3 }\n')
    assert load_job(path).has_errors
    assert load_job(path).as_base().diagnostics == []
    path.write_text('[train]\nprecision = "bf17"\nepoch = 5\n')
    assert [each.line for each in load_job(path).as_base().diagnostics] == [2, 3]


def test_a_base_without_a_path_may_name_modules_of_the_path_that_another_file_gives(tmp_path: Path) -> None:
    """A base that gives the path itself is held to it."""
    (tmp_path / "src" / "proj").mkdir(parents=True)
    (tmp_path / "src" / "proj" / "__init__.py").write_text("def rows(): return [1]\n")
    path = tmp_path / "data.base.toml"
    path.write_text('[dataset]\nentry = "proj:rows"\n')
    assert load_job(path).as_base().diagnostics == []
    path.write_text('[job]\npath = ["."]\n[dataset]\nentry = "proj:rows"\n')
    assert [each.code for each in load_job(path).as_base().diagnostics] == ["EF201"]


def test_validate_knows_bases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`validate` accepts a base; nothing else that is no whole job."""
    for name in ("base.toml", "part.toml"):
        (tmp_path / name).write_text("[train]\nepochs = 5\n")
    assert call(["validate", str(tmp_path / "base.toml")]) == 0
    assert call(["validate", str(tmp_path / "part.toml")]) == 1
    assert "missing table [model]" in capsys.readouterr().out
