"""The kind of machine that bits depend on."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from elasticflow.errors import StateError
from elasticflow.runtime.process import environment, float32

CPU = torch.device("cpu")


def test_what_a_kind_says() -> None:
    """Device, libraries, instruction set and threads; it goes into a manifest as JSON."""
    found = environment.describe(CPU)
    assert {"torch", "python", "numpy", "cpu", "cpu_capability", "threads"} <= found.keys()
    assert found["threads"] == str(torch.get_num_threads())
    assert found == json.loads(json.dumps(found))


def test_what_may_change_bits() -> None:
    """Python's version is recorded, but adds nothing up; what a snapshot does not tell is not known to differ."""
    was = {"threads": "2", "python": "3.11", "torch": "2.13"}
    assert environment.changes(was, {**was, "threads": "1", "python": "3.12", "cuda": "13"}) == {
        "threads": "1, was 2"
    }


def test_version_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm's devices have CUDA's type; a snapshot that names no version of ROCm is of the same kind."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(environment, "device_name", lambda _: "MI300X")
    monkeypatch.setattr(float32, "precision_facts", lambda _: {})
    found = environment.describe(torch.device("cuda", 0))
    assert ("6.4", False) == (found["hip"], "cuda" in found)
    was = {name: fact for name, fact in found.items() if name != "hip"}
    assert {} == environment.changes({**was, "cuda": "None"}, found)
    assert {"hip": "6.4, was 6.3"} == environment.changes({**found, "hip": "6.3"}, found)


def test_threads_that_differ_between_ranks_are_refused(me: Any) -> None:
    """The error names rank, fact and both values, on every rank."""
    me.gather_text = lambda text: [text, json.dumps({**json.loads(text), "threads": "31"})]
    with pytest.raises(StateError) as refused:
        environment.require_same(me)
    assert "threads is 31 on rank 1" in refused.value.message
    assert refused.value.remedy == "set train.threads, the same for every node"


@pytest.mark.parametrize("is_exact", [True, False])
def test_going_on_elsewhere_is_told_where_bits_are_promised(me: Any, is_exact: bool) -> None:
    """One warning says what differs; in batch mode nothing is said."""
    now = environment.describe(CPU)
    environment.log_changes(me, {**now, "cpu_capability": "NONE"}, is_exact=is_exact)
    changed = {"cpu_capability": f"{now['cpu_capability']}, was NONE"}
    expected = [{"event": "kind.changed", "level": "warning", "changed": changed}]
    assert me.events == (expected if is_exact else [])
    environment.log_changes(me, now, is_exact=is_exact)
    assert len(me.events) <= 1
