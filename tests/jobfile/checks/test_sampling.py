"""Samplers in job files: what is refused, where, and what is said instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.jobfile.load import load_job

if TYPE_CHECKING:
    from pathlib import Path

JOB = """
[job]
name = "x"
[model]
entry = "mine:Net"
loss = "torch.nn.functional:mse_loss"
[optimizer]
entry = "torch.optim:SGD"
[dataset]
entry = "mine:Data"
global_batch_size = 8
{dataset}
[train]
epochs = 3
"""
CODE = """
import torch

class Net(torch.nn.Module):
    pass

class Data:
    def __init__(self):
        self.labels = [0, 1]
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return index

class Other(Data):
    def __init__(self, sizes=None):
        pass

def weights(dataset):
    return [1.0] * len(dataset)

def nothing():
    return []

def rows(shard=0, shards=1):
    yield 1

NUMBERS = [1, 2]
"""
WRONG = [
    ("sampler = { weight = 1 }", "EF101", 'unknown key "weight" in [dataset.sampler]', 'did you mean "weights"?'),
    ("sampler = { }", "EF102", "a sampler needs `weights`, `balance_by`, `bucket_by`", 'balance_by = "label"'),
    (
        'sampler = { weights = "a", balance_by = "b" }',
        "EF323",
        "`weights` and `balance_by` of a sampler exclude each other",
        "weights of your own can balance classes",
    ),
    (
        'sampler = { bucket_by = "mine:weights", draws = 3 }',
        "EF323",
        "with `bucket_by` each comes once per epoch",
        "leave it out",
    ),
    ('sampler = { weights = "mine:weight" }', "EF202", "mine has no weight", 'did you mean "weights"?'),
    ('sampler = { weights = "mine:nothing" }', "EF204", "called with 1 argument (the dataset)", "let it take"),
    ('sampler = { weights = "mine:NUMBERS" }', "EF203", "mine:NUMBERS cannot be called", "name a class or a function"),
    ('sampler = { balance_by = "label" }', "EF217", "what mine:Data makes has no `label`", 'did you mean "labels"?'),
    ('sampler = { num_samples = 7, weights = "mine:weights" }', "EF101", "num_samples", "draws"),
    ('sampler = "WeightedRandomSampler"', "EF103", "dataset.sampler must be a table", None),
    ("group_by_length = true", "EF101", "group_by_length", 'sampler = { bucket_by = "length" }'),
    ("balanced_sampler = true", "EF101", "balanced_sampler", 'sampler = { balance_by = "label" }'),
    ("sampler = { temperature = 2.0 }", "EF323", "there is one set", "[[dataset.mix]] with an entry each"),
    (
        'shards = 4\nsampler = { weights = "mine:weights" }',
        "EF323",
        "dataset.sampler draws samples by their numbers, and data shards are read in order",
        "without dataset.shards",
    ),
]  # fmt: skip

MIX = """
[[dataset.mix]]
entry = "mine:Data"
{first}
[[dataset.mix]]
entry = "mine:Other"
{second}
"""
WRONG_MIXTURES = [
    ("", "weight = 1", "EF323", "dataset.mix[0] has no weight, and other sets have one", "or none"),
    ("weight = 0", "weight = 1", "EF104", "dataset.mix[0].weight", None),
    ("", "args = { size = 3 }", "EF204", 'mine:Other takes no argument "size"', 'did you mean "sizes"?'),
    ("", "[dataset.sampler]\ntemperature = 2.0\ndraws = 4", "EF323", "an epoch of a mixture is as many", "leave it out"),
    (
        "weight = 2",
        "weight = 3\n[dataset.sampler]\ntemperature = 2.0",
        "EF323",
        "makes the sets' shares of their sizes, and a set has a weight of its own",
        "keep the weights, or the temperature",
    ),
    (
        "",
        '[dataset.sampler]\nweights = "mine:weights"',
        "EF323",
        "dataset.sampler.weights goes by the samples of one set, and dataset.mix names several",
        "ConcatDataset",
    ),
    ("", 'entry2 = "mine:Other"', "EF101", "entry2", None),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "code", "message", "remedy"), WRONG_MIXTURES)
def test_mixtures_that_cannot_be_are_refused(
    project: Path, first: str, second: str, code: str, message: str, remedy: str | None
) -> None:
    """With the place inside the array of tables."""
    text = JOB.replace('entry = "mine:Data"\n', "").format(dataset=MIX.format(first=first, second=second))
    (project / "job.toml").write_text(text)
    told = load_job(project / "job.toml").diagnostics
    found = [each for each in told if each.code == code and message in each.message]
    assert found, told
    assert (found[0].line or 0) >= 12
    assert remedy is None or remedy in (found[0].help or ""), found[0].help


@pytest.mark.parametrize(
    ("dataset", "code", "message"),
    [
        ('entry = "mine:Data"', "EF106", "dataset.entry and dataset.mix exclude each other"),
        ("args = { a = 1 }", "EF323", "each set of dataset.mix has args of its own"),
        ("shards = 4", "EF323", "dataset.mix draws samples by their numbers"),
    ],
)
def test_keys_of_one_set_do_not_go_with_several(project: Path, dataset: str, code: str, message: str) -> None:
    """Its entry, its arguments, its shards."""
    mix = MIX.format(first="", second="")
    text = JOB.replace('entry = "mine:Data"\n', "").format(dataset=f"{dataset}\n{mix}")
    (project / "job.toml").write_text(text)
    told = load_job(project / "job.toml").diagnostics
    assert [each for each in told if each.code == code and message in each.message], told


def test_mixtures_that_can_be(project: Path) -> None:
    """By weight, by size, by temperature, with arguments from outside."""
    for first, second in (
        ("weight = 0.7", "weight = 0.3\nargs = { sizes = 3 }"),
        ("", "args = { sizes = '${env:SIZES:-3}' }"),
        ("", "[dataset.sampler]\ntemperature = 5"),
    ):
        text = JOB.replace('entry = "mine:Data"\n', "").format(dataset=MIX.format(first=first, second=second))
        (project / "job.toml").write_text(text)
        errors = [each for each in load_job(project / "job.toml").diagnostics if each.severity == "error"]
        assert errors == []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the job's own code."""
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path


@pytest.mark.parametrize(("dataset", "code", "message", "remedy"), WRONG)
def test_samplers_that_cannot_be_are_refused(
    project: Path, dataset: str, code: str, message: str, remedy: str | None
) -> None:
    """With code, place and remedy."""
    (project / "job.toml").write_text(JOB.format(dataset=dataset))
    told = load_job(project / "job.toml").diagnostics
    found = [each for each in told if each.code == code and message in each.message]
    assert found, told
    assert (found[0].line or 0) >= 12
    assert remedy is None or remedy in (found[0].help or ""), found[0].help


@pytest.mark.parametrize(
    "dataset",
    [
        'sampler = { weights = "mine:weights", draws = 100 }',
        'sampler = { balance_by = "labels" }',
        'sampler = { bucket_by = "mine:weights" }',
        "[dataset.sampler]\nbalance_by = 'labels'",
    ],
)
def test_samplers_that_can_be(project: Path, dataset: str) -> None:
    """Nothing is said of them."""
    (project / "job.toml").write_text(JOB.format(dataset=dataset))
    assert [each for each in load_job(project / "job.toml").diagnostics if each.severity == "error"] == []


def test_draws_say_how_long_training_is(project: Path) -> None:
    """An epoch of 4 draws and tail = "drop" makes no step of 8."""
    dataset = 'tail = "drop"\nsampler = { weights = "mine:weights", draws = 4 }'
    (project / "job.toml").write_text(JOB.format(dataset=dataset))
    assert "EF306" in {each.code for each in load_job(project / "job.toml").diagnostics}
