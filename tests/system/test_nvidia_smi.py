"""The tool of NVIDIA's driver. No driver is here: the tool is pretended."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elasticflow.system.nvidia_smi import query, uuid_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put *script* on PATH as the tool."""
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_rows_have_the_fields_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of another form is left out; the option, the fields and the GPU reach the tool."""
    pretend(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; echo "GPU-a, 12"; echo; echo "a warning"')
    assert query(("uuid", "memory.free"), 20) == [["GPU-a", "12"]]
    assert (tmp_path / "asked").read_text() == "--query-gpu=uuid,memory.free --format=csv,noheader,nounits\n"
    query(("gpu_uuid",), 20, what="--query-remapped-rows", uuid="GPU-a")
    assert (tmp_path / "asked").read_text() == (
        "--query-remapped-rows=gpu_uuid --format=csv,noheader,nounits --id=GPU-a\n"
    )


def test_a_tool_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are one that gives no answer in time, and none at all."""
    pretend(tmp_path, monkeypatch, "echo lost; exit 15")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        query(("uuid",), 20)
    assert (raised.value.returncode, raised.value.stdout) == (15, "lost\n")
    pretend(tmp_path, monkeypatch, "exec sleep 60")
    with pytest.raises(subprocess.TimeoutExpired):
        query(("uuid",), 0.2)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError):
        query(("uuid",), 20)


@pytest.mark.parametrize("uuid", ["ab-cd", "GPU-ab-cd"])
def test_uuids_have_the_tool_s_form(uuid: str) -> None:
    """Torch leaves the prefix out; devices of other makers have no uuid."""
    assert uuid_of(SimpleNamespace(uuid=uuid)) == "GPU-ab-cd"
    assert uuid_of(SimpleNamespace()) == ""
