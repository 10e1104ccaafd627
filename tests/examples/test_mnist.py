from __future__ import annotations

import gzip
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from examples.mnist import Net, accuracy, digits, idx, make_data

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "mnist"


def test_digits_are_those_of_the_readme() -> None:
    """1,438 and 359 digits of 8 x 8 pixels in 0..1, each class in both parts."""
    for split, count in (("train", 1438), ("test", 359)):
        data = digits(split)
        assert len(data) == count
        assert data.images.shape == (count, 1, 8, 8)
        assert set(data.labels.tolist()) == set(range(10))
        assert data.source == str(FOLDER)
        image, _ = data[0]
        assert image.dtype == torch.float32
        assert 0 <= image.min() < image.max() <= 1


def test_fingerprint_depends_on_the_data_alone(tmp_path: Path) -> None:
    """The same digits elsewhere and unpacked have the same fingerprint; one changed label gives another."""
    for path in FOLDER.glob("*.gz"):
        shutil.copy(path, tmp_path)
    assert digits("test", str(tmp_path)).fingerprint == digits("test").fingerprint
    labels = tmp_path / f"{idx.FILES['test'][1]}.gz"
    shape, data = idx.parse(labels.read_bytes(), 1)
    labels.write_bytes(idx.dump(shape, bytes([(data[0] + 1) % 10]) + data[1:]))
    assert digits("test", str(tmp_path)).fingerprint != digits("test").fingerprint
    assert digits("train").fingerprint != digits("test").fingerprint


def test_many_samples_at_once_are_the_same_as_one_by_one() -> None:
    """DataLoader's fast path gives what indexing gives, and torch's own collate makes the batch."""
    data = digits("train")
    indices = [5, 0, 1437, 5]
    images, labels = default_collate(data.__getitems__(indices))
    assert images.shape == (4, 1, 8, 8)
    assert labels.dtype == torch.int64
    assert torch.equal(images, torch.stack([data[index][0] for index in indices]))
    assert labels.tolist() == [data[index][1] for index in indices]


def test_default_loader_yields_float_images_and_labels() -> None:
    """A DataLoader without options hands (B, 1, H, W) floats and (B) integers to the model."""
    images, labels = next(iter(DataLoader(digits("test"), batch_size=32)))
    assert (images.shape, images.dtype) == ((32, 1, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((32,), torch.int64)


@pytest.mark.parametrize("side", [8, 28, 31])
def test_net_takes_digits_of_any_size(side: int) -> None:
    """The head does not depend on the image's size."""
    assert Net(width=4)(torch.zeros(2, 1, side, side)).shape == (2, 10)


def test_net_has_what_makes_resuming_hard() -> None:
    """The main job covers BatchNorm's buffers and dropout's random stream."""
    kinds = {type(module) for module in Net().modules()}
    assert {torch.nn.BatchNorm2d, torch.nn.Dropout} <= kinds


def test_accuracy_is_the_share_of_hits() -> None:
    """Two of four right is a half."""
    outputs = torch.eye(10)[[1, 2, 3, 4]]
    assert accuracy(outputs, torch.tensor([1, 2, 0, 0])).item() == 0.5


def test_unknown_split_is_refused() -> None:
    """The error names the two that there are."""
    with pytest.raises(ValueError, match=r'^split is "train" or "test", not "valid"$'):
        digits("valid")


def test_images_without_labels_are_refused(tmp_path: Path) -> None:
    """Files of different lengths do not make a dataset."""
    images, labels = idx.FILES["test"]
    (tmp_path / images).write_bytes(idx.dump((2, 1, 1), b"ab"))
    (tmp_path / labels).write_bytes(idx.dump((3,), b"abc"))
    with pytest.raises(ValueError, match=r"2 images but 3 labels in the test files$"):
        digits("test", str(tmp_path))


@pytest.mark.e2e
def test_digits_of_a_folder_load_no_fsspec() -> None:
    """Only a URL loads fsspec."""
    program = "import sys; from examples.mnist import digits; digits('test'); print('fsspec' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout == "False\n"


def test_files_are_those_that_make_data_writes() -> None:
    """The stored bytes are deterministic gzip: without a time, and equal to what is written again from their content."""
    for path in FOLDER.glob("*.gz"):
        stored = path.read_bytes()
        assert stored[:3] == b"\x1f\x8b\x08"
        assert stored[4:8] == b"\0\0\0\0"
        dimensions = 3 if "idx3" in path.name else 1
        shape, data = idx.parse(stored, dimensions)
        assert idx.parse(idx.dump(shape, data), dimensions) == (shape, data)


def test_make_data_writes_the_four_files(tmp_path: Path) -> None:
    """Pixels are scaled from 0..16 to 0..255, and four fifths are for training."""
    source = tmp_path / "digits.csv.gz"
    rows = [[16.0] * 64 + [digit] if digit % 2 else [8.0] * 64 + [digit] for digit in range(10)]
    source.write_bytes(gzip.compress("".join(",".join(map(str, row)) + "\n" for row in rows).encode()))
    make_data.main(source, tmp_path)
    train, test = digits("train", str(tmp_path)), digits("test", str(tmp_path))
    assert (len(train), len(test)) == (8, 2)
    assert sorted(train.labels.tolist() + test.labels.tolist()) == list(range(10))
    for data in (train, test):
        for image, label in zip(data.images, data.labels, strict=True):
            assert set(image.flatten().tolist()) == {255 if label % 2 else 128}
