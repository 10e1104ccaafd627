"""A train.py that was edited by hand: finds the edit, and checks that the file still fits the job and this version."""

from __future__ import annotations

import ast
import hashlib
import shlex
from typing import TYPE_CHECKING

from elasticflow.compiler.launch_folder.launch_record import LaunchRecord, record_in, rendered_again
from elasticflow.compiler.launch_folder.materialize import TRAIN_PY, digest_as_written
from elasticflow.errors import RecordError
from elasticflow.python_source.bindings import bindings
from elasticflow.python_source.modules import CannotTellError, Finder, NoModuleError, source_of
from elasticflow.system import records
from elasticflow.system.installation import ABOVE_PACKAGE
from elasticflow.system.records import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.python_source.modules import Module
    from elasticflow.run_folder import RunFolder

# The function that the last line of a generated train.py calls, now and in launches of earlier versions.
_MAIN_CALLS = {"program", "run"}


def edited_entry_point(
    folder: RunFolder,
    project_root: Path,
    differences: Sequence[Difference],
    warn: Callable[[str], None],
) -> str | None:
    """Return the newest launch's train.py if it was edited by hand and still fits the job.

    Raises:
        RecordError: the file is no program that trains, perhaps by mistake; or an earlier version wrote the file, and it
            imports names that no longer exist.
    """
    numbers = folder.launch_numbers()
    before = folder.launch(numbers[-1]) if numbers else None
    if before is None:
        return None
    path = before / TRAIN_PY
    text = records.read_text(path)
    if text is None:
        warn(f"{path} is absent; it is made anew from the job")
        return None
    if not isinstance(text, Damage) and not _is_edited(before, text, project_root, warn):
        return None
    problem = text.why if isinstance(text, Damage) else _problem_of(text)
    if problem is not None:
        raise RecordError(
            f"{path} {problem}",
            "mend it; or remove it, and the same command makes it anew from the job",
        )
    assert isinstance(text, str)
    if any(difference.is_of_the_job for difference in differences):
        warn(f"the job changed, so train.py is made anew; the edited one stays in {before}")
        return None
    _refuse_stale_imports(path, text)
    return text


def _refuse_stale_imports(path: Path, text: str) -> None:
    stale = stale_import(text)
    if stale is None:
        return
    described = record_in(path.parent)
    job = "JOB"
    if isinstance(described, LaunchRecord) and described.files:
        options = [
            *([f"--case={described.case}"] if described.case else []),
            *(f"--set={override}" for override in described.overrides),
        ]
        job = shlex.join([described.files[0], *options])
    raise RecordError(
        f"{path} was edited by hand and written by an earlier version: it uses {stale}, which this version does not have",
        f"make this version's train.py with `elasticflow plan {job} -o DIR`, carry your edit over and put it in that "
        "place; or remove the edited one, and the same command makes it anew from the job",
    )


def _is_edited(launch: Path, text: str, project_root: Path, warn: Callable[[str], None]) -> bool:
    """Return whether *text*, train.py in the folder *launch*, differs from the file as it was written."""
    written = digest_as_written(launch)
    if not isinstance(written, Damage):
        return hashlib.sha256(text.encode()).hexdigest() != written
    record = record_in(launch)
    if not isinstance(record, LaunchRecord) or not record.files or record.root is None:
        warn(f"{written}; whether train.py was edited is not known, so it is made anew; it stays in {launch}")
        return False
    warn(f"{written}; train.py is compared with what the job becomes now")
    return text != rendered_again(record, project_root)


def _problem_of(text: str) -> str | None:
    """Return why *text* is no program that trains, as the rest of a sentence; None if it may be one."""
    try:
        program = ast.parse(text)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        return f"is no Python: {getattr(error, 'msg', error)} in line {getattr(error, 'lineno', None) or 1}"
    except RecursionError:
        return "is no Python: nested too deeply"
    calls = (node.func for node in ast.walk(program) if isinstance(node, ast.Call))
    if any(getattr(call, "attr", getattr(call, "id", "")) in _MAIN_CALLS for call in calls):
        return None
    return "does not call worker.program, so it trains nothing"


def stale_import(text: str) -> str | None:
    """Return the first name of elasticflow that *text* imports or uses and this version does not have, with its line.

    An example is `elasticflow.runtime.member, in line 15`; None if this version has all names.

    Raises:
        SyntaxError: *text* is not Python.
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt | ast.Attribute)]
    modules: dict[str, str] = {}  # name of each imported module in the text -> the module's own name
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        for parent, name in _uses(node, modules):
            if not _has(parent, name):
                return f"{parent}.{name}, in line {node.lineno}"
    return None


def _uses(node: ast.AST, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield module and name of each attribute of elasticflow that a line imports or takes from an imported module."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                parent, _, name = alias.name.rpartition(".")
                if _is_ours(parent):
                    yield parent, name
        case ast.ImportFrom(module=str(parent), names=names, level=0) if _is_ours(parent):
            for alias in names:
                modules[alias.asname or alias.name] = f"{parent}.{alias.name}"
                yield parent, alias.name
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            if name in modules and _module(modules[name]) is not None:
                yield modules[name], attribute
        case _:
            pass


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "elasticflow"


def _has(parent: str, name: str) -> bool:
    if _module(f"{parent}.{name}") is not None:
        return True
    module = _module(parent)
    return module is not None and bool(bindings(source_of(module), name)[0])


def _module(name: str) -> Module | None:
    try:
        return Finder((), (ABOVE_PACKAGE,)).find(name)
    except (CannotTellError, NoModuleError):
        return None
