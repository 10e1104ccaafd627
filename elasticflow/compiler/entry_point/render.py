"""Job -> train.py: the template's marked lines filled in with this job's values.

Markers of the template, which is itself valid Python with sample values:
in `CODE  # = key`, values[key] replaces the text after `= `, or all of CODE if it has no `= `; None drops the line;
a comment after the key stays;
from `from module import a, b  # = import.key`, unused names are removed, and the line if no name is used.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.factories import CallForms
from elasticflow.compiler.entry_point.source_code import layout
from elasticflow.compiler.entry_point.values import values_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from elasticflow.compiler.entry_point.values import Line
    from elasticflow.jobfile.tables.job import Job

_MARKED = re.compile(r"(?P<margin> *)(?P<code>.*?)  # = (?P<key>[a-z0-9_.]+)(?P<comment>  # .*)?")
_IMPORT = re.compile(r"(?P<start>(?:from \S+ )?import )(?P<names>.*)  # = import\.\w+")
_BEFORE = re.compile(r"(?:[^=(]+ = )?")  # the text before a value


def render(
    job: Job,
    *,
    digest: str,
    job_file: str,
    root: str,
    overrides: Sequence[str] = (),
    case: str | None = None,
    forms: CallForms | None = None,
) -> str:
    """Return the text of train.py: the same job gives the same text.

    Args:
        job_file: Path of the job file, relative to the project root.
        root: The project root as seen from the launch folder, like `../..`.
        overrides: The `--set` values that the job was resolved with.
        case: Name of the job's case in the job file's [matrix].
        forms: Forms in which the job's factories are called; None: the usual forms.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    options = [*([] if case is None else [f"--case={case}"]), *(f"--set={text}" for text in overrides)]
    again = shlex.join(["elasticflow", "plan", job_file, *options])
    lines = template().splitlines()
    values = values_of(job, root=root, digest=digest, forms=forms or CallForms(), taken=_names())
    values |= {
        "header": _in_docstring(f"Made by elasticflow from {job_file} (job digest {digest[:16]})."),
        "again": _in_docstring(f"Make it again:          {again} -o DIR"),
    }
    lines[0] = f'"""Train the job `{job.job.name}`.'
    return _text(lines, values)


def render_for_child(job: Job, project_root: Path, forms: CallForms) -> str:
    """Return the text of train.py for a process of this machine that calls its functions but not `main`.

    Raises:
        JobRefusedError: an argument that has no Python literal.
    """
    return render(job, digest="", job_file="", root=str(project_root.resolve()), forms=forms)


def template() -> str:
    """Return the text of the template."""
    return (files("elasticflow.compiler.entry_point") / "templates" / "train.py").read_text(encoding="utf-8")


@cache
def _names() -> frozenset[str]:
    """Return the names that train.py's functions find outside of themselves."""
    names: set[str] = set()
    for node in ast.parse(template()).body:
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.FunctionDef(name=name):
                names.add(name)
            case _:
                pass
    return frozenset(names)


def _in_docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _text(lines: Iterable[str], values: Mapping[str, Line]) -> str:
    filled = [line for marked in lines if (line := _filled(marked, values)) is not None]
    nodes = ast.walk(ast.parse("\n".join(filled)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    return "\n".join(_with_used_imports(filled, used)).rstrip("\n") + "\n"


def _with_used_imports(lines: Sequence[str], used: set[str]) -> Iterator[str]:
    for line in lines:
        statement = _IMPORT.fullmatch(line)
        if statement is None:
            yield line
        elif names := [name for name in statement["names"].split(", ") if name in used]:
            yield f"{statement['start']}{', '.join(names)}"


def _filled(line: str, values: Mapping[str, Line]) -> str | None:
    marked = _MARKED.fullmatch(line)
    if marked is None or marked["key"].startswith("import."):
        return line
    value = values[marked["key"]]
    if value is None:
        return None
    before = _BEFORE.match(marked["code"])
    assert before is not None
    return layout(value, indent=len(marked["margin"]), before=before[0], after=marked["comment"] or "")
