"""`elasticflow init train.py`: a job with [script], the rung, the next one's lines, what lint finds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tomli

from elasticflow.cli.main import call
from tests.lint.loops import ACCELERATE, PLAIN, TRAINER

if TYPE_CHECKING:
    from pathlib import Path

JOINED = """\
import torch
import elasticflow as ef

run = ef.join()
for batch in run.batches(data, size=8, epochs=1):
    (loss_of(batch) * batch.share).backward()
"""
EXACT = JOINED.replace("(loss_of(batch) * batch.share).backward()", "run.gradients(loss_of, batch)")
MODEL = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Linear(4, 3)

    def forward(self, x):
        return self.layers(x)


def my_loss(outputs, targets):
    return (outputs - targets).square().mean()


def load_data():
    return [1]


"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty checkout, which is the current folder."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _job(name: str) -> dict[str, Any]:
    with open(f"jobs/{name}.toml", "rb") as file:  # noqa: PTH123
        return tomli.load(file)


def test_a_script_gets_a_job_that_runs_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid, with its schema; the rung, the lines of the next one by number, the findings, how to continue."""
    (here / "fit.py").write_text(TRAINER, "utf-8")
    assert call(["init", "fit.py", "--workers", "4"]) == 0
    told = capsys.readouterr().out
    assert _job("fit")["script"] == {"entry": "fit.py", "args": []}
    assert _job("fit")["nodes"] == {"nproc_per_node": 4}
    assert (here / "jobs" / "job.schema.json").exists()
    assert "rung 0  a loop on torch's DistributedDataParallel" in told
    assert 'fit.py:27: dist.init_process_group(backend="gloo")\n      -> run = elasticflow.join()' in told
    assert "fit.py:57: for inputs, targets in self.loader:" in told
    assert "`elasticflow guide --template class`" in told
    assert "\nlint  " in told
    assert "\nlooked for\n" in told
    assert "reading cannot tell" in told
    assert call(["validate", "--strict", "jobs/fit.toml"]) == 0


def test_nothing_is_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As for a model: another name, or nothing."""
    (here / "fit.py").write_text(PLAIN, "utf-8")
    assert call(["init", "fit.py"]) == 0
    before = (here / "jobs" / "fit.toml").read_bytes()
    assert call(["init", "fit.py"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert call(["init", "fit.py", "--name", "again"]) == 0
    assert (here / "jobs" / "fit.toml").read_bytes() == before


def test_arguments(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that are given, word by word; those that its parser asks for are named."""
    asking = PLAIN.replace('"--epochs", type=int, default=4', '"data", type=str')
    asking = asking.replace('"--out", default="weights.pt"', '"-o", "--out", required=True')
    (here / "fit.py").write_text(asking, "utf-8")
    assert call(["init", "fit.py"]) == 0
    assert "the script asks for data, --out" in capsys.readouterr().out
    assert "it asks for data, --out" in (here / "jobs" / "fit.toml").read_text()
    assert call(["init", "fit.py", "--name", "b", "--args", "'my data' --out=x"]) == 0
    assert _job("b")["script"]["args"] == ["my data", "--out=x"]
    assert "asks for" not in capsys.readouterr().out
    assert call(["init", "fit.py", "--name", "d", "--args", "'a | b'"]) == 0
    assert _job("d")["script"]["args"] == ["a | b"]
    assert call(["init", "fit.py", "--name", "c", "--args", "'open"]) == 2
    assert "No closing quotation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rung", "after"),
    [
        (JOINED, "rung 1  a loop on elasticflow.join", "-> elasticflow.join(virtual_shards=16)"),
        (EXACT, "rung 2  a loop on elasticflow.join", ""),
        (ACCELERATE, "rung 0  a loop on Accelerate", "-> run = elasticflow.join(), before it"),
    ],
)
def test_rungs(here: Path, capsys: pytest.CaptureFixture[str], text: str, rung: str, after: str) -> None:
    """Which one it is, and what the next one takes."""
    (here / "fit.py").write_text(text, "utf-8")
    call(["init", "fit.py", "--script"])
    told = capsys.readouterr().out
    assert rung in told
    assert after in told
    assert ("[snapshots]" in (here / "jobs" / "fit.toml").read_text().splitlines()) == (text != ACCELERATE)


def test_a_script_of_one_process_gets_one_worker(here: Path) -> None:
    """More would each train the same; said in the job file. A number that is given stands."""
    (here / "fit.py").write_text("import torch\nfor x in data:\n    model(x).backward()\n", "utf-8")
    call(["init", "fit.py"])
    assert _job("fit")["nodes"] == {"nproc_per_node": 1}
    assert (
        "# no line of this file trains in several processes; a module that it imports may\n"
        in (here / "jobs" / "fit.toml").read_text()
    )
    call(["init", "fit.py", "--name", "two", "--workers", "2"])
    assert _job("two")["nodes"] == {"nproc_per_node": 2}


HELPER = """\
from helpers import prepare_accelerator

accelerator = prepare_accelerator(args)
for x in data:
    accelerator.backward(model(x))
"""
BY_HAND = """\
from helpers import apply_gradient_allreduce

model = apply_gradient_allreduce(model)
for x in data:
    model(x).backward()
"""


@pytest.mark.parametrize(
    ("text", "form", "comment"),
    [
        (HELPER, "a loop on Accelerate", "workers per machine"),
        (BY_HAND, "a loop of which this file does not show in how many processes it trains", "reading the script did not tell"),
    ],
)  # fmt: skip
def test_one_process_is_not_said_of_what_helpers_may_spread(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, form: str, comment: str
) -> None:
    """An accelerator that another module makes, gradients that are summed by hand."""
    (here / "fit.py").write_text(f"import torch\n{text}", "utf-8")
    call(["init", "fit.py"])
    assert form in capsys.readouterr().out
    assert comment in (here / "jobs" / "fit.toml").read_text()


def test_a_script_without_a_way_back_is_not_said_to_go_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it saves, no start loads."""
    (here / "fit.py").write_text(
        "import torch\nfor x in data:\n    model(x).backward()\n    torch.save(model.state_dict(), f'{x}.pt')\n", "utf-8"
    )  # fmt: skip
    call(["init", "fit.py"])
    told = capsys.readouterr().out
    assert "1 EF616" in told
    assert "resumes from" not in told
    assert 0 == call(["plan", "jobs/fit.toml"])
    assert "it trains on only if it loads what it has saved" in " ".join(capsys.readouterr().out.split())


def test_a_script_with_join_is_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not begin again after Ctrl-C, and lint has no lines to show."""
    (here / "fit.py").write_text(
        "import elasticflow as ef\nimport torch\nrun = ef.join()\nfor batch in run.batches(data, size=4):\n"
        "    model(batch.inputs).backward()\n    run.step()\nrun.finish()\n", "utf-8"
    )  # fmt: skip
    assert 0 == call(["init", "fit.py"])
    told = capsys.readouterr().out
    assert "after Ctrl-C, `elasticflow resume` resumes it" in told
    assert "lint  no warnings\n" in told


def test_a_model_is_no_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that only defines, and one of which a model is asked for, get a job with [model]."""
    (here / "net.py").write_text(MODEL, "utf-8")
    assert call(["init", "net.py", "--print"]) == 0
    assert "[model]" in capsys.readouterr().out
    (here / "both.py").write_text(MODEL + PLAIN, "utf-8")
    assert call(["init", "both.py", "--print"]) == 0
    assert "[script]" in capsys.readouterr().out
    assert call(["init", "both.py", "--model", "Net", "--dataset", "load_data", "--print"]) == 0
    assert "[model]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--script"], "--script and --args go with a file"),
        (["--script", "fit.py", "--epochs", "3"], "--epochs go with a model"),
        (["fit.py", "--deep"], "a script would train: leave it out"),
        (["--script", "none.py"], "none.py cannot be read"),
        (["--script", "empty.py"], "shows no training"),
        (["empty.py"], "a training script: --script"),
        (["notebook.ipynb"], "is a notebook"),
        (["folder"], "is a folder"),
    ],
)
def test_what_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Exit code 2 with the reason; nothing is written."""
    (here / "fit.py").write_text(PLAIN, "utf-8")
    (here / "empty.py").write_text("x = 1\n", "utf-8")
    (here / "notebook.ipynb").write_text("{}", "utf-8")
    (here / "folder").mkdir()
    assert call(["init", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "jobs").exists()


def test_lint_reads_a_script_in_its_own_encoding(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The findings are those of the file, not of its text in another encoding."""
    (here / "train.py").write_bytes(b"# coding: cp1252\nname = '\xc1'\n" + PLAIN.encode())
    assert 0 == call(["init", "train.py", "-y"])
    assert " error" not in capsys.readouterr().out.partition("lint  ")[2].partition("\n")[0]
