"""What a machine that joins must have in common with the run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elasticflow.compiler.provenance.job_json import job_to_json
from elasticflow.compiler.provenance.origins import own_sources
from elasticflow.errors import NodeRefusedError
from elasticflow.launcher.rendezvous.invitation import Invitation, versions
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from pathlib import Path


def _invitation(root: Path) -> Invitation:
    job = make_job()
    sources = {name: each.sha256 for name, each in own_sources(job, root, []).items()}
    return Invitation("run", job_to_json(job), "", versions(), sources=sources)


def test_the_same_code_may_take_part(tmp_path: Path) -> None:
    """Equal files, wherever the project lies; files that no factory reaches do not count."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pieces.py").write_text("class Net: ...\n")
    (tmp_path / "two" / "unused.py").write_text("")
    _invitation(tmp_path / "one").check(make_job(), tmp_path / "two")


def test_other_code_may_not(tmp_path: Path) -> None:
    """A module that differs, or is missing, is named: its ranks would train something else."""
    (tmp_path / "pieces.py").write_text("class Net: ...\n")
    invitation = _invitation(tmp_path)
    for text in ("class Net: other = True\n", None):
        (tmp_path / "pieces.py").unlink() if text is None else (tmp_path / "pieces.py").write_text(text)
        with pytest.raises(NodeRefusedError, match=r"the job's code here is not the run's: pieces\.py"):
            invitation.check(make_job(), tmp_path)


def test_another_job_may_not(tmp_path: Path) -> None:
    """The key that differs is named, with both values."""
    with pytest.raises(NodeRefusedError, match=r"job\.seed is 0 there, 7 here"):
        _invitation(tmp_path).check(make_job(job__seed=7), tmp_path)


@pytest.mark.parametrize("name", ["elasticflow", "torch", "python"])
def test_other_versions_may_not(tmp_path: Path, name: str) -> None:
    """What differs is named, with both versions."""
    invitation = replace(_invitation(tmp_path), versions={**versions(), name: "0.9"})
    with pytest.raises(NodeRefusedError, match=rf"the run uses {name} 0\.9, this machine has ") as refused:
        invitation.check(make_job(), tmp_path)
    assert refused.value.remedy == f"install {name} 0.9 here"
