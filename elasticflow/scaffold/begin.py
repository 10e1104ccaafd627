"""From a model file, or from nothing, to the files of a job that runs."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.tables.json_schema import SCHEMA_FILE
from elasticflow.python_source.classes import classes_of
from elasticflow.python_source.definitions import Definition
from elasticflow.python_source.modules import Finder, UnresolvedError
from elasticflow.python_source.resolve import Resolver
from elasticflow.run_folder import RUNS
from elasticflow.scaffold.candidates import (
    Candidate,
    candidates,
    candidates_named,
    method_of,
    trained_together,
)
from elasticflow.scaffold.example import EXAMPLE, MADE_UP
from elasticflow.scaffold.job_text import SCHEMA_NAME, Draft
from elasticflow.scaffold.steps import losses_in
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_MOST_NEIGHBOURS = 100
_RUNS_IGNORED = re.compile(rf"^/?{RUNS}/?\s*$", re.MULTILINE)
PRE_COMMIT = ".pre-commit-config.yaml"
_HOOK = """\
repos:
  - repo: local
    hooks:
      - id: elasticflow-validate
        name: elasticflow validate
        entry: elasticflow validate
        language: system
        types: [toml]
        files: (^|/)jobs/[^/]+\\.toml$|\\.job\\.toml$
"""


class ModuleLocation(NamedTuple):
    """A module by the name a job file gives it.

    Attributes:
        module: Dotted.
        path: The folder of `job.path` that it is found from, relative to the project's root.
    """

    module: str
    path: str


@dataclass(frozen=True)
class Option:
    """A candidate and where it stands.

    Attributes:
        location: Its module.
        candidate: What was found there.
    """

    location: ModuleLocation
    candidate: Candidate

    @property
    def entry(self) -> str:
        """How a job file names it."""
        return f"{self.location.module}:{self.candidate.name}"


def options_in(model_file: Path, root: Path) -> list[Option]:
    """Return what the model's file offers, then the datasets of the files beside it.

    Raises:
        ScaffoldError: the file cannot be read, is no Python, or lies outside of the project.
    """
    location = locate_module(model_file, root)
    options = [
        Option(location, each) for each in _read(model_file, lambda name: _is_module(name, location, root))
    ]
    for path in sorted(model_file.parent.glob("*.py"))[:_MOST_NEIGHBOURS]:
        if path.resolve() == model_file.resolve() or path.name.startswith(("test_", "conftest")):
            continue
        try:
            inside = [] if _is_made_up(path) else _read(path)
            options += [Option(locate_module(path, root), each) for each in inside if each.role == "dataset"]
        except (ScaffoldError, OSError):
            continue  # not asked for
    return options


def refuse_pair(options: Sequence[Option]) -> None:
    """Raise ScaffoldError if several models of a file seem to be trained against each other: no one is the job's.

    Raises:
        ScaffoldError: they seem to be.
    """
    names = trained_together(each.candidate for each in options)
    if names:
        raise ScaffoldError(
            f"{' and '.join([', '.join(names[:-1]), names[-1]])} seem to be trained against each other: "
            "which one a job is for cannot be told",
            "write a module that holds them, let optimizer.entry return a dict of their optimizers,\n"
            '{"g": ..., "d": ...}, and let model.step take (model, batch, optimizers): `elasticflow guide training`\n'
            "tells how, and `elasticflow init --example dcgan` writes such a job. To train one of them alone: --model NAME",
        )


def own_optimizers(model: Option) -> str | None:
    """Return how a job names the method of the model's class that makes its optimizers; None if it has none."""
    made, name = model.candidate.made, "configure_optimizers"
    if made is None or method_of(made, name, model.candidate.classes) is None:
        return None
    return f"{model.location.module}:{made.name}.{name}"


def option_named(entry: str, root: Path, path: str) -> Option | None:
    """Return the class or function that `module:name` is in a file under *path*; None where reading does not show it."""
    module, _, name = entry.partition(":")
    base = root / path / Path(*module.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            candidate = candidates_named(_text_of(file), name, "dataset")
            return None if candidate is None else Option(ModuleLocation(module, path), candidate)
    return None


def _is_made_up(path: Path) -> bool:
    """Return whether a file holds made-up data, which is of another model's shape."""
    with path.open("rb") as file:
        return file.read(len(MADE_UP)) == MADE_UP.encode()


def locate_module(file: Path, root: Path) -> ModuleLocation:
    """Return how a job under *root* names the module in *file*.

    Raises:
        ScaffoldError: it lies elsewhere, or its name is no module's.
    """
    try:
        parts = file.resolve().relative_to(root.resolve()).with_suffix("").parts
    except ValueError:
        raise ScaffoldError(
            f"{file} lies outside of the project {root}",
            "write the job file beside it: -o FOLDER/jobs/NAME.toml",
        ) from None
    if parts[-1] == "__init__":
        parts = parts[:-1]
    # Folders whose names are no identifiers are not packages: the path begins below the last of them.
    begin = max((number + 1 for number, part in enumerate(parts) if not part.isidentifier()), default=0)
    if begin >= len(parts):
        raise ScaffoldError(f"{file} cannot be imported: {file.stem!r} is no module's name", "rename it")
    return ModuleLocation(".".join(parts[begin:]), "/".join(parts[:begin]) or ".")


def long_losses(model_file: Path) -> list[ast.FunctionDef]:
    """Return the functions of the model's file that compute a loss of more than outputs and targets."""
    return losses_in(_text_of(model_file))


def _is_module(name: str, location: ModuleLocation, root: Path) -> bool:
    """Return whether a class inherits from torch's module through other files."""
    resolver = Resolver(Finder.of_job(root, (location.path,)))
    try:
        resolved = resolver.entry(f"{location.module}:{name}")
        if not isinstance(resolved, Definition) or not isinstance(resolved.node, ast.ClassDef):
            return False
        classes = list(classes_of(resolved, resolver))
    except UnresolvedError:
        return False
    return any(each.module.name == "torch.nn.modules.module" for each in classes)


def _text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig")


def _read(path: Path, is_model: Callable[[str], bool] = lambda _: False) -> list[Candidate]:
    try:
        return candidates(_text_of(path), is_model)
    except OSError as error:
        raise ScaffoldError(f"cannot read {path}: {error.strerror}") from error
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ScaffoldError(f"{path}{line} is not Python of this version: {error}") from error


def example(name: str, workers: int | str) -> tuple[Draft, dict[str, str]]:
    """Return the draft of a job for the example package *name*, and its files by their path from the project's root."""
    evaluation = (
        "[evaluation]",
        f'entry = "{name}:spirals"',
        'args = { split = "test", samples = 600 }',
        'every = "1 epoch" | or "100 steps"',
        f'metrics = {{ accuracy = "{name}:accuracy" }} | called with outputs and targets',
        'best = "max accuracy" | what keep.best means',
        "",
    )
    draft = Draft(
        name,
        f"{name}:Net",
        f"{name}:spirals",
        arguments={"model": {"width": 64}, "optimizer": {"lr": 1e-2}},
        evaluation=evaluation,
        epochs=10,
        global_batch_size=64,
        workers=workers,
    )
    return draft, {f"{name}/__init__.py": EXAMPLE}


def loss_by_samples(option: Option) -> str | None:
    """Return the loss that the annotation of `__getitem__` tells: a whole number is a class, a real one a target."""
    for each in ast.walk(option.candidate.node):
        if isinstance(each, ast.FunctionDef) and each.name == "__getitem__" and each.returns is not None:
            match each.returns:
                case ast.Subscript(slice=ast.Tuple(elts=[_, ast.Name(id="int")])):
                    return "torch.nn.functional:cross_entropy"
                case ast.Subscript(slice=ast.Tuple(elts=[_, ast.Name(id="float")])):
                    return "torch.nn.functional:mse_loss"
                case _:
                    return None
    return None


def write(files: Mapping[Path, str | bytes], elsewhere: str = "choose another name: --name or -o") -> None:
    """Write new files, all or, if one is there already, none; *elsewhere* says how to name another place.

    Raises:
        ScaffoldError: one exists, or cannot be written.
    """
    existing = next((path for path in files if path.exists()), None)
    if existing is not None:
        raise ScaffoldError(f"{existing} exists already", f"nothing was written; {elsewhere}")
    for path, content in files.items():
        try:
            atomic_files.write(path, [content.encode() if isinstance(content, str) else content])
        except OSError as error:
            raise ScaffoldError(f"cannot write {path}: {error.strerror}") from error


def holds_already(path: Path, text: str) -> bool:
    """Return whether a file holds this text already, as after another `init` for the same model."""
    try:
        return path.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def schema_file(job_file: Path) -> dict[Path, str]:
    """Return the schema that editors look for beside *job_file*; nothing if there is one."""
    path = job_file.parent / SCHEMA_NAME
    return {} if path.exists() else {path: SCHEMA_FILE.read_text("utf-8")}


def ignores_runs(root: Path) -> bool | None:
    """Return whether git leaves the run folders alone; None outside of git."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return None
    try:
        return _RUNS_IGNORED.search((root / ".gitignore").read_text("utf-8")) is not None
    except OSError:
        return False


def ignore_runs(root: Path) -> None:
    """Add the run folders to .gitignore; what stands there stays."""
    path = root / ".gitignore"
    before = path.read_text("utf-8") if path.exists() else ""
    gap = "" if not before or before.endswith("\n") else "\n"
    atomic_files.write(path, [f"{before}{gap}/{RUNS}/\n".encode()])


def pre_commit_hook(root: Path) -> tuple[dict[Path, str], str]:
    """Return the pre-commit configuration to write, or what to add to the one that is there by hand."""
    path = root / PRE_COMMIT
    if not path.exists():
        return {path: _HOOK}, ""
    if "elasticflow-validate" in path.read_text("utf-8"):
        return {}, ""
    return {}, "\n".join(_HOOK.splitlines()[1:])


def first_for(options: Sequence[Option], role: str) -> Option | None:
    """Return the most likely candidate for a role."""
    return next((each for each in options if each.candidate.role == role), None)
