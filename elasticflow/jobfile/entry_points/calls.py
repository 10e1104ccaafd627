"""The entry points of a job, their calls, and the cached results of their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.entry_points.object_arguments import (
    collate_tables,
    objects_of,
    tables_in_array,
    with_objects_marked,
)
from elasticflow.jobfile.tables.evaluation import OF_LOSS, set_tables
from elasticflow.jobfile.text.layers import table_at, value_at
from elasticflow.python_source.modules import UnresolvedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic, Severity
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.jobfile.text.source import Source
    from elasticflow.python_source.resolve import Resolver

# Positional arguments of the entry points that are no members of a list or of a table of names.
_FIXED: dict[tuple[str, str], tuple[str, ...]] = {
    ("model", "entry"): (),
    ("model", "loss"): ("outputs", "targets"),
    ("model", "step"): ("model", "batch"),
    ("model", "loss_count"): ("batch",),
    ("optimizer", "entry"): ("the parameters",),
    ("lr_scheduler", "entry"): ("the optimizer",),
    ("dataset", "entry"): (),
    ("dataset", "prepare"): (),
    ("dataset", "collate"): ("samples",),
}
# The same of those that may be methods of the model's class.
_AS_METHODS: dict[tuple[str, str], tuple[str, ...]] = {
    ("optimizer", "entry"): (),
    ("model", "step"): ("batch",),
}


class EntryCall(NamedTuple):
    """One entry point and how it is called.

    Attributes:
        text: `module:attribute`.
        path: Key of the entry point.
        given: Names of the positional arguments.
        args: Key of the named arguments; None if the entry takes none.
        named: Names of further arguments that are passed by name.
        is_object: The entry is not called: the job uses the object itself, for its state.
        is_class: The entry is not called: the job uses the class itself.
        is_argument: The entry makes an object: an argument of another entry point, or a sink.
        is_partial: The arguments may be incomplete.
        is_metric: The entry may also be a class whose objects are fed the model's outputs.
        as_method: Names of the positional arguments of a method of the model's class; None if no method is allowed.
    """

    text: str
    path: KeyPath
    given: tuple[str, ...] = ()
    args: KeyPath | None = None
    named: tuple[str, ...] = ()
    is_object: bool = False
    is_class: bool = False
    is_argument: bool = False
    is_partial: bool = False
    is_metric: bool = False
    as_method: tuple[str, ...] | None = None


def table_entry(path: KeyPath) -> KeyPath:
    """Return the key that defines the kind of entry point at *path*: the key of a dataset for a set of the mixture."""
    return ("dataset", "entry") if path[:2] == ("dataset", "mix") and path[3:] == ("entry",) else path


def calls_of(job: Job) -> Iterator[EntryCall]:
    """Yield every entry point of a resolved job."""
    return entry_calls(job.as_tables())


def entry_calls(raw: TomlTable) -> Iterator[EntryCall]:
    """Yield every entry point of a merged job, even if its table has other problems."""
    for (table, key), given in _FIXED.items():
        is_sharded = (table, key) == ("dataset", "entry") and "shards" in table_at(raw, "dataset")
        named = ("shard", "shards") if is_sharded else ()
        as_method = _AS_METHODS.get((table, key))
        yield from _call(table_at(raw, table), key, (table,), given, named=named, as_method=as_method)
    yield from _of_data(raw)
    batch = ("model", "batch") if "step" in table_at(raw, "model") else ("outputs", "targets")
    for path, of_set in set_tables(raw):
        yield from _call(of_set, "entry", path)
        yield from _call(of_set, "collate", path, ("samples",))
        yield from _call(of_set, "step", path, ("model", "batch"))
        has_step = isinstance(of_set.get("step"), str)
        yield from _of_metrics(of_set, (*path, "metrics"), ("outputs", "targets") if has_step else batch)
    yield from _of_groups(raw)
    yield from _classes(table_at(raw, "parallel").get("wrap"), ("parallel", "wrap"))
    hooks = table_at(raw, "hooks")
    for name, hook in hooks.items():
        place, key = (("hooks", name), "entry") if isinstance(hook, dict) else (("hooks",), name)
        yield from _call(hook if isinstance(hook, dict) else hooks, key, place, ("context",))
    for name in (custom := table_at(raw, "logging", "custom")):
        path = ("logging", "custom", name)
        yield from _call(table_at(custom, name), "entry", path, ("options",), args=None, is_argument=True)
    for each in objects_of(raw):
        is_partial, args = each.is_partial, (*each.path, "args")
        yield EntryCall(each.entry, (*each.path, "entry"), (), args, is_argument=True, is_partial=is_partial)
    for name in (included := table_at(raw, "snapshots", "include")):
        yield from _call(included, name, ("snapshots", "include"), args=None, is_object=True)


def _call(
    table: TomlTable, key: str, place: KeyPath, given: tuple[str, ...] = (), **options: Any
) -> Iterator[EntryCall]:
    """Yield the entry point at a key of the table at *place*, if it is a text; with `entry` stand its `args`."""
    if isinstance(text := table.get(key), str):
        args = (*place, "args") if key == "entry" else None
        yield EntryCall(text, (*place, key), given, **{"args": args, **options})


def _of_data(raw: TomlTable) -> Iterator[EntryCall]:
    """Yield the sets of a mixture, collators with arguments, and the functions of a sampler."""
    for path, table in tables_in_array(raw, "dataset", "mix"):
        yield from _call(table, "entry", path)
    for path, table in collate_tables(raw):
        # If it is partial it is called with samples; else its result is called with them.
        given = ("samples",) if table.get("partial") is True else ()
        yield from _call(table, "entry", path, given, is_argument=True)
    for key, text in table_at(raw, "dataset", "sampler").items():
        if isinstance(text, str) and ":" in text:  # else a column of the data
            yield EntryCall(text, ("dataset", "sampler", key), ("the dataset",))


def _of_metrics(table: TomlTable, path: KeyPath, batch: tuple[str, ...]) -> Iterator[EntryCall]:
    """Yield the metrics of an evaluation set; *batch*: arguments of a function that is a mean over a batch."""
    for name, metric in table_at(table, "metrics").items():
        options = metric if isinstance(metric, dict) else {"entry": metric}
        given = ("outputs", "targets") if {"outputs", "targets"} & options.keys() else batch
        given = {"set": ("outputs", "targets"), "loss": ("loss",)}.get(str(options.get("over")), given)
        given = ("loss",) if str(options.get("entry")).startswith(OF_LOSS) else given
        if options is metric:
            yield from _call(metric, "entry", (*path, name), given, is_metric=True)
        elif isinstance(metric, str):
            yield EntryCall(metric, (*path, name), given, is_metric=True)


def _of_groups(raw: TomlTable) -> Iterator[EntryCall]:
    """Yield the classes that groups of parameters name, and the optimizer with the arguments of each group."""
    optimizer = table_at(raw, "optimizer").get("entry")
    for path, group in tables_in_array(raw, "optimizer", "groups"):
        yield from _classes(group.get("module"), (*path, "module"))
        if isinstance(optimizer, str) and table_at(group, "args"):
            call = EntryCall(optimizer, ("optimizer", "entry"), ("the parameters",), (*path, "args"))
            yield call._replace(is_partial=True, as_method=())


def _classes(named: object, path: KeyPath) -> Iterator[EntryCall]:
    """Yield a class, or each of a list of them."""
    listed = (
        [((*path, n), each) for n, each in enumerate(named)] if isinstance(named, list) else [(path, named)]
    )
    yield from (EntryCall(each, at, is_class=True) for at, each in listed if isinstance(each, str))


def takes_optimizers(names: Sequence[str], *, is_method: bool = False) -> bool:
    """Return whether a step with these parameters is called with the optimizers, which it steps itself.

    *names* do not include the `self` of a method.
    """
    given = 1 if is_method else 2
    return list(names[given : given + 1]) == ["optimizers"]


def takes_optimizer_later(entry: str, names: Sequence[str]) -> bool:
    """Return whether a schedule's factory with these parameters takes the optimizer after another argument.

    An example is `get_scheduler(name, optimizer, ...)` of transformers and diffusers, whose source is not found under
    that name.
    """
    is_theirs = entry in {"transformers:get_scheduler", "diffusers.optimization:get_scheduler"}
    return "optimizer" in names[1:] or (not names and is_theirs)


_Result = TypeVar("_Result")


class EntryPointCache:
    """Results of checking the jobs of one file.

    Attributes:
        resolvers: Resolvers by the folders of the jobs' own code.
        clean: Calls of entry points without problems.
    """

    def __init__(self) -> None:
        self.resolvers: dict[tuple[Path, ...], Resolver] = {}
        self.clean: set[object] = set()
        self._results: dict[tuple[object, ...], object] = {}

    def once(self, make: Callable[[], _Result], *key: object) -> _Result:
        """Call *make* once for this key; return its cached result, or raise its cached error, afterwards."""
        if key not in self._results:
            try:
                self._results[key] = make()
            except UnresolvedError as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, UnresolvedError):
            raise result.with_traceback(None)
        return result  # type: ignore[return-value]  # what it was asked for by this key


class EntryPoint:
    """One entry point of a job.

    Attributes:
        source: The job's keys, each with its place.
        module: Text before the colon.
        attribute: Text after the colon.
    """

    def __init__(self, source: Source, resolver: Resolver, call: EntryCall, cache: EntryPointCache) -> None:
        self.source, self.resolver, self.call = source, resolver, call
        self.module, _, self.attribute = call.text.partition(":")
        self._cache = cache

    def named_arguments(self) -> TomlTable:
        """Return the named arguments of the job file, with objects marked."""
        arguments = None if self.call.args is None else value_at(self.call.args, self.source.raw)
        if not isinstance(arguments, dict):
            return {}
        return {name: with_objects_marked(value) for name, value in arguments.items()}

    def once(self, what: str, make: Callable[[], _Result], *more: object) -> _Result:
        """Return the result of *make* for this entry, called once for all jobs of a file that name the same entry."""
        return self._cache.once(make, what, self.resolver.finder.own, self.call.text, *more)

    def problem(
        self, code: str, message: str, remedy: str | None, severity: Severity = "error", path: KeyPath = ()
    ) -> Diagnostic:
        """Return a problem, shown at the entry, or at the key *path*."""
        where = path or self.call.path
        return self.source.problem(code, message, where, at_key=bool(path), severity=severity, remedy=remedy)

    def note(self, reason: str) -> Diagnostic:
        """Return a note that the entry is not checked, with the reason."""
        return self.problem(codes.CANNOT_TELL, f"{self.call.text} is not checked: {reason}", None, "note")
