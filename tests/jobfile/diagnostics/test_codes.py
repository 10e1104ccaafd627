"""Every code is explained on the page of codes, and each example there is what it says."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tomli

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.codes import CODES_PAGE, code_groups, explanation_of, titles
from elasticflow.jobfile.load import load_job

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
TABLES = {
    "job": '[job]\nname = "x"\n',
    "model": '[model]\nentry = "examples.mnist:Net"\nloss = "torch.nn.functional:cross_entropy"\n',
    "optimizer": '[optimizer]\nentry = "torch.optim:AdamW"\n',
    "dataset": '[dataset]\nentry = "examples.mnist:digits"\nargs = { split = "train" }\nglobal_batch_size = 64\n',
    "train": "[train]\nepochs = 5\n",
}
# What only running code shows: `--deep` has tests of its own, and nothing tells whether an order is the same each time.
# Scripts (EF6) have theirs in tests/lint.
ONLY_RUNNING = {codes.NOT_CHECKED, codes.STAGING_MEMORY} | {code for code in titles() if code >= "EF500"}
Found = set[tuple[str, str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the examples and a good job, which is the current one."""
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("mnist", "base"):
        (tmp_path / "jobs" / f"{name}.toml").write_text("\n".join(TABLES.values()), "utf-8")
    sweep = "\n".join([*TABLES.values(), "[matrix.axes]\noptimizer.args.lr = [0.1, 0.2]\n"])
    (tmp_path / "jobs" / "sweep.toml").write_text(sweep, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found_in(text: str, *flags: str, raw: bytes | None = None) -> Found:
    """Return code and severity of each finding about a job file of this text."""
    Path("jobs/job.toml").write_bytes(text.encode() if raw is None else raw)
    return {(each.code, each.severity) for each in load_job(Path("jobs/job.toml"), flags).diagnostics}


def lines_of_a_job(text: str) -> Found:
    """Put some tables of a good job in the place of its own."""
    if text.startswith("elasticflow "):
        return command(text)
    others = [table for name, table in TABLES.items() if name not in tomli.loads(text)]
    return found_in("\n".join([text, *others]))


def command(text: str) -> Found:
    """Check the file that a command names, with its flags."""
    words = shlex.split(text)
    overrides = [word for before, word in pairwise(words) if before == "--set"]
    file = next(word for word in words if word.endswith(".toml"))
    return {(each.code, each.severity) for each in load_job(Path(file), overrides).diagnostics}


def flags(text: str) -> Found:
    """Give each `--set` to a good job."""
    return found_in(
        "\n".join(TABLES.values()),
        *(each.strip(" '") for each in re.split("--set ", text)[1:] if "epochs=" not in each or "=3" in each),
    )


def module(text: str) -> Found:
    """Name what a module defines as a dataset."""
    Path("shop.py").write_text(f"from torch.utils.data import Dataset, IterableDataset\n{text}\n", "utf-8")
    name = re.findall(r"(?:def|class) (\w+)", text)[0]
    return lines_of_a_job(f'[dataset]\nentry = "shop:{name}"\nargs = {{ }}\nglobal_batch_size = 64')


def function(text: str) -> Found:
    """Name a function of one argument as a dataset."""
    return {each for each in module(text) if each[0] != codes.BAD_ARGUMENT}


def first_line(text: str) -> Found:
    """Begin a good job with a line."""
    return found_in(text + "\n" + "\n".join(TABLES.values()))


def model_keys(text: str) -> Found:
    """Write keys where they belong."""
    entry, compiled = text.split("\n")
    loss = 'loss = "torch.nn.functional:cross_entropy"'
    return (
        lines_of_a_job(f"[model]\n{entry}\n{loss}\n[train]\nepochs = 5\n{compiled}")
        if '"' in entry
        else found_in(text)
    )


def bytes_of(text: str) -> Found:
    """Write a name of these bytes."""
    line = text.partition("  #")[0].encode().decode("unicode_escape").encode("latin-1")
    return found_in("", raw=b"[job]\n" + line.replace(b"caf", b"x") + b"\n") if b"\xc3" not in line else set()


HOW: dict[str, Callable[[str], Found]] = {
    codes.NOT_UTF8: bytes_of,
    codes.NOT_TOML: model_keys,
    codes.BAD_SET: flags,
    codes.EXTENDS: first_line,
    codes.NO_LENGTH: module,
    codes.UNREADABLE_MODULE: function,
    codes.CANNOT_TELL: function,
}
CHECKED = sorted(set(titles()) - ONLY_RUNNING)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("code", CHECKED)
def test_explained_examples_are_what_they_say(code: str) -> None:
    """Each bad example gives its own code; each good one gives neither that nor any error."""
    each = explanation_of(code)
    assert each is not None
    assert each.bad, "an example says more than a sentence"
    assert each.good
    assert code in {found for found, _ in HOW.get(code, lines_of_a_job)(each.bad)}
    after = HOW.get(code, lines_of_a_job)(each.good)
    assert code not in {found for found, _ in after}
    assert "error" not in {severity for _, severity in after}, after


def test_every_code_is_explained() -> None:
    """The page lists each code there is, in order and below the heading of its group; no number is used twice."""
    known = [value for name, value in vars(codes).items() if name.isupper() and isinstance(value, str)]
    assert sorted(known) == list(titles())
    assert [{code[:3] for code in group} for group in code_groups().values()] == [
        {f"EF{n}"} for n in range(7)
    ]


def test_every_code_has_its_section() -> None:
    """After the lists come the sections, in the same order and under the same titles, and nothing else."""
    headings = re.findall(r"^### (.+)\n\n\*\*(.+)\*\*$", CODES_PAGE.read_text("utf-8"), re.MULTILINE)
    assert headings == list(titles().items())
    for code, title in headings:
        section = explanation_of(code)
        assert section is not None
        assert section.title == title
        assert section.markdown.count("```") == 4
        assert section.markdown.endswith(f"Good:\n\n```\n{section.good}\n```")
    assert explanation_of("EF100") is None
