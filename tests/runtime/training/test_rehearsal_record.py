"""What is written down of a first step: forms, and nothing of the data."""

from __future__ import annotations

import json
from collections import OrderedDict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from elasticflow.protocol.worker_environment import COMPILER_CACHE
from elasticflow.run_folder import RunFolder
from elasticflow.runtime.training.rehearsal_record import RehearsalRecord, describe, make, read, recorded
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from pathlib import Path


class Pair(NamedTuple):
    """Fields by name, in a batch."""

    inputs: Any
    targets: Any


SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16])
TENSORS = st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), SHAPES, DTYPES)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
BATCHES = st.recursive(
    TENSORS | PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=6,
)


def forms(value: Any) -> Any:
    """Return the types of a batch, and of its tensors all but the values."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return type(value), {key: forms(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [forms(each) for each in value]
    return type(value)


@given(BATCHES)
def test_a_batch_of_the_same_form_is_made(batch: Any) -> None:
    """From what went through JSON; tensors are all zeros."""
    made = make(json.loads(json.dumps(describe(batch))))
    assert forms(batch) == forms(made)
    assert describe(batch) == describe(made)


def test_strides_are_part_of_the_form() -> None:
    """The compiler's guards look at them."""
    transposed = torch.ones(2, 3).t()
    assert (1, 3) == make(describe(transposed)).stride()


def test_no_value_is_written_down() -> None:
    """Neither numbers nor texts."""
    text = json.dumps(describe({"x": torch.full((2,), 4711.0), "name": "Smith", "age": 4711}))
    assert "4711" not in text
    assert "Smith" not in text


def worker_in(folder: Path, **changes: Any) -> Any:
    """Return what `recorded` reads of a worker."""
    facts = {
        "identity": SimpleNamespace(started_by="launcher"),
        "device": torch.device("cpu"),
        "run_folder": RunFolder(folder),
        "node": "n0",
        "local_rank": 1,
        "rank": 3,
        "world_size": 4,
        "store": object(),
        "dataset_values": {"vocab_size": 65},
        "at_first_step": [],
    }
    return SimpleNamespace(**facts | changes)


def step(model: nn.Module, batch: Any) -> Any:
    """Return what it was called with."""
    return model, batch


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the agent keep a compiler's cache."""
    monkeypatch.setenv(COMPILER_CACHE, "")


@pytest.mark.usefixtures("compiles")
def test_the_first_step_is_recorded_each_form_once(tmp_path: Path) -> None:
    """In its order; what comes after the first step is not."""
    worker, model = worker_in(tmp_path), nn.Linear(1, 1)
    path = worker.run_folder.rehearsal("n0", 1)
    path.parent.mkdir()
    path.write_text("of a generation before")
    called = recorded(worker, step, precision="bf16", ddp={"bucket_cap_mb": 1})
    assert not path.exists()
    batches = [torch.ones(n, 2) for n in (4, 4, 3)]
    for batch in batches:
        assert (model, batch) == called(model, batch)
    worker.at_first_step[0]()
    called(model, torch.ones(7))

    record = read(path)
    assert record is not None
    assert [describe(batches[0]), describe(batches[2])] == record.batches
    assert (3, 4, "bf16", {"bucket_cap_mb": 1}) == (
        record.rank,
        record.world_size,
        record.precision,
        record.ddp,
    )
    assert {"vocab_size": 65} == record.values
    assert record.has_group
    assert record.flags["threads"] == torch.get_num_threads()
    assert record.memory > 1 << 20


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("batch", [object(), {1: torch.ones(1)}, torch.ones(2).to_sparse()])
def test_what_cannot_be_made_again_is_not_recorded(tmp_path: Path, batch: Any) -> None:
    """A record is written all the same: whoever waits for it need not wait."""
    worker = worker_in(tmp_path)
    recorded(worker, step, precision="fp32", ddp=None)(nn.Linear(1, 1), batch)
    worker.at_first_step[0]()
    record = read(worker.run_folder.rehearsal("n0", 1))
    assert record is not None
    assert [] == record.batches


def test_only_workers_whose_standby_would_rehearse_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where nothing is compiled, not under torchrun, not on a GPU: the step is the job's own then."""
    monkeypatch.delenv(COMPILER_CACHE, raising=False)
    assert recorded(worker_in(tmp_path), step, precision="fp32", ddp=None) is step
    monkeypatch.setenv(COMPILER_CACHE, "")
    for changes in (
        {"identity": SimpleNamespace(started_by="torchrun")},
        {"device": torch.device("cuda")},
    ):
        assert recorded(worker_in(tmp_path, **changes), step, precision="fp32", ddp=None) is step


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 1}', '{"unknown": 1}'])
def test_a_record_that_is_no_record_is_none(tmp_path: Path, text: str) -> None:
    """Of another version, or damaged: nothing is rehearsed."""
    (tmp_path / "record.json").write_text(text)
    assert read(tmp_path / "record.json") is None
    assert read(tmp_path / "absent.json") is None


def test_a_full_disk_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Standbys do not rehearse then."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(COMPILER_CACHE, "")
    monkeypatch.setattr(atomic_files, "replace", fail)
    worker = worker_in(tmp_path)
    recorded(worker, step, precision="fp32", ddp=None)(nn.Linear(1, 1), torch.ones(1))
    worker.at_first_step[0]()
    assert read(worker.run_folder.rehearsal("n0", 1)) is None


def test_record_has_all_fields() -> None:
    """What is written is what is read."""
    assert RehearsalRecord(0, 1, [], "fp32", None, has_group=True, variables={}, flags={}).values == {}
