"""`elasticflow init`: what it writes, asks and refuses; that the job runs is an end-to-end test's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli

from elasticflow.cli.main import call
from elasticflow.spec.schema import SCHEMA_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable

MODEL = """\
from torch import nn
class Net(nn.Module):
    def __init__(self, width, classes=3):
        super().__init__()
        self.layers = nn.Linear(width, classes)
    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty checkout, being the working folder."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _files(root: Path) -> set[str]:
    return {each.relative_to(root).as_posix() for each in root.rglob("*") if each.is_file()}


def _job(path: str) -> dict[str, dict[str, object]]:
    return tomli.loads(Path(path).read_text())


def test_an_example_from_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Package, job, schema and .gitignore; the job is valid and the next commands are told."""
    (project / ".gitignore").write_text("*.pyc")
    assert 0 == call(["init"])
    assert {"spirals/__init__.py", "jobs/spirals.toml", "jobs/job.schema.json", ".gitignore"} == _files(
        project
    )
    assert "*.pyc\n/runs/\n" == (project / ".gitignore").read_text()
    assert (project / "jobs" / "job.schema.json").read_bytes() == SCHEMA_FILE.read_bytes()
    assert (project / "jobs" / "spirals.toml").read_text().startswith("#:schema job.schema.json\n")
    assert "elasticflow run jobs/spirals.toml" in capsys.readouterr().out
    assert 0 == call(["validate", "--strict", "jobs/spirals.toml"])


def test_nothing_is_overwritten(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second time, one file that is there is enough: nothing is written."""
    (project / "jobs").mkdir()
    (project / "jobs" / "spirals.toml").write_text("mine")
    assert 2 == call(["init"])
    assert "jobs/spirals.toml exists already" in capsys.readouterr().err
    assert {"jobs/spirals.toml"} == _files(project)
    assert 0 == call(["init", "--name", "second", "--no-gitignore", "--pre-commit"])
    assert {".pre-commit-config.yaml", "second/__init__.py"} < _files(project)
    assert ".gitignore" not in _files(project)


def test_a_hook_beside_others_is_added_by_hand(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that is there is somebody's: the lines are printed."""
    (project / ".pre-commit-config.yaml").write_text("repos: []\n")
    assert 0 == call(["init", "--pre-commit"])
    assert "- id: elasticflow-validate" in capsys.readouterr().out
    assert "repos: []\n" == (project / ".pre-commit-config.yaml").read_text()


def test_a_model_without_data(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its argument is asked for by name; given, data of its shape is made up."""
    (project / "nets.py").write_text(MODEL)
    assert 2 == call(["init", "nets.py"])
    err = capsys.readouterr().err
    assert "nets:Net needs the argument width" in err
    assert "--set model.args.width=VALUE" in err
    assert {"nets.py"} == _files(project)

    assert 0 == call(
        ["init", "nets.py", "--set", "model.args.width=5", "--batch-size", "16", "--epochs", "2"]
    )
    assert "SAMPLE = (5,)" in (project / "nets_data.py").read_text()
    job = _job("jobs/net.toml")
    assert {"width": 5} == job["model"]["args"]
    assert ("nets_data:samples", 16) == (job["dataset"]["entry"], job["dataset"]["global_batch_size"])
    assert 2 == job["train"]["epochs"]


def test_a_model_with_data_beside_it(project: Path) -> None:
    """A dataset of a neighbour, the loss by its annotation, and a folder that is no package."""
    folder = project / "my-code"
    folder.mkdir()
    (folder / "nets.py").write_text(MODEL.replace("self, width,", "self, width=2,"))
    (folder / "faces.py").write_text(
        "class Faces:\n    def __len__(self): return 3\n"
        "    def __getitem__(self, index) -> tuple[list[float], float]: ...\n"
    )
    assert 0 == call(["init", "my-code/nets.py", "-o", "jobs/faces.toml", "--name", "faces"])
    job = _job("jobs/faces.toml")
    assert (["my-code"], "nets:Net", "faces:Faces") == (
        job["job"]["path"],
        job["model"]["entry"],
        job["dataset"]["entry"],
    )
    assert "torch.nn.functional:mse_loss" == job["model"]["loss"]


def test_choices_by_flag(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several models one is named; losses and steps of the file are used; what was chosen unasked is said."""
    (project / "nets.py").write_text(
        MODEL.replace("self, width,", "self, width=2,")
        + "class Other(Net): ...\ndef my_loss(outputs, targets): ...\ndef load_data(): return [1]\n"
    )
    assert 0 == call(["init", "nets.py", "--model", "Other", "--print"])
    out = capsys.readouterr().out
    assert ("nets:Other", "nets:my_loss") == tuple(
        tomli.loads(out)["model"][key] for key in ("entry", "loss")
    )
    assert {"nets.py"} == _files(project)
    assert 0 == call(["init", "nets.py", "--loss", "torch.nn.functional:nll_loss"])
    assert "there are Net too: --model NAME" in capsys.readouterr().out or "there are Other too" in out


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("x = 1\n", [], "defines no nn.Module"),
        ("def broken(:\n", [], "line 1 is not Python"),
        (MODEL, ["--model", "Nett"], "has no model Nett"),
        (
            MODEL.replace("nn.Linear(width", "make(width"),
            ["--set", "model.args.width=2"],
            "do not tell what it takes",
        ),
        (MODEL, ["--set", "train.epochs=2"], "write it like model.args.width=64"),
        (
            MODEL,
            ["-o", "../outside/jobs/x.toml", "--set", "model.args.width=2"],
            "lies outside of the project",
        ),
    ],
)
def test_what_cannot_become_a_job(
    project: Path, capsys: pytest.CaptureFixture[str], text: str, words: Iterable[str], told: str
) -> None:
    """Each refusal says why, and nothing is written."""
    (project / "nets.py").write_text(text)
    assert 2 == call(["init", "nets.py", *words])
    assert told in capsys.readouterr().err
    assert {"nets.py"} == _files(project)


def test_flags_of_a_model_need_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model's file there is nothing to choose from."""
    assert 2 == call(["init", "--model", "Net"])
    assert "go with a model file" in capsys.readouterr().err
    assert 2 == call(["init", "--name", "not-a-package"])
    assert set() == _files(project)
