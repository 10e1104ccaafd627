"""`[script]`: the file or module exists and is Python; its imports before the workers are forked."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import show, to_toml
from elasticflow.python_source.modules import CannotTellError, Finder, NoModuleError, UnresolvedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.source import Source


def check_script(source: Source, tables: ValidTables, root: Path) -> Iterator[Diagnostic]:
    """Yield the problems of a job's script; *root*: folder of the project."""
    script = tables.get("script")
    if script is None:
        return
    if script.entry is not None:
        yield from _file(source, root, script.entry)
    if script.module is not None and (job := tables.get("job")) is not None:
        finder = Finder.of_job(root, (script.folder, *job.path))
        yield from _module(source, finder, root, script.module)
    for number, text in enumerate(script.args):
        if re.match(r"--?[A-Za-z][\w-]* +\S", text):
            message = f"script.args[{number}] is one text, with a blank between an option and its value"
            remedy = f"each is a text of its own: {to_toml(text.split())[1:-1]}"
            yield source.problem(
                codes.MALFORMED, message, ("script", "args", number), severity="warning", remedy=remedy
            )
    snapshots, restarts = tables.get("snapshots"), tables.get("restarts")
    if snapshots is not None and snapshots.include:
        message = "snapshots.include has no meaning beside [script]: the script says what its snapshots hold"
        remedy = "leave it out; a script that calls `elasticflow.join` names its objects there"
        path: KeyPath = ("snapshots", "include")
        yield source.problem(codes.EXCLUSIVE, message, path, at_key=True, remedy=remedy)
    if restarts is not None and restarts.warm == "standby":
        message = 'restarts.warm = "standby" has no meaning beside [script]: a standby does not know what it imports'
        remedy = (
            "leave it out: workers are forked from a process that has torch, and what script.preload names"
        )
        yield source.problem(codes.EXCLUSIVE, message, ("restarts", "warm"), remedy=remedy)


def _file(source: Source, root: Path, entry: str) -> Iterator[Diagnostic]:
    file, path = root / entry, ("script", "entry")
    if not file.is_file():
        message = f"script.entry: there is no file {show(entry)}"
        remedy = _as_script(entry) or f"a relative path starts at the project root, {root}"
        if file.is_dir():
            message = f"script.entry: {show(entry)} is a folder"
            remedy = 'name the file in it; a package is named as a module: module = "pkg"'
        yield source.problem(codes.NO_MODULE, message, path, remedy=remedy)
        return
    yield from _syntax(source, file, path)


def _as_script(entry: str) -> str | None:
    """Return the keys that say the same as a command, or as a function of a module; None for the path of a file."""
    module, colon, _ = entry.partition(":")
    if colon and re.fullmatch(r"[A-Za-z_][\w.]*", module):
        return f'a script is run as a whole: entry = "{module.replace(".", "/")}.py", or module = "{module}"'
    words = entry.split()
    script = next((number for number, word in enumerate(words) if word.endswith(".py")), None)
    if script is None or len(words) == 1:
        return None
    args = f" and args = {to_toml(words[script + 1 :])}" if words[script + 1 :] else ""
    launcher = (
        "; [nodes] has what the launcher was told"
        if words[:script] not in ([], ["python"], ["python3"])
        else ""
    )
    return f"the script alone: entry = {to_toml(words[script])}{args}{launcher}"


def _module(source: Source, finder: Finder, root: Path, name: str) -> Iterator[Diagnostic]:
    path = ("script", "module")
    where = f"modules are found from the project root, {root}, in the folders of job.path, and among what is installed"
    try:
        module = finder.find(name)
        if module.folders:
            module = finder.find(f"{name}.__main__")
    except NoModuleError as error:
        message = f"script.module: there is no module {error.name}"
        remedy = "a package is run by its __main__.py, as `python -m` does"
        if not error.name.endswith(".__main__"):
            remedy = where
        if name.endswith(".py"):
            remedy = f"a file is named as such: entry = {show(name)}"
        yield source.problem(codes.NO_MODULE, message, path, remedy=remedy)
    except CannotTellError:
        if not finder.has_own(name.partition(".")[0]):
            message = f"script.module: there is no module {name} here"
            yield source.problem(codes.NOT_INSTALLED, message, path, severity="warning", remedy=where)
    except UnresolvedError:
        return
    else:
        if module.file is not None:
            yield from _syntax(source, module.file, path)


def _syntax(source: Source, file: Path, path: KeyPath) -> Iterator[Diagnostic]:
    try:
        ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
        message = f"{'.'.join(map(str, path))}: {file.name} is not valid Python here: {error}"
        yield source.problem(codes.UNREADABLE_MODULE, message, path, remedy="`python` would refuse it, too")
