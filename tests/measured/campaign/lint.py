"""What `elasticflow lint` says of well-known training scripts: `python -m tests.measured.campaign.lint CLONES`.

Reads the rows of `lint.md` (repository, path, commit, findings, judgement), lints each script at its commit, and tells where
the findings are no longer those of the row. CLONES holds bare clones as `owner+name/repo`, or clones as `owner+name`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from elasticflow.lint.check import lint_source

PAGE = Path(__file__).with_name("lint.md")
_ROW = re.compile(r"^\| (\S+/\S+) \| `(.+?)` \| ([0-9a-f]{10,40}) \| (.+?) \| (.+?) \|$", re.MULTILINE)


class Row(NamedTuple):
    """A script of the table."""

    repository: str
    path: str
    commit: str
    findings: str
    judged: str


def rows() -> list[Row]:
    """Return the rows of the table."""
    return [Row(*match) for match in _ROW.findall(PAGE.read_text("utf-8"))]


def findings_of(content: bytes) -> str:
    """Return the findings about a script as the table has them: warnings and errors, then notes."""
    found = sorted(
        lint_source(content, "train.py"), key=lambda each: (each.severity == "note", each.line or 0)
    )
    marks = [f"{each.code}:{each.line}{' (note)' if each.severity == 'note' else ''}" for each in found]
    return ", ".join(marks) or "none"


def read(clones: Path, row: Row) -> bytes:
    """Return a script at its commit."""
    clone = clones / row.repository.replace("/", "+")
    clone = clone / "repo" if (clone / "repo").is_dir() else clone
    command = ["git", "-C", str(clone), "show", f"{row.commit}:{row.path}"]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=60).stdout


def main() -> int:
    """Print each row whose findings have changed."""
    changed = 0
    for row in rows():
        found = findings_of(read(Path(sys.argv[1]), row))
        if found != row.findings:
            changed += 1
            print(f"{row.repository} {row.path}: {found} (the table has: {row.findings})")
    print(f"{len(rows())} scripts, {changed} with other findings than in the table")
    return min(changed, 1)


if __name__ == "__main__":
    sys.exit(main())
