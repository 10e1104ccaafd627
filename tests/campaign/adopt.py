"""What `elasticflow adopt` says of well-known training scripts: `python -m tests.campaign.adopt CLONES`.

Reads the rows of `adopt.md` (repository, path, commit, form, answer, judgement), asks about each script at its commit, and tells
where the answer is no longer that of the row. CLONES holds bare clones as `owner+name/repo`, or clones as `owner+name`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from elasticflow.adopt.edits import unified
from elasticflow.adopt.patch import patched
from elasticflow.adopt.reading.refusal import RefusalError
from elasticflow.lint.script.forms import form_of
from elasticflow.lint.script.script import Script
from tests.campaign import lint

PAGE = Path(__file__).with_name("adopt.md")
_ROW = re.compile(
    r"^\| (\S+/\S+) \| `(.+?)` \| ([0-9a-f]{10,40}) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE
)


class Row(NamedTuple):
    """A script of the table."""

    repository: str
    path: str
    commit: str
    form: str
    answer: str
    judged: str


def rows() -> list[Row]:
    """Return the rows of the table."""
    return [Row(*match) for match in _ROW.findall(PAGE.read_text("utf-8"))]


def answer_of(text: str) -> tuple[str, str]:
    """Return the form of a script, and how many lines a patch adds and takes away, or the line and reason why there is none."""
    form = form_of(Script(text))
    try:
        lines = unified(text, patched(text).text, "train.py").splitlines()[2:]
    except RefusalError as error:
        place = "" if error.reason.line is None else f"{error.reason.line}: "
        return form.kind, f"no: {place}{error.reason.message}"
    added, taken = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    return form.kind, f"patch: +{added} -{taken}"


def main() -> int:
    """Print each row whose answer has changed."""
    changed = 0
    for row in rows():
        content = lint.read(Path(sys.argv[1]), lint.Row(row.repository, row.path, row.commit, "", ""))
        found = answer_of(content.decode().replace("\r\n", "\n"))
        if found != (row.form, row.answer):
            changed += 1
            print(
                f"{row.repository} {row.path}: {' | '.join(found)} (the table has: {row.form} | {row.answer})"
            )
    print(f"{len(rows())} scripts, {changed} changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
