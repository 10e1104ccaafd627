"""Finds packages that a job needs and this machine lacks, by reading imports; nothing is imported."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from elasticflow.errors import JobRefusedError
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
from elasticflow.jobfile.diagnostics.render_text import render
from elasticflow.jobfile.entry_points.calls import calls_of
from elasticflow.python_source.bindings import parse_python
from elasticflow.python_source.modules import (
    CannotTellError,
    Finder,
    Module,
    NoModuleError,
    NotInstalledError,
    file_seen_from_here,
    install_help,
    is_found_by_hooks,
    source_of,
)
from elasticflow.python_source.syntax import imported_modules

if TYPE_CHECKING:
    import ast
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.jobfile.tables.job import Job

_MOST_MODULES = 2000
# A module that changes Python's search path may find modules that are not found here.
_CHANGES_PATH = re.compile(r"\bsys\.(?:path|modules|meta_path)\b|\baddsitedir\b|\bpath_hooks\b|\b__path__\b")


def require_importable(loaded: LoadedJob) -> None:
    """Raise if the job's modules import, when loaded, a package that is not installed on this machine.

    This covers entry points and the unconditional imports of their modules. Imports under a condition, inside a
    function, or after a change of Python's search path are left to the run; torch to `check_torch`.

    Raises:
        JobRefusedError: a package is missing; the message is the rendered diagnostics.
    """
    imports = missing_imports(loaded.job, loaded.project_root)
    if imports is None:
        return
    torch_help = install_help("torch", _finder(loaded.job, loaded.project_root))
    of_entries = [
        each for each in loaded.diagnostics if each.code == codes.NOT_INSTALLED and each.help != torch_help
    ]
    missing: dict[str | None, Diagnostic] = {}  # by remedy
    for each in (*of_entries, *imports):
        message = each.message.replace(" is not checked: ", " cannot be imported: ")
        missing.setdefault(each.help, each._replace(severity="error", message=message))
    if missing:
        raise JobRefusedError(render(list(missing.values())))


def missing_imports(job: Job, project_root: Path) -> list[Diagnostic] | None:
    """Return the missing packages that the modules of the job's factories import, each once.

    None if a module changes Python's search path, so that reading cannot tell.
    """
    finder = _finder(job, project_root)
    missing: dict[str, Diagnostic] = {}
    looked_for = {"torch", "elasticflow", ""}
    waiting = [use.text.partition(":")[0] for use in calls_of(job)]
    seen: set[str] = set()
    while waiting and len(seen) < _MOST_MODULES:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        module = _own_module(finder, name)
        if module is None:
            continue
        waiting += [name.rpartition(".")[0]] if "." in name else []  # importing a.b runs a
        try:
            text = source_of(module)
            statements = parse_python(text)
        except (CannotTellError, SyntaxError):
            continue
        if _CHANGES_PATH.search(text):
            return None
        for statement in statements:
            for imported in imported_modules(statement, module):
                waiting.append(imported)
                top = imported.partition(".")[0]
                if top not in looked_for and _is_missing(finder, top):
                    missing[top] = _diagnostic(module, statement, top, text, finder)
                looked_for.add(top)
    return list(missing.values())


def _finder(job: Job, project_root: Path) -> Finder:
    return Finder.of_job(project_root, job.job.path)


def _own_module(finder: Finder, name: str) -> Module | None:
    if not finder.has_own(name.partition(".")[0]):
        return None
    try:
        module = finder.find(name)
    except (CannotTellError, NoModuleError):
        return None
    return module if module.is_own else None


def _is_missing(finder: Finder, top: str) -> bool:
    if top in sys.stdlib_module_names:
        return False
    try:
        finder.find(top)
    except NotInstalledError:
        return not is_found_by_hooks(top)
    except CannotTellError:
        return False
    return False


def _diagnostic(module: Module, statement: ast.stmt, top: str, text: str, finder: Finder) -> Diagnostic:
    message = f"{module.name} cannot be imported: {top} is not installed here"
    line, column = statement.lineno, statement.col_offset + 1
    excerpt = text.splitlines()[line - 1]
    end = statement.end_col_offset if statement.end_lineno == line else None
    return Diagnostic(
        codes.NOT_INSTALLED,
        "error",
        message,
        file_seen_from_here(module),
        line,
        column,
        line,
        (len(excerpt) if end is None else end) + 1,
        install_help(top, finder),
        excerpt,
    )
