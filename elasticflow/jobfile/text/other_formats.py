"""A text of another format that was given as a job file."""

from __future__ import annotations

import re

_INIT = (
    "tables have their names in brackets, keys are written key = value: `elasticflow init` writes such a file"
)
_HEADER = re.compile(r"\s*\[[\w.\-\" ]+\]")
_PYTHON = re.compile(r"\s*(from \w[\w.]* import |import \w|def \w+\(|class \w+[(:])")
_YAML = re.compile(r"\s*(-\s+)?[\w.\-\"']+:(\s|$)|\s*-\s|---\s*$")


def other_format(text: str) -> tuple[str, str] | None:
    """Return message and help for a text of another format; None for a text that seems to be TOML."""
    if text.lstrip().startswith("{"):
        return "this is JSON, and a job file is TOML", _INIT
    lines = [each for each in text.split("\n") if each.strip() and not each.lstrip().startswith("#")]
    if any(map(_HEADER.match, lines)):
        return None
    if sum(1 for each in lines if _PYTHON.match(each)) > 1:
        remedy = "name the job file that trains with it: `elasticflow init FILE.py` writes one"
        return "this is Python, and a job file is TOML", remedy
    if text.startswith("#!"):
        remedy = "a job file says what is trained: `elasticflow init` writes one; `elasticflow submit slurm JOB` the script of Slurm"
        return "this is a script, and a job file is TOML", remedy
    if 2 * sum(1 for each in lines if _YAML.match(each)) > len(lines):
        return "this is YAML, and a job file is TOML", _INIT
    return None
