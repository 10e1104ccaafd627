"""`elasticflow init`: what it writes, asks and refuses; that the job runs is an end-to-end test's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli

from elasticflow.cli.main import call
from elasticflow.cli.write import init_files
from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE
from elasticflow.scaffold import gallery

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
PAIR = """\
from torch import nn
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(8, 2)
    def forward(self, z):
        return self.layers(z)
class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(2, 1)
    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty checkout, being the working folder."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    # Trying a job out starts a process that imports torch: an end-to-end test's.
    monkeypatch.setattr(init_files, "tried_out", lambda *_: True)
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
    assert "there is Net too: --model NAME" in capsys.readouterr().out


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
        (PAIR, [], "Generator and Discriminator seem to be trained against each other"),
        (PAIR, [], "let model.step take (model, batch, optimizers)"),
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


def test_what_flags_give_has_the_arguments_type(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text of digits stays a text, a number is one, and what is neither is refused before anything is written."""
    (project / "nets.py").write_text(MODEL.replace("self, width,", "self, width: int, root: str,"))
    assert 2 == call(["init", "nets.py"])
    err = capsys.readouterr().err
    assert "needs the arguments width (a whole number), root (a text)" in err
    assert "--set model.args.width=VALUE --set model.args.root=VALUE" in err
    assert 2 == call(["init", "nets.py", "--set", "model.args.width=four", "--set", "model.args.root=4"])
    assert "model.args.width takes a whole number, not four" in capsys.readouterr().err
    assert {"nets.py"} == _files(project)
    assert 0 == call(["init", "nets.py", "--set", "model.args.width=4", "--set", "model.args.root=4"])
    assert {"width": 4, "root": "4"} == _job("jobs/net.toml")["model"]["args"]


GPT = """\
from dataclasses import dataclass
from torch import nn
@dataclass
class Config:
    block_size: int = 16
    vocab_size: int = 50
    width: int = 8
    bias: bool = True
class Block(nn.Module):
    def __init__(self, config): ...
class GPT(nn.Module):
    def __init__(self, config, depth: int):
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(depth)])
        self.head = nn.Linear(config.width, config.vocab_size, bias=config.bias)
    def forward(self, idx, targets=None):
        return logits, loss
"""


def test_a_model_with_a_config_that_computes_its_loss(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dataclass is an entry of its own with its fields; a step takes the model's loss; data are tokens and the next."""
    (project / "gpt.py").write_text(GPT)
    assert 0 == call(["init", "gpt.py", "--set", "model.args.depth=2"])
    job = _job("jobs/gpt.toml")
    assert {
        "depth": 2,
        "config": {
            "entry": "gpt:Config",
            "args": {"block_size": 16, "vocab_size": 50, "width": 8, "bias": True},
        },
    } == job["model"]["args"]
    assert "gpt_step:training_step" == job["model"]["step"]
    assert "loss" not in job["model"]
    assert "return model(inputs, targets=targets)[1]" in (project / "gpt_step.py").read_text()
    data = (project / "gpt_data.py").read_text()
    assert "LENGTH = 16 " in data
    assert "TOKENS = 50 " in data
    assert "since GPT.forward computes the loss itself" in capsys.readouterr().out

    flags = ("model.args.depth=2", "model.args.config.width=4", "model.args.config.args.bias=no")
    again = ["init", "gpt.py", "--print", *(f"--set={flag}" for flag in flags)]
    assert 0 == call(again)
    config = tomli.loads(capsys.readouterr().out)["model"]["args"]["config"]
    assert {"block_size": 16, "vocab_size": 50, "width": 4, "bias": False} == config["args"]
    for flag, told in (
        ("width=wide", "model.args.config.width takes a whole number, not wide"),
        ("height=3", "Config has no height; it has block_size, vocab_size, width, bias"),
    ):
        assert 2 == call([*again, "--set", f"model.args.config.{flag}"])
        assert told in capsys.readouterr().err


def test_a_dataset_that_is_named_gets_its_arguments(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that does not look like data: what it needs is asked for before anything is written."""
    (project / "nets.py").write_text(MODEL.replace("self, width,", "self, width=2,"))
    (project / "own.py").write_text("def faces(root: str, size=8):\n    return [1]\n")
    assert 2 == call(["init", "nets.py", "--dataset", "own:faces"])
    assert "own:faces needs the argument root (a text)" in capsys.readouterr().err
    assert 0 == call(["init", "nets.py", "--dataset", "own:faces", "--set", "dataset.args.root=4"])
    assert {"root": "4"} == _job("jobs/net.toml")["dataset"]["args"]


def test_what_a_job_file_cannot_give_is_told(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that is a class: a function that returns the model is offered first, else asked for."""
    text = MODEL.replace("self, width,", "self, block,").replace("nn.Linear(width", "block(3")
    (project / "nets.py").write_text(text)
    assert 2 == call(["init", "nets.py"])
    err = capsys.readouterr().err
    assert "nets:Net needs the argument block, an object that a job file cannot give" in err
    assert "write a function without it that returns the model" in err
    (project / "nets.py").write_text(f"{text}def small():\n    return Net(nn.Linear)\n")
    assert 0 == call(["init", "nets.py", "--dataset", "x:y", "--print"])
    assert "nets:small" == tomli.loads(capsys.readouterr().out)["model"]["entry"]


def test_a_loss_nobody_can_tell_is_left_to_a_person(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft of a step instead of a loss that is called wrongly."""
    (project / "nets.py").write_text(
        MODEL.replace("self, width,", "self, width=2,").replace("return self.layers(x)", "return x, x")
    )
    assert 0 == call(["init", "nets.py"])
    assert "raise NotImplementedError" in (project / "nets_step.py").read_text()
    out = capsys.readouterr().out
    assert "a draft of a training step" in out
    assert "write the loss in nets_step.py: until then a run fails at its first step" in out


def test_bases_in_other_files_and_under_other_names(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`import torch.nn as N`, `from torch.nn import Module as M`, a base of the project's own."""
    pytest.importorskip("torch")
    (project / "base.py").write_text("import torch.nn as N\nclass Base(N.Module): ...\n")
    (project / "nets.py").write_text(
        "from torch.nn import Module as M\nfrom base import Base\nimport torch.nn as N\n"
        "class Later(One): ...\nclass One(N.Sequential): ...\nclass Two(M): ...\nclass Three(Base): ...\n"
        "def made() -> Three: ...\ndef other():\n    net = Two()\n    return net\nclass Config(dict): ...\n"
    )
    assert 2 == call(["init", "nets.py", "--model", "none"])
    assert "there are: Later, made, other, One, Two, Three" in capsys.readouterr().err.replace("\n", " ")


def test_flags_of_a_model_need_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model's file there is nothing to choose from."""
    assert 2 == call(["init", "--model", "Net"])
    assert "go with a model file" in capsys.readouterr().err
    assert 2 == call(["init", "--name", "not-a-package"])
    assert set() == _files(project)


def test_a_pair_is_a_job_by_what_holds_both_or_by_the_one_that_is_named(project: Path) -> None:
    """A module of the file that is made of both is the model; one of them alone takes a flag."""
    (project / "gan.py").write_text(PAIR)
    assert 0 == call(["init", "gan.py", "--model", "Generator"])
    assert "gan:Generator" == _job("jobs/generator.toml")["model"]["entry"]
    whole = "class Both(nn.Module):\n    def __init__(self):\n        self.g, self.d = Generator(), Discriminator()\n"
    (project / "gan.py").write_text(PAIR + whole + "    def forward(self, x):\n        return self.d(x)\n")
    dataset = "def data():\n    return [1]\n"
    (project / "samples.py").write_text(dataset)
    assert 0 == call(["init", "gan.py"])
    assert "gan:Both" == _job("jobs/both.toml")["model"]["entry"]


def test_a_method_that_makes_the_optimizers_is_told(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has an optimizer of its own; how to take the model's is said."""
    (project / "nets.py").write_text(f"{MODEL}    def configure_optimizers(self, lr): ...\n")
    assert 0 == call(["init", "nets.py", "--set", "model.args.width=2"])
    assert "torch.optim:AdamW" == _job("jobs/net.toml")["optimizer"]["entry"]
    assert 'to take it: optimizer.entry = "nets:Net.configure_optimizers"' in capsys.readouterr().out
    (project / "plain.py").write_text(MODEL)
    assert 0 == call(["init", "plain.py", "--set", "model.args.width=2", "--name", "plain"])
    assert "configure_optimizers" not in capsys.readouterr().out


def test_an_example_is_written_as_it_is(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files, byte by byte, in a folder of its name; its job is valid there; runs are kept out of git."""
    (project / "pyproject.toml").write_text("")
    assert 0 == call(["init", "--example", "tabular", "--yes"])
    files = gallery.files_of("tabular")
    assert {f"tabular/{name}" for name in files} | {"tabular/.gitignore", "pyproject.toml"} == _files(project)
    assert all((project / "tabular" / name).read_bytes() == content for name, content in files.items())
    out = capsys.readouterr().out
    assert "cd tabular" in out
    assert "elasticflow run job.toml" in out
    assert 0 == call(["validate", "--strict", "tabular/job.toml"])


def test_an_example_overwrites_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file that is there is enough; another folder may be named."""
    (project / "tabular").mkdir()
    (project / "tabular" / "job.toml").write_text("mine")
    assert 2 == call(["init", "--example", "tabular"])
    assert "nothing was written; choose another folder: -o FOLDER" in capsys.readouterr().err
    assert {"tabular/job.toml"} == _files(project)
    assert 0 == call(["init", "--example", "tabular", "-o", "mine/table", "--no-gitignore"])
    assert (project / "mine" / "table" / "tabular.py").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gtp"], 'did you mean "gpt"?'),
        (["nonsense"], "there are: contrastive, dcgan, gpt,"),
        (["gpt", "--name", "mine"], "with --example go -o, --print, --gitignore, --deep and --yes only"),
    ],
)
def test_what_no_example_takes_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    """Before anything is written."""
    assert 2 == call(["init", "--example", *words])
    assert expected in capsys.readouterr().err
    assert not _files(project)


def test_an_example_says_which_packages_it_lacks(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is written all the same; the exit code tells that it cannot train yet."""
    files = gallery.files_of("tabular")
    code = files["tabular.py"].replace(b"import torch\n", b"import torch\nimport absent_package\n", 1)
    monkeypatch.setattr(gallery, "files_of", lambda _: {**files, "tabular.py": code})
    assert 1 == call(["init", "--example", "tabular", "--no-gitignore"])
    assert "install the package that has absent_package" in capsys.readouterr().out
    assert (project / "tabular" / "job.toml").exists()


def test_an_examples_job_can_be_printed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of what else would be written."""
    assert 0 == call(["init", "--example", "tabular", "--print"])
    shown = capsys.readouterr()
    assert shown.out.encode() == gallery.files_of("tabular")["job.toml"]
    assert "tabular/tabular.py would be written too" in shown.err
    assert not _files(project)
