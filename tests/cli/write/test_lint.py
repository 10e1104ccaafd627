"""`elasticflow lint` as it is typed: exit codes, formats, folders, and what it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from elasticflow.cli.main import group
from tests.lint.loops import PLAIN

if TYPE_CHECKING:
    from pathlib import Path

HANGS = "import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n"
IN_PLACE = "import torch\nfor e in range(9):\n    torch.save(model.state_dict(), 'x.pt')\n"
UNUSED = "from torch.nn.parallel import DistributedDataParallel as D\nD(m, find_unused_parameters=True)\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty project, which is the current folder."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lint(*arguments: str) -> Result:
    """Run the command in this process."""
    return CliRunner().invoke(group, ["lint", *arguments], standalone_mode=False)


def test_exit_codes(here: Path) -> None:
    """0 without errors, 1 with; warnings count with --strict, notes never."""
    for name, text in (("hangs.py", HANGS), ("place.py", IN_PLACE), ("unused.py", UNUSED)):
        (here / name).write_text(text, "utf-8")

    assert lint("hangs.py").return_value == 1
    assert lint("place.py").return_value == 0
    assert lint("place.py", "--strict").return_value == 1
    assert lint("unused.py", "--strict").return_value == 0
    assert lint("hangs.py", "--ignore", "EF63").return_value == 0


def test_a_person_sees_line_carets_and_remedy(here: Path) -> None:
    """And where to read more."""
    (here / "train.py").write_text(HANGS, "utf-8")
    text = lint().output
    assert "error[EF631]" in text
    assert "--> train.py:3:5" in text
    assert "3 |     dist.barrier()\n  |     ^^^^^^^^^^^^^^\n" in text
    assert "= help: " in text
    assert "1 file checked: 1 error\n`elasticflow guide EF631`" in text


def test_machines_get_what_validate_gives_them(here: Path) -> None:
    """JSON with notes, workflow commands, SARIF with the rules explained."""
    (here / "train.py").write_text(HANGS + UNUSED, "utf-8")
    [hangs, unused] = json.loads(lint("--format", "json").output)
    assert (hangs["code"], hangs["line"], hangs["column"], hangs["end_column"]) == ("EF631", 3, 5, 19)
    assert unused["severity"] == "note"
    assert lint("--format", "github").output.startswith(
        "::error title=elasticflow (EF631),file=train.py,line=3"
    )
    [run] = json.loads(lint("--format", "sarif").output)["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["EF631", "EF641"]


def test_notes_are_shown_when_they_are_selected(here: Path) -> None:
    """By their code, by its beginning, or with all."""
    (here / "train.py").write_text(UNUSED, "utf-8")
    assert "note[EF641]" not in lint().output
    assert "note[EF641]" not in lint("--select", "EF6").output
    for words in ("EF641", "EF601,EF64", "all", "ef641"):
        assert "note[EF641]" in lint("--select", words).output


def test_the_end_says_what_was_looked_for_and_what_reading_cannot_tell(here: Path) -> None:
    """By subject, with what was found; no word that nothing can go wrong."""
    (here / "train.py").write_text(HANGS + UNUSED, "utf-8")
    text = lint("train.py").output
    assert "  EF631 to EF633  collectives that some ranks do not reach " in text
    assert "1 EF631\n" in text
    assert "1 EF641 (note)\n" in text
    assert re.search(r"EF611 to EF618  checkpoints: .* none found\n", text)
    assert "reading cannot tell" in text
    (here / "clean.py").write_text("import torch\n", "utf-8")
    text = lint("clean.py").output
    assert "1 file checked: nothing found" in text
    assert text.count("none found") == 5
    text = lint("clean.py", "--select", "EF63").output
    assert "EF631 to EF633" in text
    assert "EF611" not in text


def test_a_folder_stands_for_its_training_scripts(here: Path) -> None:
    """Each file once; others are counted and not read."""
    (here / "src").mkdir()
    (here / "src" / "train.py").write_text(HANGS, "utf-8")
    (here / "src" / "old.py").write_text("print 'of another age'\n", "utf-8")
    text = lint("src", "src/train.py", "--format", "concise").output
    assert text.count("EF631") == 1
    assert "1 file checked: 1 error (1 other does not import torch)" in re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_wrong_usage_is_told(here: Path) -> None:
    """An unknown code, and a folder without Python."""
    assert "there is no code" in str(lint("--select", "EF7", ".").exception)
    assert "there is no Python file" in str(lint(".").exception)


@pytest.mark.integration
def test_a_process_of_its_own_imports_little(here: Path) -> None:
    """Neither torch nor pydantic nor rich."""
    (here / "train.py").write_text(HANGS, "utf-8")
    code = (
        "import sys\n"
        "from elasticflow.cli.main import call\n"
        "code = call(['lint', 'train.py'])\n"
        "late = {'torch', 'pydantic', 'rich', 'numpy', 'structlog'} & set(sys.modules)\n"
        "print(code, sorted(late))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "1 []"


def test_one_script_ends_with_its_form_and_the_example_to_follow(here: Path) -> None:
    """Its rung, the lines of the next one, the command that prints the example; a folder has no such end."""
    (here / "train.py").write_text(PLAIN, "utf-8")
    text = lint("train.py").output
    assert "rung 0  a loop on torch's DistributedDataParallel" in text
    assert "run = elasticflow.join()" in text
    assert "`elasticflow guide --template function`" in text
    for arguments in (["."], ["train.py", "--format", "concise"], ["train.py", "--format", "json"]):
        assert "rung 0" not in lint(*arguments).output
    (here / "joined.py").write_text("import elasticflow as ef, torch\nrun = ef.join()\n", "utf-8")
    assert "rung 1  a loop on elasticflow.join" in lint("joined.py").output
    (here / "models.py").write_text("import torch\n", "utf-8")
    assert "rung" not in lint("models.py").output
