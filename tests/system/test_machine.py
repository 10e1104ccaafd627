"""Kernels are shared by machines of one kind only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.system import machine
from elasticflow.system.machine import MachineKind, this_machine

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CPU = "processor\t: 0\nmodel name\t: Xeon 1\nflags\t\t: sse avx\nprocessor\t: 1\nmodel name\t: Xeon 1\n"


def test_a_kind_follows_from_processor_and_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of instructions does not matter; another one does, and so does another GPU."""
    here = machine.facts()

    def kind(text: str, *gpus: str) -> MachineKind:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(machine, "facts", lambda: {**here, "cpu": "Xeon 1", "gpus": list(gpus)})
        return this_machine()

    one = kind(CPU)
    assert ("Xeon 1", "") == (one.facts["cpu"], one.facts["gpus"])
    assert one == kind(CPU.replace("sse avx", "avx sse"))
    assert one.name != kind(CPU.replace("sse avx", "sse avx amx")).name
    with_gpus = kind(CPU, "NVIDIA H200", "NVIDIA H200")
    assert "NVIDIA H200" == with_gpus.facts["gpus"]
    assert one.name != with_gpus.name


def test_a_kind_follows_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of another version are another cache."""
    one = this_machine()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.14.0")
    other = this_machine()
    assert "2.14.0" == other.facts["torch"]
    assert one.name != other.name
