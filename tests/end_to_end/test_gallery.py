"""Each example as `elasticflow init --example` writes it: trained for a few steps, killed, compared bit for bit."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from elasticflow.jobfile.load import require_job
from elasticflow.scaffold import gallery
from tests.end_to_end.by_hand import undisturbed
from tests.end_to_end.harness import Project, named, steps_of, tensors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.forked import ForkedPrograms

NEEDS = {"lora": ("transformers", "peft")}
STEPS, KILLED_AFTER = 8, 5
# Smaller where the example's own size takes long.
SETS = {
    "contrastive": ["train.virtual_shards=4", "dataset.global_batch_size=32"],
    "dcgan": ["model.args.width=8", "dataset.global_batch_size=16"],
    "detection": ["model.args.width=4", "dataset.global_batch_size=8", "evaluation.samples=16"],
    "diffusion": ["model.args.width=8", "dataset.global_batch_size=16", "evaluation.samples=8"],
    "graphs": ["model.args.width=8", "dataset.global_batch_size=16"],
    "images": ["model.args.width=8", "dataset.global_batch_size=16", "dataset.num_workers=0"],
    "gpt": ["model.args.config.args.n_layer=1", "dataset.global_batch_size=8", "evaluation.samples=16"],
    "segmentation": ["model.args.width=4", "dataset.global_batch_size=8", "evaluation.samples=16"],
    "streaming": ["model.args.width=16", "dataset.global_batch_size=8"],
    "tabular": ["dataset.global_batch_size=16"],
}
BATCH_MODE = {"dcgan"}  # its step moves the optimizers


def sets_of(name: str, path: Path) -> list[str]:
    """Return the keys that make a short run of an example, whose bits can be compared."""
    job = require_job(path / "job.toml").job
    assert job is not None
    sets = [f"train.steps={STEPS}", 'snapshots.every="3 steps"', *SETS.get(name, ())]
    if job.train.epochs is not None:
        sets.append("train.epochs=")
    if name not in BATCH_MODE and job.train.consistency == "batch":
        sets += ["train.consistency=exact", "train.virtual_shards=4"]
    return sets


# Imports of lora take longest; -m campaign has it. The nightly ones have nothing that a kill could lose and the rest has not.
NIGHTLY = ("detection", "diffusion", "gpt", "graphs", "images", "segmentation", "tabular")
WHERE = {"lora": pytest.mark.campaign, **dict.fromkeys(NIGHTLY, pytest.mark.nightly)}
EXAMPLES = [pytest.param(name, marks=WHERE.get(name, ())) for name in sorted(gallery.examples())]


def write_example(name: str, path: Path) -> None:
    """Write the files of an example into the new folder *path*; skip the test if a package is missing."""
    missing = [module for module in NEEDS.get(name, ()) if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install {' '.join(missing)}")
    path.mkdir()
    for file, content in gallery.files_of(name).items():
        (path / file).write_bytes(content)


@pytest.mark.parametrize("name", ["images", "tabular"])  # test_parallel.py trains gpt
def test_an_example_repeats_its_bits(name: str, tmp_path: Path, forked: ForkedPrograms) -> None:
    """One process alone trains it twice."""
    path = tmp_path / name
    write_example(name, path)
    once, again = (
        undisturbed(path / "job.toml", forked, workers=1, sets=sets_of(name, path)) for _ in range(2)
    )
    assert once
    assert once == again


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_that_was_killed_has_the_bits_of_one_that_was_not(
    name: str, tmp_path: Path, forked: ForkedPrograms
) -> None:
    """Two workers, one of them killed after a step; against one process alone, or two where steps move optimizers."""
    path = tmp_path / name
    write_example(name, path)
    sets = sets_of(name, path)
    project = Project(path)
    killing = f"training.step=kill@{KILLED_AFTER} rank=1 generation=1"
    killed = project.run("job.toml", "killed", *sets, job=name, ELASTICFLOW_FAULTS=killing)
    assert killed.end() == 0, killed.told()
    assert len(named(killed.events(), "worker.failed")) == 1
    assert sorted(set(steps_of(killed.run))) == list(range(1, STEPS + 1))
    assert ("train: 4 data shards of packed_text, fingerprint" in killed.told()) == (name == "streaming")
    workers = 2 if name in BATCH_MODE else 1
    assert tensors(killed.run) == undisturbed(path / "job.toml", forked, workers=workers, sets=sets)
