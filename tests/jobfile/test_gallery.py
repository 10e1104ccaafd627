"""Wrong job files and what `validate` says about each, word for word.

After a change of wording: `python tests/jobfile/test_gallery.py` writes the expected texts again; read the diff.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from elasticflow.jobfile.diagnostics.render_text import Format, render
from elasticflow.jobfile.load import load_job

GALLERY = Path(__file__).parent / "gallery"
CASES = sorted(path.stem for path in (GALLERY / "jobs").glob("*.toml"))


CONCISE = "concise.txt"


def said(name: str, style: Format = "full") -> str:
    """Return what is said about one case, seen from the gallery's folder."""
    loaded = load_job(Path("jobs") / f"{name}.toml")
    text = render([each for each in loaded.diagnostics if each.severity != "note"], style) + "\n"
    return re.sub(r"\S*/site-packages/(\S+):\d+", r"site-packages/\1", text)


@pytest.mark.parametrize("name", CASES)
def test_wrong_job_file_is_explained_in_these_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wrong job file gets exactly the expected text, which a newcomer can act on."""
    monkeypatch.chdir(GALLERY)
    expected = (GALLERY / "expected" / f"{name}.txt").read_text("utf-8")
    assert expected == said(name)


def test_wrong_job_files_are_explained_in_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in the format for editors: one line for each finding."""
    monkeypatch.chdir(GALLERY)
    assert (GALLERY / CONCISE).read_text("utf-8") == "".join(said(name, "concise") for name in CASES)


def test_gallery_has_no_leftovers() -> None:
    """Every expected text has its job file."""
    assert sorted(path.stem for path in (GALLERY / "expected").glob("*.txt")) == CASES


def write_expected() -> None:
    """Write all expected texts as the code says them now."""
    os.chdir(GALLERY)
    folder = GALLERY / "expected"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.txt"):
        old.unlink()
    for name in CASES:
        (folder / f"{name}.txt").write_text(said(name), "utf-8")
    Path(CONCISE).write_text("".join(said(name, "concise") for name in CASES), "utf-8")


if __name__ == "__main__":
    write_expected()
