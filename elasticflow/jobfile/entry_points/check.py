"""Checks that the functions and classes of a job exist, are callable, and take their arguments.

Reads source only: user code never runs here, and torch is neither needed nor loaded.
"""

from __future__ import annotations

import ast
import keyword
import re
import sys
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import SHORT_MODULES, listing, nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show, to_toml
from elasticflow.jobfile.entry_points.arguments import ArgumentCheck, makes_its_own_groups
from elasticflow.jobfile.entry_points.calls import EntryPoint, EntryPointCache, entry_calls, table_entry
from elasticflow.jobfile.entry_points.object_arguments import dataset_values
from elasticflow.jobfile.entry_points.required_methods import (
    attributes_of,
    methods_missing,
    why_not_map_style,
    why_not_stateful,
)
from elasticflow.jobfile.tables.evaluation import without_set
from elasticflow.jobfile.tables.types import ENTRY
from elasticflow.jobfile.text.layers import content_of, table_at, value_at
from elasticflow.jobfile.type_checks.makes import DATASET, classes_beside, wrong_kind
from elasticflow.python_source.classes import classes_of, methods_of
from elasticflow.python_source.modules import (
    CannotTellError,
    Definition,
    Finder,
    MethodError,
    Module,
    NoAttributeError,
    NoModuleError,
    NotInstalledError,
    PlainValue,
    Resolved,
    UnreadableModuleError,
    UnresolvedError,
    install_help,
    installed_folders,
    is_found_by_hooks,
    looked_in,
    seen_from_here,
)
from elasticflow.python_source.resolve import Resolver
from elasticflow.python_source.signatures import signature_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.text.source import Source

_MOST_NAMED = 8
_ATTRIBUTE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"

OFF_THE_PATH = "on the job's path, and it is not installed here"


def check_entry_points(source: Source, root: Path, cache: EntryPointCache | None = None) -> list[Diagnostic]:
    """Return the problems of the job's entry points, also in tables that have other problems.

    Reads and extends *cache*, the results for other jobs.
    """
    cache = cache or EntryPointCache()
    parts = table_at(source.raw, "job").get("path", ["."])
    parts = [part for part in parts if isinstance(part, str)] if isinstance(parts, list) else []
    is_there = ["\0" not in part and (root / part).is_dir() for part in parts]
    problems = [
        source.problem(
            codes.NO_FOLDER,
            f"the folder {show(part)} of job.path does not exist",
            ("job", "path", number),
            remedy=f"paths start at the project's root, {seen_from_here(root)}",
        )
        for number, part in enumerate(parts)
        if not is_there[number]
    ]
    own = tuple(root / part for part, good in zip(parts, is_there, strict=True) if good)
    if own not in cache.resolvers:
        cache.resolvers[own] = Resolver(Finder(own, installed_folders()))
    for call in entry_calls(source.raw):
        check = _EntryPointCheck(source, cache.resolvers[own], call, cache)
        key = own, call, content_of(check.named_arguments())
        if re.fullmatch(ENTRY, call.text) and key not in cache.clean:
            wrong = check.problems()
            problems += wrong
            cache.clean |= set() if wrong or check.depends_on_others else {key}
    problems = list(dict.fromkeys(problems))  # groups of one optimizer share its problems
    return [*problems, *_missing_values(source, cache.resolvers[own])]


def _missing_values(source: Source, resolver: Resolver) -> Iterator[Diagnostic]:
    """Yield the arguments and samplers that name an attribute that the training data certainly lacks."""
    values = [(path, value.name, str(value)) for path, value in dataset_values(source.raw)]
    for key, text in table_at(source.raw, "dataset", "sampler").items():
        if isinstance(text, str) and re.fullmatch(_ATTRIBUTE, text):
            values.append((("dataset", "sampler", key), text, show(text)))
    entry = value_at(("dataset", "entry"), source.raw)
    if not values or not isinstance(entry, str) or not re.fullmatch(ENTRY, entry):
        return
    try:
        definition = resolver.entry(entry)
        names = attributes_of(definition, resolver) if isinstance(definition, Definition) else None
    except (UnresolvedError, RecursionError):
        return
    for path, name, text in values if names is not None else ():
        first = name.partition(".")[0]
        if names is not None and first not in names:
            message = f"{dotted(path)} is {text}, and what {entry} makes has no `{first}`"
            near = nearest(first, names)
            meant = "" if not near else show(near[0] if path[0] == "dataset" else f"${{dataset.{near[0]}}}")
            remedy = f"did you mean {meant}?" if meant else "set it in the dataset's __init__"
            yield source.problem(codes.NO_VALUE, message, path, remedy=remedy)


class _EntryPointCheck(EntryPoint):
    """The check of one entry point.

    Attributes:
        depends_on_others: The problems also follow from keys other than the entry and its arguments.
    """

    depends_on_others = False

    def problems(self) -> list[Diagnostic]:
        """Return the problems of the entry point; a note if reading its source cannot tell."""
        for part in re.split("[.:]", self.call.text):
            if keyword.iskeyword(part):
                message = f"{self.call.text} cannot be imported: {part} is a keyword of Python"
                return [self.problem(codes.NO_MODULE, message, "rename it")]
        try:
            return self._of_named()
        except NoModuleError as error:
            return [self._no_module(error)]
        except NoAttributeError as error:
            methods = error.methods if self.call.as_method is not None else ()
            beside = sorted({*error.beside, *methods})
            near = nearest(error.name, beside)
            remedy = f'did you mean "{near[0]}"?' if near else listing(beside)
            return [self.problem(codes.NO_ATTRIBUTE, f"{error.module} has no {error.name}", remedy)]
        except UnreadableModuleError as error:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            message = f"not valid Python {version}: {error}"
            if self.resolver.finder.has_torch:  # this Python is the one that trains
                return [self.problem(codes.UNREADABLE_MODULE, message, "importing it will fail")]
            remedy = "importing it will fail, unless training runs with a newer Python"
            return [self.problem(codes.UNREADABLE_MODULE, message, remedy, "warning")]
        except NotInstalledError as error:
            return [self._not_installed(str(error))]
        except MethodError as error:
            return [self.note(str(error))] if self.call.as_method is None else self._foreign_method(error)
        except CannotTellError as error:
            return self._of_short_module() or [self.note(str(error))]

    def _known_entry(self) -> str | None:
        """Return the entry point that people call by this attribute alone at this key: `cross_entropy`, `AdamW`."""
        from elasticflow.jobfile.wording.foreign_names import ENTRIES, plain  # most jobs hold no mistake

        return ENTRIES.get(dotted(self.call.path), {}).get(plain(self.attribute))

    def _of_short_module(self) -> list[Diagnostic]:
        """Return the problem of an optimizer or a schedule that is asked of torch itself, whose names are made at run time."""
        if self.module != "torch" or self.call.path not in {
            ("optimizer", "entry"),
            ("lr_scheduler", "entry"),
        }:
            return []
        same = self._known_entry()
        message = f"torch has no {self.attribute}"
        return [self.problem(codes.NO_ATTRIBUTE, message, f'did you mean "{same}"?')] if same else []

    def _of_named(self) -> list[Diagnostic]:
        """Return the problems of the definition that the entry names.

        Raises:
            UnresolvedError: reading does not lead to the definition.
        """
        if self.call.is_object:
            return self._included_object()
        resolved = self.once("entry", lambda: self.resolver.entry(self.call.text))
        if self.call.is_class:
            return self._no_class(resolved)
        if not isinstance(resolved, Definition):
            return [self._not_callable(resolved)]
        if isinstance(resolved.node, ast.ClassDef):
            if self.call.is_metric:
                return self._metric_class(resolved)
            if self.call.args is None and not self.call.is_argument:
                return [self._class_for_function(resolved)]
        return self._wrong_kind(resolved) or [*self._arguments(resolved), *self._missing_methods(resolved)]

    def _metric_class(self, definition: Definition) -> list[Diagnostic]:
        """Return the problems of a class whose objects are to be fed the model's outputs."""
        over = value_at((*self.call.path[:-1], "over"), self.source.raw) if self.call.args else None
        if over in {"batch", "loss"}:
            message = (
                f"{self.call.text} is a class, whose objects take in the whole set: over is {show(over)}"
            )
            where = (*self.call.path[:-1], "over")
            return [self.source.problem(codes.OUT_OF_RANGE, message, where, remedy="leave `over` out")]
        missing = self.once("metric", lambda: methods_missing(definition, self.resolver))
        if missing:
            message = f"{self.call.text} has no {' and no '.join(missing)}"
            remedy = "a class of metrics has update(outputs, targets) and compute(), as torchmetrics' have; or name a function"
            return [self.problem(codes.NOT_A_FUNCTION, message, f"{remedy}\ndefined at {definition.where}")]
        self.call = self.call._replace(given=())
        return self._arguments(definition)

    def _foreign_method(self, method: MethodError) -> list[Diagnostic]:
        """Return the problems of a method that is called on the model."""
        owner = method.owner.node
        self.depends_on_others = True  # on the model's class
        model = self._class_of_model()
        if self.call.path == ("optimizer", "entry") and (wrong := makes_its_own_groups(self)):
            return [wrong]
        if model is None or method.owner in model:
            self.call = self.call._replace(given=self.call.as_method or ())
            return self._arguments(method.definition)
        assert isinstance(owner, ast.ClassDef)
        entry = value_at(("model", "entry"), self.source.raw)
        message = f"{self.call.text} is a method of {owner.name}, but the model is made by {entry}"
        remedy = (
            f"name a method of the model's own class, or a function\ndefined at {method.definition.where}"
        )
        return [self.problem(codes.FOREIGN_METHOD, message, remedy)]

    def _class_of_model(self) -> list[Definition] | None:
        """Return the model's class and its bases; None if reading does not show them."""
        entry = value_at(("model", "entry"), self.source.raw)
        if not isinstance(entry, str) or not re.fullmatch(ENTRY, entry):
            return None
        try:
            resolved = self.resolver.entry(entry)
            if isinstance(resolved, Definition) and isinstance(resolved.node, ast.ClassDef):
                return list(classes_of(resolved, self.resolver))
        except UnresolvedError:
            pass
        return None

    def _included_object(self) -> list[Diagnostic]:
        reason_and_where = why_not_stateful(self.resolver, self.call.text)
        if reason_and_where is None:
            return []
        reason, where = reason_and_where
        remedy = "name an object of the module that has the methods state_dict() and load_state_dict(state)"
        at = "" if where is None else f"\ndefined at {where}"
        return [self.problem(codes.NO_STATE, f"{self.call.text} {reason}", f"{remedy}{at}")]

    def _no_class(self, resolved: Resolved) -> list[Diagnostic]:
        if isinstance(resolved, Definition) and isinstance(resolved.node, ast.ClassDef):
            return []
        words = "a module" if isinstance(resolved, Module) else "a function"
        words = resolved.words if isinstance(resolved, PlainValue) else words
        message = f"{self.call.text} is {words}, and {dotted(self.call.path)} names a class of modules"
        remedy = 'name a class, such as "torch.nn:LayerNorm"'
        return [self.problem(codes.NOT_CALLABLE, message, remedy)]

    def _class_for_function(self, definition: Definition) -> Diagnostic:
        given = ", ".join(self.call.given) or "nothing"
        message = f"{self.call.text} is a class, and is called with {given}: that makes an object of it"
        function = "name a function"
        if self.call.path == ("model", "loss"):
            same = self._known_entry() or "torch.nn.functional:cross_entropy"
            function = f'name a function, such as "{same}"'
        return self.problem(codes.NOT_A_FUNCTION, message, f"{function}\ndefined at {definition.where}")

    def _not_callable(self, resolved: Module | PlainValue) -> Diagnostic:
        words, remedy = "a module", "name a class or a function"
        if isinstance(resolved, PlainValue):
            words = resolved.words
        else:
            remedy = f'{remedy} in it: "{resolved.name}:..."'
            if (same := self._known_entry()) is not None:
                remedy = f'did you mean "{same}"?'
        message = f"{self.call.text} cannot be called: it is {words}"
        return self.problem(codes.NOT_CALLABLE, message, remedy)

    def _no_module(self, error: NoModuleError) -> Diagnostic:
        parent, _, last = error.name.rpartition(".")
        if last == "py":
            message = f"{self.module} is a file: an entry names the module, without .py"
            meant = f"{parent}:{self.attribute}"
            return self.problem(codes.NO_MODULE, message, f'did you mean "{meant}"?')
        if last == "ipynb":
            message = f"{self.module} is a notebook, which cannot be imported"
            into_a_file = f"write its code into a file: jupyter nbconvert --to script {self.module}"
            return self.problem(codes.NO_MODULE, message, into_a_file)
        near = nearest(last, error.beside)
        remedy = f'did you mean "{parent}.{near[0]}"?' if near else listing(error.beside, f"{parent}.")
        if not error.package.is_own:
            remedy = "\n".join(filter(None, [remedy, f"{parent} is the installed one: {error.package.file}"]))
        return self.problem(codes.NO_MODULE, f"there is no module {error.name}", remedy)

    def _not_installed(self, top: str) -> Diagnostic:
        finder = self.resolver.finder
        if (module := SHORT_MODULES.get(self.module)) is not None:
            message = f"there is no module {top}: a job file takes whole names"
            return self.problem(codes.NO_MODULE, message, f'did you mean "{module}:{self.attribute}"?')
        if is_found_by_hooks(top):
            return self.note(f"{top} is not installed as files")
        if inside := [each for each in ("src", "lib") if finder.within(each).has_own(top)]:
            message = f"there is no module {top} {OFF_THE_PATH}"
            given = table_at(self.source.raw, "job").get("path")
            paths = to_toml([*(given or ["."]), *inside])
            remedy = f"write path = {paths} in [job]" if given else f"add path = {paths} to [job]"
            return self.problem(codes.NO_MODULE, message, remedy)
        near = nearest(top, finder.names())
        if not near:
            message = f"{self.call.text} is not checked: {top} is not installed here"
            return self.problem(codes.NOT_INSTALLED, message, install_help(top, finder), "note")
        message = f"there is no module {top} {OFF_THE_PATH}"
        remedy = f'did you mean "{near[0]}"? (looked in {looked_in(finder)})'
        is_sure = finder.has_torch or self._is_in(top, near[0])
        return self.problem(codes.NO_MODULE, message, remedy, "error" if is_sure else "warning")

    def _is_in(self, top: str, near: str) -> bool:
        """Return whether the entry is found with *near* as its top-level module.

        Without torch this may be a hook's environment: `datasets` beside a dataset.py can be the installed package.
        """
        if self.module.partition(".")[0] != top:
            return False  # the module exists, and it imports a name from *top*
        try:
            self.resolver.entry(f"{near}{self.call.text.removeprefix(top)}")
        except UnresolvedError:
            return False
        return True

    def _arguments(self, definition: Definition) -> list[Diagnostic]:
        if isinstance(definition.node, ast.AsyncFunctionDef) and not (
            definition.node.decorator_list or self.call.is_argument
        ):
            message = f"{self.call.text} is `async def`: a call of it makes a coroutine, which nobody awaits"
            remedy = f"write `def`, and asyncio.run(...) around what it awaits\ndefined at {definition.where}"
            return [self.problem(codes.NOT_A_FUNCTION, message, remedy)]
        try:
            signature = self.once("signature", lambda: signature_of(definition, self.resolver))
        except NotInstalledError as error:
            return [self._not_installed(str(error))]
        except UnresolvedError as error:
            return [self.note(str(error))]
        check = ArgumentCheck(self, definition, signature)
        problems = check.problems()
        self.depends_on_others |= check.depends_on_others
        return problems

    def _wrong_kind(self, definition: Definition) -> list[Diagnostic]:
        key = table_entry(without_set(self.call.path))
        wrong = self.once("kind", lambda: wrong_kind(key, definition, self.resolver), *key)
        if wrong is None:
            return []
        wanted = wrong.wanted
        message = f"{self.call.text} {wrong.found}, and {dotted(self.call.path)} names what makes {wanted.words} ({wanted.base})"
        near = wrong.beside if len(wrong.beside) == 1 else nearest(self.attribute, wrong.beside)
        remedy = f"name a class that inherits from {wanted.base}, or a function that makes one"
        if near:
            remedy = f'did you mean "{self.module}:{near[0]}"?'
        elif wrong.is_loader:
            remedy = "name the dataset itself: its samples are shared out and put into batches by elasticflow"
        elif wrong.beside:
            remedy = f"name {wanted.words} instead: {', '.join(wrong.beside[:_MOST_NAMED])}"
        return [self.problem(codes.WRONG_KIND, message, f"{remedy}\ndefined at {definition.where}")]

    def _missing_methods(self, definition: Definition) -> list[Diagnostic]:
        path = table_entry(without_set(self.call.path))
        if path not in {("dataset", "entry"), ("evaluation", "entry")} or self.call.named:
            return []
        try:
            reason = self.once("length", lambda: why_not_map_style(definition, self.resolver))
        except UnresolvedError:
            return []
        if reason is None:
            return []
        remedy = "a dataset needs __len__ and __getitem__, so that every sample is seen once at any number of workers"
        if isinstance(definition.node, ast.ClassDef) and "train_dataloader" in methods_of(definition):
            near = "".join(
                f', such as "{self.module}:{name}"'
                for name in classes_beside(definition, DATASET, self.resolver)[:1]
            )
            remedy = f"name the dataset that its train_dataloader reads{near}"
        elif path == ("dataset", "entry"):
            remedy += ";\ndata that can only be read in order is read in shards: set dataset.shards (elasticflow guide EF309)"
        if "IterableDataset" in reason:
            remedy += ";\ndata that the model makes while it is trained (reinforcement learning) is no data for a job: store it first"
        message = f"{self.call.text} {reason}"
        return [self.problem(codes.NO_LENGTH, message, f"{remedy}\ndefined at {definition.where}")]
