"""The functions and classes a job names: there, callable, and taking the arguments (floor 1).

Reads source only: user code never runs here, and torch is neither needed nor loaded.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.spec import codes
from elasticflow.spec.expectations import show
from elasticflow.spec.lengths import why_not_map_style
from elasticflow.spec.modules import (
    CannotTellError,
    Finder,
    Module,
    NoModuleError,
    NotInstalledError,
)
from elasticflow.spec.resolve import (
    Definition,
    NoAttributeError,
    Plain,
    Resolver,
    UnreadableModuleError,
)
from elasticflow.spec.signatures import Misfit, Signature, misfits, signature_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.spec.diagnostics import Diagnostic, Severity
    from elasticflow.spec.positions import KeyPath
    from elasticflow.spec.source import Source


class Use(NamedTuple):
    """One entry point and how it is called.

    Attributes:
        text: `module:attribute`.
        path: Its key.
        given: Names of what is passed by place.
        args: Where its named arguments stand; None when it takes none.
    """

    text: str
    path: KeyPath
    given: tuple[str, ...] = ()
    args: KeyPath | None = None


def installed_places() -> tuple[Path, ...]:
    """Return the folders Python finds installed packages in; the current folder is not one of them."""
    here = Path.cwd()
    return tuple(
        Path(each) for each in dict.fromkeys(sys.path) if each and Path(each) != here and Path(each).is_dir()
    )


def check_entry_points(source: Source, tables: dict[str, Any], root: Path) -> list[Diagnostic]:
    """Return what is wrong with the entry points of the tables that are right."""
    job = tables.get("job")
    parts = ["."] if job is None else job.path
    own = tuple(root / part for part in parts if "\0" not in part)
    found = [
        source.problem(
            codes.NO_FOLDER,
            f"the folder {show(part)} of job.path does not exist",
            ("job", "path", number),
            remedy=f"paths start at the project's root: {root}",
        )
        for number, part in enumerate(parts)
        if "\0" in part or not (root / part).is_dir()
    ]
    resolver = Resolver(Finder(own, installed_places()))
    for use in _uses(tables):
        found += _Check(source, resolver, use).run()
    return found


def _uses(tables: dict[str, Any]) -> Iterator[Use]:
    model, data, evaluation = (tables.get(name) for name in ("model", "dataset", "evaluation"))
    batch = ("model", "batch") if model is not None and model.step else ("outputs", "targets")
    for name, given in (
        ("model", ()),
        ("optimizer", ("the parameters",)),
        ("lr_scheduler", ("the optimizer",)),
    ):
        if table := tables.get(name):
            yield Use(table.entry, (name, "entry"), given, (name, "args"))
    for name in ("dataset", "evaluation"):
        if table := tables.get(name):
            yield Use(table.entry, (name, "entry"), (), (name, "args"))
    if model is not None and model.loss:
        yield Use(model.loss, ("model", "loss"), ("outputs", "targets"))
    if model is not None and model.step:
        yield Use(model.step, ("model", "step"), ("model", "batch"))
    if data is not None and data.prepare:
        yield Use(data.prepare, ("dataset", "prepare"))
    if data is not None and data.collate:
        yield Use(data.collate, ("dataset", "collate"), ("samples",))
    for name, text in (evaluation.metrics if evaluation is not None else {}).items():
        yield Use(text, ("evaluation", "metrics", name), batch)


class _Check:
    """The check of one entry point."""

    def __init__(self, source: Source, resolver: Resolver, use: Use) -> None:
        self.source = source
        self.resolver = resolver
        self.use = use
        self.module, _, self.attribute = use.text.partition(":")

    def run(self) -> list[Diagnostic]:
        """Return its problems; a note where reading does not tell."""
        try:
            found = self.resolver.entry(self.module, self.attribute)
            if isinstance(found, Definition):
                return [*self._arguments(found), *self._length(found)]
            words = "a module" if isinstance(found, Module) else found.words
            remedy: str | None = "name a class or a function"
            return [
                self._problem(codes.NOT_CALLABLE, f"{self.use.text} cannot be called: it is {words}", remedy)
            ]
        except NoModuleError as error:
            return [self._no_module(error)]
        except NoAttributeError as error:
            near = difflib.get_close_matches(error.name, error.beside, 1)
            remedy = f'did you mean "{near[0]}"?' if near else _listing(error.beside)
            return [self._problem(codes.NO_ATTRIBUTE, f"{error.module} has no {error.name}", remedy)]
        except UnreadableModuleError as error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            message = f"not valid Python {version}: {error}"
            return [self._problem(codes.UNREADABLE_MODULE, message, None, "warning")]
        except NotInstalledError as error:
            return [self._not_installed(str(error))]
        except CannotTellError as error:
            return [self._note(str(error))]

    def _problem(
        self, code: str, message: str, remedy: str | None, severity: Severity = "error", path: KeyPath = ()
    ) -> Diagnostic:
        where = path or self.use.path
        return self.source.problem(code, message, where, at_key=bool(path), severity=severity, remedy=remedy)

    def _note(self, reason: str) -> Diagnostic:
        return self._problem(codes.CANNOT_TELL, f"{self.use.text} is not checked: {reason}", None, "note")

    def _no_module(self, error: NoModuleError) -> Diagnostic:
        parent, _, last = error.name.rpartition(".")
        near = difflib.get_close_matches(last, error.beside, 1)
        remedy = f'did you mean "{parent}.{near[0]}"?' if near else _listing(error.beside, f"{parent}.")
        return self._problem(codes.NO_MODULE, f"there is no module {error.name}", remedy)

    def _not_installed(self, top: str) -> Diagnostic:
        near = difflib.get_close_matches(top, self.resolver.finder.names(), 1)
        if not near:
            return self._note(f"{top} is not installed here")
        folders = ", ".join(str(place) for place in self.resolver.finder.own)
        message = f"there is no module {top} on the job's path, and it is not installed here"
        remedy = f'did you mean "{near[0]}"? (looked in {folders})'
        return self._problem(codes.NO_MODULE, message, remedy, "warning")

    def _arguments(self, found: Definition) -> list[Diagnostic]:
        try:
            signature = signature_of(found, self.resolver)
        except (CannotTellError, NoModuleError, NoAttributeError, UnreadableModuleError) as error:
            return [self._note(str(error))]
        arguments: dict[str, Any] = self.source.raw
        for part in self.use.args or ():
            arguments = arguments.get(str(part), {})
        if self.use.args is None:
            arguments = {}
        return [
            self._misfit(each, found, signature, arguments)
            for each in misfits(signature, len(self.use.given), arguments)
        ]

    def _misfit(
        self, misfit: Misfit, found: Definition, signature: Signature, arguments: dict[str, Any]
    ) -> Diagnostic:
        here = f"defined at {found.place}"
        at_key = (*(self.use.args or ()), misfit.name)
        match misfit.kind:
            case "unknown":
                message = f'{self.use.text} takes no argument "{misfit.name}"'
                return self._problem(codes.BAD_ARGUMENT, message, f"{misfit.remedy}\n{here}", path=at_key)
            case "twice":
                message = f'{self.use.text} gets "{misfit.name}" from elasticflow already'
                return self._problem(codes.BAD_ARGUMENT, message, "leave it out", path=at_key)
            case "type":
                message = f'{self.use.text} takes {misfit.remedy} as "{misfit.name}", not {show(arguments[misfit.name])}'
                return self.source.problem(codes.BAD_ARGUMENT_TYPE, message, at_key, remedy=here)
            case "missing":
                message = f'{self.use.text} needs the argument "{misfit.name}"'
                remedy = f"add to [{self.use.path[0]}]: args = {{ {misfit.name} = ... }}"
                if self.use.args is None:
                    given = ", ".join(self.use.given) or "nothing"
                    remedy = f"{'.'.join(map(str, self.use.path))} is called with {given}: give the argument a default"
                return self._problem(codes.BAD_ARGUMENT, message, f"{remedy}\n{here}")
            case "places":
                given = ", ".join(self.use.given)
                message = f"{self.use.text} is called with {len(self.use.given)} arguments ({given}), and takes {misfit.remedy}"
                return self._problem(codes.BAD_ARGUMENT, message, here)

    def _length(self, found: Definition) -> list[Diagnostic]:
        if self.use.path not in {("dataset", "entry"), ("evaluation", "entry")}:
            return []
        try:
            reason = why_not_map_style(found, self.resolver)
        except (CannotTellError, NoModuleError, NoAttributeError, UnreadableModuleError):
            return []
        if reason is None:
            return []
        remedy = "a dataset needs __len__ and __getitem__, so that every sample is seen once at any number of workers"
        message = f"{self.use.text} {reason}"
        return [self._problem(codes.NO_LENGTH, message, f"{remedy}\ndefined at {found.place}")]


def _listing(names: list[str], prefix: str = "") -> str | None:
    if not names:
        return None
    shown = ", ".join(f"{prefix}{name}" for name in names[:8])
    return f"there are: {shown}{', ...' if len(names) > 8 else ''}"


__all__ = ["Plain", "Use", "check_entry_points", "installed_places"]
