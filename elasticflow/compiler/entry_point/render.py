"""Job -> train.py: the template's marked lines filled in with this job's values.

Markers of the templates, which are themselves valid Python with sample values:
in `CODE  # = key`, what stands after `= ` or `return ` is replaced by values[key] (without these, all of it; None drops
the line; a comment after the key stays);
code that ends with `(` goes on to the line of the closing bracket;
in `from module import a, b  # = import.key`, names that the text does not use are left out, and the line without any;
`# if: flag`, `# if: not flag` and `# each: list` open a block that ends at `# end`.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from elasticflow.compiler.entry_point.factory_calls import CallForms
from elasticflow.compiler.entry_point.source_code import layout
from elasticflow.compiler.entry_point.values import Values, values_of, values_of_factories

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from elasticflow.compiler.entry_point.values import Line
    from elasticflow.jobfile.tables.job import Job

_MARKED = re.compile(r"(?P<margin> *)(?P<code>.*?)  # = (?P<key>[a-z0-9_.]+)(?P<comment>  # .*)?")
_IMPORT = re.compile(r"(?P<start>(?:from \S+ )?import )(?P<names>.*)  # = import\.\w+")
_BEFORE = re.compile(r"(?:return |[^=(]+ = )?")  # stands before a value
_OPEN = re.compile(r" *# (?P<kind>if|each): (?P<negated>not )?(?P<key>[a-z0-9_.]+)")
_END = re.compile(r" *# end")


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
        job: The resolved job.
        digest: Its digest.
        job_file: Where it was declared, relative to the project root.
        root: The project root as seen from the launch folder, like `../..`.
        overrides: The `--set` values it was resolved with.
        case: The case of the job file's [matrix] that it is.
        forms: How its factories are called; None: as most are.

    Raises:
        JobRefusedError: an argument that has no Python literal.
    """
    options = [*([] if case is None else [f"--case={case}"]), *(f"--set={text}" for text in overrides)]
    again = shlex.join(["elasticflow", "compile", job_file, *options])
    lines = template("train.py").splitlines()
    values = values_of(job, root=root, digest=digest, forms=forms or CallForms(), taken=_names_in("train.py"))
    values.code |= {
        "header": _in_docstring(f"Made by elasticflow from {job_file} (job digest {digest[:16]})."),
        "again": _in_docstring(f"Make it again:          {again} -o DIR"),
    }
    lines[0] = f'"""Train the job `{job.job.name}`.'
    return _text(lines, values)


def render_factories(job: Job, *, root: str, forms: CallForms) -> str:
    """Return the text of a module with a function for each factory of the job, which calls it as train.py does.

    Args:
        job: The resolved job.
        root: The project root.
        forms: How its factories are called.

    Raises:
        JobRefusedError: an argument that has no Python literal.
    """
    values = values_of_factories(job, root=root, forms=forms, taken=_names_in("factories.py"))
    return _text(template("factories.py").splitlines(), values)


def template(name: str) -> str:
    """Return the text of a template."""
    return (files("elasticflow.compiler.entry_point") / "templates" / name).read_text(encoding="utf-8")


@cache
def _names_in(name: str) -> frozenset[str]:
    """Return the names that a template gives a meaning to, but for those of the sample job's factories."""
    names: set[str] = set()
    samples: set[str] = set()
    tree = ast.parse(template(name))
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        inner = (node for node in ast.walk(function) if isinstance(node, ast.ImportFrom))
        samples.update(alias.name for node in inner for alias in node.names)
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                names.add(node.id)
            case ast.FunctionDef():
                names.add(node.name)
            case ast.arg():
                names.add(node.arg)
            case ast.alias():
                names.add(node.name)
            case _:
                pass
    return frozenset(names - samples)


def _in_docstring(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _text(lines: Sequence[str], values: Values) -> str:
    filled = list(_filled(lines, values))
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


def _filled(lines: Sequence[str], values: Values) -> Iterator[str]:
    rest = iter(lines)
    for line in rest:
        opening = _OPEN.fullmatch(line)
        if opening is None:
            yield from _line(line, rest, values.code)
            continue
        block = list(_until_end(rest))
        if opening["kind"] == "each":
            for item in values.lists[opening["key"]]:
                yield from _filled(block, Values(code=item))
        elif values.flags[opening["key"]] != bool(opening["negated"]):
            yield from _filled(block, values)


def _until_end(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if _END.fullmatch(line):
            return
        yield line


def _line(line: str, rest: Iterator[str], code: Mapping[str, Line]) -> Iterator[str]:
    marked = _MARKED.fullmatch(line)
    if marked is None or marked["key"].startswith("import."):
        yield line
        return
    if marked["code"].endswith("("):
        closing = marked["margin"] + ")"
        while next(rest) != closing:
            pass
    value = code[marked["key"]]
    if value is None:
        return
    before = _BEFORE.match(marked["code"])
    assert before is not None
    yield layout(value, indent=len(marked["margin"]), before=before[0], after=marked["comment"] or "")
