"""Hugging Face datasets, written and read by their own library, work unchanged."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow.errors import DatasetError
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.index_schedule import IndexSchedule

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")

SAMPLES = 30


def rows(change: int = 0) -> dict[str, Any]:
    """Return the columns of a small dataset; *change* is added to every label."""
    return {"x": [[float(i), 0.5] for i in range(SAMPLES)], "label": [i + change for i in range(SAMPLES)]}


@pytest.fixture
def hugging_face() -> Any:
    """Return the library, which takes a second to import: only the process that runs these tests does."""
    return pytest.importorskip("datasets")


@pytest.fixture
def folder(tmp_path: Path, hugging_face: Any) -> str:
    """Return where a dataset was saved."""
    hugging_face.Dataset.from_dict(rows()).save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


def read_all(me: Any, dataset: Any, processes: int, size: int = 8) -> list[Any]:
    """Return one epoch's batches."""
    schedule = IndexSchedule(SAMPLES, size, epochs=1, seed=3)
    loader = index_loader.IndexLoader(me, dataset, schedule, 5, num_workers=processes)
    return [made for batch in loader.batches(schedule.start) for made, _ in batch.micro_batches]


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("is_torch", [False, True])
def test_saved_arrow_files_are_read(
    me: Any, hugging_face: Any, folder: str, is_torch: bool, processes: int
) -> None:
    """`load_from_disk` is a factory as it is, with the torch format or without, here or in loader processes."""

    def factory() -> Any:
        loaded = hugging_face.load_from_disk(folder)
        return loaded.with_format("torch") if is_torch else loaded

    found = read_all(me, index_loader.open_dataset(me, factory, "train", SAMPLES), processes)
    assert sorted(torch.cat([batch["label"] for batch in found]).tolist()) == list(range(SAMPLES))
    for batch in found:
        x = batch["x"] if is_torch else torch.stack(batch["x"], 1)  # lists are turned by torch's own collate
        assert torch.equal(x[:, 0], batch["label"].to(x.dtype))


def test_random_transforms_are_keyed_by_sample(me: Any, hugging_face: Any, folder: str) -> None:
    """Whatever the batch size and whoever reads."""

    def noisy(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "noise": torch.rand(len(batch["label"]))}

    def noise(processes: int, size: int) -> dict[int, float]:
        dataset = hugging_face.load_from_disk(folder).with_transform(noisy)
        batches = read_all(me, dataset, processes, size)
        return {
            int(label): float(value)
            for batch in batches
            for label, value in zip(batch["label"], batch["noise"], strict=True)
        }

    expected = noise(0, SAMPLES)
    assert len(set(expected.values())) == SAMPLES
    assert expected == noise(0, 7) == noise(2, 4)


def test_fingerprint_is_of_the_content_alone(me: Any, hugging_face: Any, folder: str, tmp_path: Path) -> None:
    """The same in another place, from another format, in memory; another one for other content."""

    def mark(dataset: Any) -> str:
        return str(index_loader.open_dataset(me, lambda: dataset, "train").fingerprint)

    expected = mark(hugging_face.load_from_disk(folder))
    shutil.copytree(folder, tmp_path / "copy")
    assert expected == mark(hugging_face.load_from_disk(str(tmp_path / "copy")))
    in_memory = hugging_face.Dataset.from_dict(rows())
    in_memory.to_parquet(str(tmp_path / "one.parquet"))
    assert expected == mark(in_memory)
    parquet = hugging_face.Dataset.from_parquet(str(tmp_path / "one.parquet"), cache_dir=str(tmp_path))
    assert parquet._fingerprint != in_memory._fingerprint  # why theirs is not used
    assert expected == mark(parquet)
    assert expected != mark(hugging_face.Dataset.from_dict(rows(change=1)))
    assert expected != mark(in_memory.select(range(SAMPLES - 1)))
    assert expected != mark(in_memory.shuffle(seed=1))


def test_several_splits_are_no_dataset(me: Any, hugging_face: Any) -> None:
    """A DatasetDict has to be asked for one of them."""
    splits = hugging_face.DatasetDict({"train": hugging_face.Dataset.from_dict(rows())})
    with pytest.raises(DatasetError, match="returned a DatasetDict, which has no samples by number"):
        index_loader.open_dataset(me, lambda: splits, "train")
