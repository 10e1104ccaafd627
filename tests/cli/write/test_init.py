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
    monkeypatch.setattr(init_files, "tried_out", lambda *_, **_named: True)
    return tmp_path


def _files(root: Path) -> set[str]:
    return {each.relative_to(root).as_posix() for each in root.rglob("*") if each.is_file()}


def _job(path: str) -> dict[str, dict[str, object]]:
    return tomli.loads(Path(path).read_text())


def test_an_example_from_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Package, job and schema; the job is valid and the next commands are told."""
    assert 0 == call(["init"])
    assert {"spirals/__init__.py", "jobs/spirals.toml", "jobs/job.schema.json"} == _files(project)
    assert (project / "jobs" / "job.schema.json").read_bytes() == SCHEMA_FILE.read_bytes()
    assert (project / "jobs" / "spirals.toml").read_text().startswith("#:schema job.schema.json\n")
    told = capsys.readouterr().out
    assert "elasticflow run jobs/spirals.toml" in told
    assert "wrote jobs/job.schema.json" in told
    assert 0 == call(["validate", "--strict", "jobs/spirals.toml"])


def test_nothing_is_overwritten(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second time, one file that is there is enough: nothing is written."""
    (project / "jobs").mkdir()
    (project / "jobs" / "spirals.toml").write_text("mine")
    assert 2 == call(["init"])
    assert "jobs/spirals.toml exists already" in capsys.readouterr().err
    assert {"jobs/spirals.toml"} == _files(project)
    assert 0 == call(["init", "--name", "second", "--pre-commit"])
    assert {".pre-commit-config.yaml", "second/__init__.py"} < _files(project)


def test_a_hook_of_any_encoding_is_only_looked_at(project: Path) -> None:
    """It may be in an encoding of its own."""
    (project / ".pre-commit-config.yaml").write_bytes(b"# B\xfcro\n")
    assert 0 == call(["init", "-y", "--no-deep", "--pre-commit"])
    assert b"# B\xfcro\n" == (project / ".pre-commit-config.yaml").read_bytes()


def test_a_hook_beside_others_is_added_by_hand(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that is there is somebody's: the lines are printed."""
    (project / ".pre-commit-config.yaml").write_text("repos: []\n")
    assert 0 == call(["init", "--pre-commit"])
    assert "- id: elasticflow-validate" in capsys.readouterr().out
    assert "repos: []\n" == (project / ".pre-commit-config.yaml").read_text()


DATA = """\
class Faces:
    def __init__(self, root="x"): ...
    def __len__(self): return 3
    def __getitem__(self, index): ...
"""
GIVEN = ("--set", "model.args.width=5", "--loss", "mse_loss")


def test_what_is_missing_is_named_with_its_flag(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: all keys at once, what each takes, and nothing is written; what was found is listed."""
    (project / "nets.py").write_text(MODEL)
    assert 2 == call(["init", "nets.py"])
    shown = capsys.readouterr()
    assert "  model    nets:Net                  nets.py:2\n" in shown.out
    assert "model.args.width (a value), which nets:Net needs" in shown.err
    assert "dataset.entry, a function or class that gives samples" in shown.err
    assert "model.loss, a function of outputs and targets, or model.step" in shown.err
    assert (
        "--set model.args.width=VALUE --loss NAME (or --set model.step=MODULE:NAME) --dataset MODULE:NAME"
        in shown.err
    )
    assert {"nets.py"} == _files(project)


def test_a_model_with_data_beside_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dataset of a neighbour, a loss of torch's by its name, and a folder that is no package; the job is valid."""
    folder = project / "my-code"
    folder.mkdir()
    (folder / "nets.py").write_text(MODEL)
    (folder / "faces.py").write_text(DATA)
    words = ["init", "my-code/nets.py", *GIVEN, "--batch-size", "16", "--epochs", "2"]
    assert 0 == call([*words, "-o", "jobs/faces.toml", "--name", "faces"])
    job = _job("jobs/faces.toml")
    assert (["my-code"], "nets:Net", {"width": 5}, "torch.nn.functional:mse_loss") == (
        job["job"]["path"],
        job["model"]["entry"],
        job["model"]["args"],
        job["model"]["loss"],
    )
    assert {"entry": "faces:Faces", "global_batch_size": 16} == job["dataset"]
    assert 2 == job["train"]["epochs"]
    assert 0 == call(["validate", "--strict", "jobs/faces.toml"])
    capsys.readouterr()
    assert 0 == call([*words, "--print"])
    shown = capsys.readouterr()
    assert "nets:Net" == tomli.loads(shown.out)["model"]["entry"]
    assert "faces:Faces" in shown.err


def test_several_that_fit_are_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None is taken unasked: a flag says which; losses and steps of the file are taken."""
    (project / "nets.py").write_text(
        MODEL.replace("self, width,", "self, width=2,")
        + "class Other(nn.Module): ...\ndef my_loss(outputs, targets): ...\ndef load_data(): return [1]\n"
    )
    assert 2 == call(["init", "nets.py", "--print"])
    err = capsys.readouterr().err
    assert "model.entry, one of nets:Net (nets.py:2), nets:Other (nets.py:8)" in err
    assert "--model NAME" in err
    assert 0 == call(["init", "nets.py", "--model", "Other", "--print"])
    found = tomli.loads(capsys.readouterr().out)["model"]
    assert {"entry": "nets:Other", "loss": "nets:my_loss"} == found
    assert {"nets.py"} == _files(project)


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("x = 1\n", [], "defines no nn.Module"),
        ("def broken(:\n", [], ", line 1: "),
        (MODEL, ["--model", "Nett"], "has no model Nett"),
        (MODEL, ["--dataset", "nets:absent", *GIVEN], "nothing was written"),
        (PAIR, [], "models that are trained together need a module that holds them"),
        (MODEL, ["--set", "train.epochs=2"], "write it like model.args.width=64"),
        (MODEL, ["--set", "model=2"], "write it like model.args.width=64"),
        (MODEL, ["--set", "model.args.width=[2"], "no TOML value"),
        (MODEL, ["-o", "../outside/jobs/x.toml", *GIVEN], "lies outside of the project"),
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


def test_a_job_that_would_not_be_valid_is_not_written(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The diagnostics are those of `validate`, with the line that would be in the file."""
    (project / "nets.py").write_text(MODEL.replace("self, width,", "self, width: int, root: str,") + DATA)
    assert 2 == call(["init", "nets.py", "--loss", "mse_loss"])
    err = capsys.readouterr().err
    assert "model.args.width (int)" in err
    assert "--set model.args.width=VALUE --set model.args.root=VALUE" in err
    given = ["init", "nets.py", "--loss", "mse_loss", "--set", "model.args.width=four"]
    assert 2 == call([*given, "--set", "model.args.root=4"])
    err = capsys.readouterr().err
    assert 'nets:Net takes int as "width", not "four"' in err
    assert 'did you mean "4"?' in err
    assert "jobs/net.toml:10" in err
    assert {"nets.py"} == _files(project)
    assert 0 == call([*given, "--set", "model.args.width=4", "--set", 'model.args.root="4"'])
    assert {"width": 4, "root": "4"} == _job("jobs/net.toml")["model"]["args"]


GPT = """\
from dataclasses import dataclass
from torch import nn
@dataclass
class Config:
    vocab_size: int
    block_size: int = 16
    width: int = 8
    bias: bool = True
class Block(nn.Module):
    def __init__(self, config): ...
class GPT(nn.Module):
    def __init__(self, config: Config, depth: int):
        self.blocks = nn.ModuleList([Block(config) for _ in range(depth)])
    def training_step(self, batch):
        return self(*batch)[1]
def load_data(path: str): return [1]
"""


def test_a_model_with_a_config_and_a_step_of_its_own(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dataclass is an entry of its own with its fields; the step is the model's method; --set reaches every key."""
    (project / "gpt.py").write_text(GPT)
    assert 2 == call(["init", "gpt.py"])
    assert "model.args.config.args.vocab_size (int), which gpt:Config needs" in capsys.readouterr().err
    given = [
        "model.args.depth=2",
        "model.args.config.args.vocab_size=50",
        "dataset.args.path=x",
        "dataset.num_workers=3",
        "optimizer.entry=torch.optim:SGD",
        "optimizer.args.lr=1.0",
    ]
    assert 0 == call(["init", "gpt.py", *(f"--set={flag}" for flag in given)])
    job = _job("jobs/gpt.toml")
    config = {"vocab_size": 50, "block_size": 16, "width": 8, "bias": True}
    assert {"depth": 2, "config": {"entry": "gpt:Config", "args": config}} == job["model"]["args"]
    assert "gpt:GPT.training_step" == job["model"]["step"]
    assert "loss" not in job["model"]
    assert {"entry": "torch.optim:SGD", "args": {"lr": 1.0}} == job["optimizer"]
    assert (3, {"path": "x"}) == (job["dataset"]["num_workers"], job["dataset"]["args"])
    assert 0 == call(["validate", "--strict", "jobs/gpt.toml"])


def test_flags_of_a_model_need_one(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model's file there is nothing to choose from."""
    assert 2 == call(["init", "--model", "Net"])
    assert "go with a model file" in capsys.readouterr().err
    assert 2 == call(["init", "--name", "not-a-package"])
    assert set() == _files(project)


def test_a_pair_is_a_job_by_what_holds_both_or_by_the_one_that_is_named(project: Path) -> None:
    """A module of the file that is made of both is the model; one of them alone takes a flag."""
    dataset = "def data():\n    return [1]\n"
    (project / "samples.py").write_text(dataset)
    (project / "gan.py").write_text(PAIR)
    assert 0 == call(["init", "gan.py", "--model", "Generator", "--loss", "mse_loss"])
    assert "gan:Generator" == _job("jobs/generator.toml")["model"]["entry"]
    whole = "class Both(nn.Module):\n    def __init__(self):\n        self.g, self.d = Generator(), Discriminator()\n"
    (project / "gan.py").write_text(PAIR + whole + "    def forward(self, x):\n        return self.d(x)\n")
    assert 0 == call(["init", "gan.py", "--loss", "mse_loss"])
    assert "gan:Both" == _job("jobs/both.toml")["model"]["entry"]


def test_a_method_that_makes_the_optimizers_is_told(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job has an optimizer of its own; how to take the model's is said."""
    (project / "samples.py").write_text(DATA)
    (project / "nets.py").write_text(f"{MODEL}    def configure_optimizers(self, lr): ...\n")
    assert 0 == call(["init", "nets.py", *GIVEN])
    assert "torch.optim:AdamW" == _job("jobs/net.toml")["optimizer"]["entry"]
    assert 'to take it: optimizer.entry = "nets:Net.configure_optimizers"' in capsys.readouterr().out
    (project / "nets.py").write_text(MODEL)
    assert 0 == call(["init", "nets.py", *GIVEN, "--name", "plain"])
    assert "configure_optimizers" not in capsys.readouterr().out


def test_an_example_is_written_as_it_is(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files, byte by byte, in a folder of its name; its job is valid there."""
    (project / "pyproject.toml").write_text("")
    assert 0 == call(["init", "--example", "tabular", "--yes"])
    files = gallery.files_of("tabular")
    assert {f"tabular/{name}" for name in files} | {"pyproject.toml"} == _files(project)
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
    assert 0 == call(["init", "--example", "tabular", "-o", "mine/table"])
    assert (project / "mine" / "table" / "tabular.py").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gtp"], 'did you mean "gpt"?'),
        (["nonsense"], "there are: contrastive, dcgan, detection, diffusion, gpt,"),
        (["gpt", "--name", "mine"], "with --example go -o, --print, --deep and --yes only"),
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
    assert 1 == call(["init", "--example", "tabular"])
    assert "install the package that has absent_package" in capsys.readouterr().out
    assert (project / "tabular" / "job.toml").exists()


def test_an_examples_job_can_be_printed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of what else would be written."""
    assert 0 == call(["init", "--example", "tabular", "--print"])
    shown = capsys.readouterr()
    assert shown.out.encode() == gallery.files_of("tabular")["job.toml"]
    assert "tabular/tabular.py would be written too" in shown.err
    assert not _files(project)


def test_data_in_shards_is_called_with_its_shard(project: Path) -> None:
    """`shard` and `shards` are given by elasticflow, not by the job."""
    (project / "nets.py").write_text(MODEL)
    (project / "texts.py").write_text(
        "def stream(folder: str, shard: int, shards: int):\n    yield from ()\n"
    )
    given = ("--dataset", "texts:stream", "--set", "dataset.shards=8", "--set", "dataset.args.folder=x")
    assert 0 == call(["init", "nets.py", *GIVEN, *given])
    assert {"folder": "x"} == _job("jobs/net.toml")["dataset"]["args"]
