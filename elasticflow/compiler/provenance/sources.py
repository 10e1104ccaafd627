"""Finds the files of the job's own code that take part in it, by reading imports; nothing is imported."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.compiler.provenance.environment import digest_of
from elasticflow.jobfile.entry_points.calls import calls_of
from elasticflow.python_source.bindings import parse_python
from elasticflow.python_source.modules import CannotTellError, Finder, NoModuleError, source_of
from elasticflow.python_source.syntax import imported_modules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.launching import ScriptTable

JOB_FILE = "job file"
_MOST_FILES = 2000
# A role is the table that names the factory, except for these keys.
_ROLES = {
    ("model", "loss"): "loss",
    ("model", "step"): "step",
    ("model", "loss_count"): "loss",
    ("dataset", "prepare"): "prepare",
    ("snapshots", "include"): "state",
}


class SourceFile(NamedTuple):
    """A file that takes part in a job.

    Attributes:
        roles: Parts of the job that import the file: `model`, `loss`, `dataset` ...; `job file`; or `imported`, by the
            workers only.
    """

    sha256: str
    roles: tuple[str, ...]


def own_sources(job: Job, project_root: Path, job_files: Sequence[str]) -> dict[str, SourceFile]:
    """Return the job's files and every own module that its factories' modules import, by path from the root.

    Imports under a name made at run time are missing; workers report them.
    """
    own = () if job.script is None else (job.script.folder,)
    walk = _Walk(Finder.of_job(project_root, (*own, *job.job.path)))
    roles: dict[Path, set[str]] = defaultdict(set)
    for use in calls_of(job):
        first, second, *_ = use.path
        role = _ROLES.get((str(first), str(second)), str(first))
        for file in walk.reached(use.text.partition(":")[0]):
            roles[file].add(role)
    if job.script is not None:
        for file in _of_script(job.script, project_root, walk):
            roles[file].add("script")
    files = {relative(file, project_root): (file, tuple(sorted(of))) for file, of in roles.items()}
    files |= {name: (project_root / name, (JOB_FILE,)) for name in job_files}
    return {
        name: SourceFile(digest, of)
        for name, (file, of) in sorted(files.items())
        if (digest := digest_of(file)) is not None
    }


def _of_script(script: ScriptTable, project_root: Path, walk: _Walk) -> set[Path]:
    """Return the script and the files that it imports from its own search path."""
    if script.entry is not None:
        file = project_root / script.entry
        return {file, *walk.reached(file.stem)}
    name = script.module or ""
    return walk.reached(name) | walk.reached(f"{name}.__main__")


def relative(file: Path, project_root: Path) -> str:
    """Return a file's path from the project's root, with `..` if the file lies outside."""
    return Path(os.path.relpath(file, project_root)).as_posix()


class _Walk:
    """Follows imports from module to module on the job's own path."""

    def __init__(self, finder: Finder) -> None:
        self._finder = finder
        self._next: dict[str, list[str]] = {}  # module -> its imports
        self._files: dict[str, Path | None] = {}

    def reached(self, name: str) -> set[Path]:
        """Return the job's own files that the import of the module *name* runs."""
        seen: set[str] = set()
        waiting = [name]
        while waiting and len(seen) < _MOST_FILES:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                if module not in self._next:
                    self._next[module] = self._imports(module)
                waiting += self._next[module]
        return {file for module in seen if (file := self._files.get(module)) is not None}

    def _imports(self, name: str) -> list[str]:
        package, _, _ = name.rpartition(".")
        top = name.partition(".")[0]
        if top == "elasticflow" or not self._finder.has_own(top):
            return []
        above = [package] if package else []  # importing a.b runs a
        try:
            module = self._finder.find(name)
            self._files[name] = module.file
            statements = parse_python(source_of(module))
        except (CannotTellError, NoModuleError, SyntaxError):
            return above
        nodes = (node for statement in statements for node in ast.walk(statement))
        return above + [imported for node in nodes for imported in imported_modules(node, module)]
