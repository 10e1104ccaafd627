"""`elasticflow adopt` as it is typed: the patch, what is said beside it, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from tests.adopt.scripts import PLAIN, TRAINER

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty project, which is the current folder."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_patch_alone_is_standard_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What there is to know is on standard error; the script is as it was."""
    (here / "train.py").write_text(TRAINER, "utf-8")
    assert call(["adopt", "--diff", "train.py"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("--- a/train.py\n+++ b/train.py\n@@")
    assert "note  line 62: torch.save stays as it is" in told.err
    assert (here / "train.py").read_text() == TRAINER


def test_without_diff_it_is_said_what_would_change(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How many lines, what to know, and how to go on."""
    (here / "train.py").write_text(PLAIN, "utf-8")
    assert call(["adopt", "train.py"]) == 0
    told = capsys.readouterr().out
    assert "DistributedDataParallel: rung 0" in told
    assert "21 lines more, 5 less" in told
    assert "elasticflow adopt --diff train.py | git apply" in told


def test_a_name_that_git_knows(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is the one from the working folder, however it was typed; elsewhere the file's name."""
    (here / "src").mkdir()
    (here / "src" / "train.py").write_text(PLAIN, "utf-8")
    for name in ("src/train.py", "./src/../src/train.py", str(here / "src" / "train.py")):
        call(["adopt", "--diff", name])
        assert capsys.readouterr().out.startswith("--- a/src/train.py\n")
    (here / "other").mkdir()
    monkeypatch.chdir(here / "other")
    call(["adopt", "--diff", "../src/train.py"])
    assert capsys.readouterr().out.startswith("--- a/train.py\n")


def test_newlines_of_windows_stay(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line of the patch ends as the file's do."""
    (here / "train.py").write_bytes(PLAIN.replace("\n", "\r\n").encode())
    assert call(["adopt", "--diff", "train.py"]) == 0
    lines = capsys.readouterr().out.split("\n")[3:-1]
    assert all(line.endswith("\r") or line.startswith("@@") for line in lines)


def test_no_certain_patch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, nothing on standard output: the line, the reason, the remedy, and what to write by hand."""
    (here / "train.py").write_text(PLAIN.replace("seen += 1", "break"), "utf-8")
    assert call(["adopt", "--diff", "train.py"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "train.py:50: `break` in the loop over batches" in told.err
    assert "help: let every batch come to its end" in told.err
    assert "run.keep(model=model, optimizer=optimizer)" in told.err


def test_a_script_that_has_joined(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There is nothing to do, and an empty patch."""
    (here / "train.py").write_text("import torch\nimport elasticflow as ef\n\nrun = ef.join()\n", "utf-8")
    assert call(["adopt", "--diff", "train.py"]) == 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "train.py:4: on rung 1 already" in told.err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.py", None, "none.py cannot be read: No such file"),
        ("train.ipynb", b"{}", "is a notebook"),
        ("train.py", b"import torch\nx = (\n", "train.py:2: no Python"),
        ("train.py", b"print(1)\n", "shows no training"),
        ("train.py", b"# \xff\nimport torch\n", "train.py:1: this is no UTF-8"),
        ("train.py", b"import torch\r\nx = 1\n", "end in different ways"),
        (".", None, ". is a folder"),
    ],
)
def test_what_is_no_script(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, said: str
) -> None:
    """Exit code 2, with the place, the reason and a remedy."""
    if content is not None:
        (here / name).write_bytes(content)
    assert call(["adopt", name]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "help: " in told


@pytest.mark.usefixtures("real_processes")
def test_torch_and_the_script_are_not_imported(here: Path) -> None:
    """Reading is enough."""
    (here / "train.py").write_text(f"{TRAINER}\nraise SystemExit('imported')\n", "utf-8")
    (here / "train.py").write_text(TRAINER, "utf-8")
    code = (
        "import sys; from elasticflow.cli.main import call; "
        "code = call(['adopt', 'train.py']); sys.exit(code or 'torch' in sys.modules or 'train' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=here, check=True, stdout=subprocess.DEVNULL, timeout=60)
