"""Packages that a job needs and that are not here: found before a run starts, by reading."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from elasticflow.compiler.provenance.missing_imports import require_importable
from elasticflow.errors import JobRefusedError
from elasticflow.jobfile.load import require_job

if TYPE_CHECKING:
    from pathlib import Path

JOB = """\
[job]
name = "a"
[model]
entry = "net.model:Net"
loss = "torch.nn.functional:cross_entropy"
[optimizer]
entry = "torch.optim:AdamW"
[dataset]
entry = "{dataset}"
global_batch_size = 8
[train]
epochs = 1
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job file with code of its own, in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "__init__.py").touch()
    (tmp_path / "net" / "model.py").write_text("from .parts import Net\n")
    (tmp_path / "net" / "parts.py").write_text(
        "import json, os.path\nimport torch.nn\n\nclass Net(torch.nn.Module): ...\n"
    )
    (tmp_path / "data.py").write_text("def samples(): ...\n")
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(dataset="data:samples"))
    return path


def _refusal(job: Path) -> str:
    try:
        require_importable(require_job(job))
    except JobRefusedError as error:
        return error.message
    return ""


def test_a_missing_package_is_named_where_it_is_imported(job: Path, tmp_path: Path) -> None:
    """Through the job's own modules, at the line; the way to have it is told; torch is another's business."""
    assert "" == _refusal(job)
    (tmp_path / "net" / "parts.py").write_text(
        "import torch.nn\nimport sklearnn_.x as y\nclass Net(torch.nn.Module): ...\n"
    )
    told = _refusal(job)
    assert "error[EF215]: net.parts cannot be imported: sklearnn_ is not installed here" in told
    assert "--> net/parts.py:2:1" in told
    assert "2 | import sklearnn_.x as y" in told
    assert (
        "help: install the package that has sklearnn_; or, for code of your own, add its folder to job.path (looked in ./)"
        in told
    )
    job.write_text(JOB.format(dataset="sklearnn_.data:samples"))
    assert 1 == _refusal(job).count("EF215")
    assert "job.toml:9:9" in _refusal(job)


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    import absent_\nexcept ImportError:\n    absent_ = None\n",
        "def late():\n    import absent_\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import absent_\n",
        "import sys\nsys.path.append('vendor')\nimport absent_\n",
    ],
    ids=["tried", "late", "for types", "path"],
)
def test_what_may_never_be_imported_is_left_to_the_run(job: Path, tmp_path: Path, text: str) -> None:
    """An import under a condition, or by code that changes where Python looks."""
    (tmp_path / "data.py").write_text(text + "def samples(): ...\n")
    assert "" == _refusal(job)


def test_nothing_is_begun_and_nothing_imported(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`run` ends with code 2 before there is a run folder; `validate` still passes: it may run elsewhere."""
    (tmp_path / "data.py").write_text("import absent_\nraise SystemExit\ndef samples(): ...\n")
    assert 0 == call(["validate", "job.toml"])
    assert 2 == call(["run", "job.toml"])
    assert "absent_ is not installed here" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert "data" not in sys.modules
