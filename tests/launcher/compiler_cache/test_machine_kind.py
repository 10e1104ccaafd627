"""Kernels are shared by machines of one kind only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.launcher.compiler_cache.machine_kind import this_machine

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CPU = "processor\t: 0\nmodel name\t: Xeon 1\nflags\t\t: sse avx\nprocessor\t: 1\nmodel name\t: Xeon 1\n"


def _cpu(folder: Path, text: str) -> Path:
    (folder / "cpuinfo").write_text(text)
    return folder / "cpuinfo"


def test_a_kind_follows_from_processor_and_gpus(tmp_path: Path) -> None:
    """The order of instructions does not matter; another one does, and so does another GPU."""
    gpus = tmp_path / "gpus"
    one = this_machine(_cpu(tmp_path, CPU), gpus)
    assert ("Xeon 1", "") == (one.facts["cpu"], one.facts["gpus"])
    assert one == this_machine(_cpu(tmp_path, CPU.replace("sse avx", "avx sse")), gpus)
    assert one.name != this_machine(_cpu(tmp_path, CPU.replace("sse avx", "sse avx amx")), gpus).name
    for number in ("0", "1"):
        (gpus / number).mkdir(parents=True)
        (gpus / number / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    with_gpus = this_machine(_cpu(tmp_path, CPU), gpus)
    assert "NVIDIA H200" == with_gpus.facts["gpus"]
    assert one.name != with_gpus.name


def test_a_kind_follows_from_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of another version are another cache."""
    one = this_machine(tmp_path / "none", tmp_path / "none")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.14.0")
    other = this_machine(tmp_path / "none", tmp_path / "none")
    assert "2.14.0" == other.facts["torch"]
    assert one.name != other.name
