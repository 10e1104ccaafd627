"""The origins of a launch besides the keys of its job: sources, git, versions, machine."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import subprocess
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.compiler.provenance.job_json import job_from_json
from elasticflow.jobfile.entry_points.calls import calls_of
from elasticflow.python_source.bindings import parse_python
from elasticflow.python_source.modules import CannotTellError, Finder, NoModuleError, source_of
from elasticflow.python_source.syntax import imported_modules
from elasticflow.run_folder import RUNS
from elasticflow.system import machine, records

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.launching import ScriptTable

JOB_FILE = "job file"
_MOST_FILES = 2000
_PACKAGES = ("elasticflow", "torch", "numpy", "safetensors", "fsspec")
_LIMIT_S, _SEARCH_LIMIT_S = 10.0, 3.0
_UNTRACKED_SUFFIXES = (".py", ".toml")
_MOST_UNTRACKED, _LARGEST_UNTRACKED = 1000, 1 << 20
_MOST_CHANGED = 50  # recorded names
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


JOB_JSON = "job.json"
ENVIRONMENT_JSON = "environment.json"  # beside it: facts that only workers know


@dataclass(frozen=True)
class Origins:
    """The origins of a launch; a compiled folder has only its sources.

    Attributes:
        sources: The job's own files by path from the project's root.
        git: State of the checkout; None outside of git, or if unknown.
        versions: Versions of Python and of every distribution that is known to take part.
        machine: The machine that began the launch; empty if unknown.
        launch_id: Unique on all machines; empty for a compiled folder.
    """

    sources: Mapping[str, SourceFile]
    git: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    launch_id: str = ""

    @property
    def code(self) -> dict[str, str]:
        """SHA-256 of every file except the job files, by path, which is the same on all machines of a run."""
        return {name: each.sha256 for name, each in self.sources.items() if JOB_FILE not in each.roles}

    def to_json(self) -> Mapping[str, Any]:
        """Return the fields of job.json and JOB.json."""
        sources = {
            name: {"sha256": each.sha256, "roles": list(each.roles)} for name, each in self.sources.items()
        }
        if not self.launch_id:
            return {"sources": sources}
        return {
            "launch_id": self.launch_id,
            "sources": sources,
            "git": None if self.git is None else dict(self.git),
            "versions": dict(self.versions),
            "machine": dict(self.machine),
        }


class Made(NamedTuple):
    """A job and the origins of a launch of it."""

    job: Job
    origins: Origins


@dataclass(frozen=True)
class WorkerEnvironment:
    """The report of a launch's workers, as in environment.json.

    Attributes:
        files: SHA-256 of each imported file of the job's own code, by path from the project's root.
        versions: Version of every imported distribution.
    """

    files: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def origins_now(
    job: Job, project_root: Path, job_files: Sequence[str], launch_id: str, before: Origins | None = None
) -> Origins:
    """Return the origins of a launch that begins now on this machine.

    Args:
        job_files: The job file and the files it extends, from the root.
        before: Origins of the launch before, whose reported files and packages are examined again.
    """
    sources = own_sources(job, project_root, job_files)
    earlier = {} if before is None else before.sources
    for name, file in earlier.items():
        digest = digest_of(project_root / name)
        if name not in sources and digest is not None:
            sources[name] = SourceFile(digest, file.roles)
    return Origins(
        dict(sorted(sources.items())),
        git_state(project_root),
        versions(() if before is None else before.versions),
        machine.facts(),
        launch_id,
    )


def made_from(record: Mapping[str, Any]) -> Made:
    """Return the content of job.json or JOB.json; fields that an older record lacks are empty.

    Raises:
        KeyError, TypeError, ValueError: *record* is no such record.
    """
    sources = {
        name: SourceFile(str(each["sha256"]), tuple(map(str, each["roles"])))
        for name, each in _object(record, "sources").items()
    }
    origins = Origins(
        sources,
        None if record.get("git") is None else _object(record, "git"),
        {name: str(version) for name, version in _object(record, "versions").items()},
        _object(record, "machine"),
        str(record.get("launch_id", "")),
    )
    return Made(job_from_json(_object({"job": record["job"]}, "job")), origins)


def _object(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key, {})
    if not isinstance(value, dict):
        raise TypeError(f"{key} is no object")
    return value


def with_environment(made: Made, folder: Path) -> Made:
    """Return *made* extended by the workers' report in the launch folder *folder*."""
    reported = environment_of(folder)
    imported = {name: SourceFile(digest, ("imported",)) for name, digest in reported.files.items()}
    origins = replace(
        made.origins,
        sources={**imported, **made.origins.sources},
        versions={**made.origins.versions, **reported.versions},
    )
    return Made(made.job, origins)


def environment_of(folder: Path) -> WorkerEnvironment:
    """Return the workers' report in the launch folder *folder*; empty if it is absent or damaged."""
    record = records.read(folder / ENVIRONMENT_JSON)
    if not isinstance(record, dict):
        return WorkerEnvironment()
    files, versions, datasets = (record.get(key, {}) for key in ("files", "versions", "datasets"))
    if not _has_values(files, str) or not _has_values(versions, str):
        return WorkerEnvironment()
    return WorkerEnvironment(files, versions, datasets if _has_values(datasets, dict) else {})


def _has_values(table: object, kind: type) -> bool:
    return isinstance(table, dict) and all(isinstance(value, kind) for value in table.values())


def versions(names: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of Python, of the packages that always take part and of *names*, without absent packages."""
    by_name = {"python": platform.python_version()}
    for package in dict.fromkeys((*_PACKAGES, *names)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            by_name[package] = metadata.version(package)
    return by_name


def versions_of_modules(modules: Iterable[str]) -> dict[str, str]:
    """Return the version of every distribution of the top-level *modules*; takes a tenth of a second."""
    owners = metadata.packages_distributions()
    return versions(sorted({name for module in modules for name in owners.get(module, ())}))


def git_state(project_root: Path) -> Mapping[str, Any] | None:
    """Return the state of the project's checkout; None outside of git or without git.

    `patch` is the SHA-256 over the differences from the commit, untracked sources included; None if there are none.
    The patch itself is not recorded: it may hold anything.
    """
    head = _git(project_root, "rev-parse", "HEAD", "--abbrev-ref", "HEAD")
    if head is None:
        return None
    commit, branch = head.splitlines()[:2]
    status = _git(project_root, "status", "--porcelain", "-z", "--untracked-files=no")
    changed = sorted(entry[3:] for entry in (status or "").split("\0") if entry[2:3] == " ")
    untracked = _untracked(project_root)
    return {
        "commit": commit,
        "branch": None if branch == "HEAD" else branch,
        "is_clean": status == "",
        "changed": changed[:_MOST_CHANGED],
        "patch": _patch(project_root, untracked) if changed or untracked else None,
    }


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if the file cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _untracked(project_root: Path) -> list[str]:
    """Return untracked sources of the project, except in run folders, which hold many generated train.py files."""
    patterns = [f":(exclude){RUNS}/", *(f"*{suffix}" for suffix in _UNTRACKED_SUFFIXES)]
    arguments = ("ls-files", "--others", "--exclude-standard", "-z", "--", *patterns)
    # git may search through all data in the folder.
    names = _git(project_root, *arguments, limit_s=_SEARCH_LIMIT_S) or ""
    return sorted(name for name in names.split("\0") if name)[:_MOST_UNTRACKED]


def _patch(project_root: Path, untracked: list[str]) -> str | None:
    """Return the digest of the diff, read piece by piece, as the diff may be as large as the checkout."""
    digest = hashlib.sha256()
    options = ("--binary", "--no-ext-diff", "--no-textconv", "--no-color")
    argv = ["git", "-C", str(project_root), "diff", "HEAD", *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        timer = threading.Timer(_LIMIT_S, process.kill)
        timer.start()
        assert process.stdout is not None
        while piece := process.stdout.read(1 << 20):
            digest.update(piece)
        timer.cancel()
    if process.returncode != 0:
        return None
    for name in untracked:
        path = project_root / name
        if path.is_file() and path.stat().st_size <= _LARGEST_UNTRACKED:
            digest.update(f"{name}\0{digest_of(path)}\0".encode())
    return digest.hexdigest()


def _git(folder: Path, *arguments: str, limit_s: float = _LIMIT_S) -> str | None:
    argv = ["git", "-C", str(folder), *arguments]
    try:
        # Names of files may be any bytes; a record holds them as far as they are UTF-8.
        done = subprocess.run(
            argv, capture_output=True, encoding="utf-8", errors="replace", timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
