from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from elasticflow.compiler.provenance.origins import git_state, versions, versions_of_modules
from elasticflow.system import machine


def test_versions_of_what_is_installed() -> None:
    """Python and elasticflow have versions; a package that is not installed is left out."""
    found = versions()
    assert {"python", "torch"} <= set(found)
    assert all(found.values())


def test_versions_of_what_was_imported() -> None:
    """Modules are told by the distributions they came with; those of the project have none."""
    found = versions_of_modules(["yaml_of_nobody", "click", "pydantic_core"])
    assert {"click", "pydantic_core"} <= {name.replace("-", "_") for name in found}
    assert "yaml_of_nobody" not in found


def test_machine() -> None:
    """Kernel, processor and cores are known on every Linux."""
    found = machine.facts()
    assert found["kernel"]
    assert found["cpu"]
    assert found["cores"] >= 1


@pytest.mark.usefixtures("real_processes")
def test_git_state(tmp_path: Path) -> None:
    """The commit is named, and whether tracked files differ from it; outside of git nothing is known."""
    assert git_state(tmp_path) is None
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        (tmp_path / "file").write_text("one")
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, timeout=100)
    state = git_state(tmp_path)
    assert state is not None
    assert (len(str(state["commit"])), state["is_clean"]) == (40, True)
    (tmp_path / "untracked").write_text("")
    assert git_state(tmp_path) == state
    (tmp_path / "file").write_text("two")
    changed = git_state(tmp_path)
    assert changed is not None
    assert changed == {**state, "is_clean": False, "changed": ["file"], "patch": changed["patch"]}
    (tmp_path / "new.py").write_text("")
    more = git_state(tmp_path)
    assert more is not None
    assert None not in {changed["patch"], more["patch"]}
    assert changed["patch"] != more["patch"]  # untracked sources count


@pytest.mark.usefixtures("real_processes")
def test_git_knows_files_whose_names_are_no_utf_8(tmp_path: Path) -> None:
    """They keep no run from its start."""
    (path := Path(os.fsdecode(bytes(tmp_path) + b"/d\xe9.csv"))).write_text("one")
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, timeout=100)
    path.write_text("two")
    state = git_state(tmp_path)
    assert state is not None
    assert state["changed"] == ["d\N{REPLACEMENT CHARACTER}.csv"]
    assert state["patch"] is not None


@pytest.mark.usefixtures("real_processes")
def test_no_git_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without git installed nothing is known."""
    monkeypatch.setenv("PATH", "")
    assert git_state(tmp_path) is None
