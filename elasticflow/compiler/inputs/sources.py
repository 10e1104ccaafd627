"""Which files of the job's own code take part in it, found by reading imports; nothing is imported."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.compiler.inputs.provenance import digest_of
from elasticflow.jobfile.entry_points.calls import entry_calls
from elasticflow.jobfile.python_source.bindings import parse_python
from elasticflow.jobfile.python_source.modules import (
    CannotTellError,
    Finder,
    Module,
    NoModuleError,
    installed_folders,
    source_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.jobfile.tables.job import Job

JOB_FILE = "job file"
_MOST_FILES = 2000
# A role is the table that names the factory, but for these keys.
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
        sha256: Of its bytes.
        roles: What reaches it: `model`, `loss`, `dataset` ...; `job file`; or `imported`, by the workers only.
    """

    sha256: str
    roles: tuple[str, ...]


def own_sources(job: Job, project_root: Path, job_files: Sequence[str]) -> dict[str, SourceFile]:
    """Return the job's files and every module of its own that its factories' modules import, by path from the root.

    What is imported under a name made at run time is not among them; workers report that.
    """
    own = tuple(project_root / part for part in job.job.path)
    walk = _Walk(own)
    roles: dict[Path, set[str]] = defaultdict(set)
    for use in entry_calls(job.model_dump()):
        first, second, *_ = use.path
        role = _ROLES.get((str(first), str(second)), str(first))
        for file in walk.reached(use.text.partition(":")[0]):
            roles[file].add(role)
    found = {relative(file, project_root): (file, tuple(sorted(of))) for file, of in roles.items()}
    found |= {name: (project_root / name, (JOB_FILE,)) for name in job_files}
    return {
        name: SourceFile(digest, of)
        for name, (file, of) in sorted(found.items())
        if (digest := digest_of(file)) is not None
    }


def relative(file: Path, project_root: Path) -> str:
    """Return a file's path from the project's root, with `..` where it lies beside it."""
    return Path(os.path.relpath(file, project_root)).as_posix()


class _Walk:
    """Follows imports from module to module on the job's own path."""

    def __init__(self, own: tuple[Path, ...]) -> None:
        self._own = own
        self._finder = Finder(own, installed_folders())
        self._next: dict[str, list[str]] = {}  # module -> what it imports
        self._files: dict[str, Path | None] = {}

    def reached(self, name: str) -> set[Path]:
        """Return the files that importing the module *name* runs, as far as they are the job's own."""
        seen: set[str] = set()
        waiting = [name]
        while waiting and len(seen) < _MOST_FILES:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                waiting += self._imports(each)
        return {file for each in seen if (file := self._files.get(each)) is not None}

    def _imports(self, name: str) -> list[str]:
        if name not in self._next:
            self._next[name] = self._look(name)
        return self._next[name]

    def _look(self, name: str) -> list[str]:
        package, _, _ = name.rpartition(".")
        top = name.partition(".")[0]
        is_here = any((place / top).is_dir() or (place / f"{top}.py").is_file() for place in self._own)
        if not is_here or top == "elasticflow":
            return []
        above = [package] if package else []  # importing a.b runs a
        try:
            module = self._finder.find(name)
            self._files[name] = module.file
            statements = parse_python(source_of(module))
        except (CannotTellError, NoModuleError, SyntaxError):
            return above
        return above + [each for statement in statements for each in _imported(statement, module)]


def _imported(statement: ast.stmt, module: Module) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                around = module.package.split(".")
                base = ".".join([*around[: len(around) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
