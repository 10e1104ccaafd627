"""The entry points of a job, their calls, and the cached results of their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

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
    return entry_calls(job.model_dump())


def entry_calls(raw: TomlTable) -> Iterator[EntryCall]:
    """Yield every entry point of a merged job, even if its table has other problems."""
    batch = ("model", "batch") if "step" in table_at(raw, "model") else ("outputs", "targets")
    fixed: list[tuple[str, str, tuple[str, ...], bool]] = [
        ("model", "entry", (), True),
        ("model", "loss", ("outputs", "targets"), False),
        ("model", "step", ("model", "batch"), False),
        ("model", "loss_count", ("batch",), False),
        ("optimizer", "entry", ("the parameters",), True),
        ("lr_scheduler", "entry", ("the optimizer",), True),
        ("dataset", "entry", (), True),
        ("dataset", "prepare", (), False),
        ("dataset", "collate", ("samples",), False),
    ]
    for table, key, given, takes_args in fixed:
        text = table_at(raw, table).get(key)
        if isinstance(text, str):
            args = (table, "args") if takes_args else None
            is_sharded = (table, key) == ("dataset", "entry") and "shards" in table_at(raw, "dataset")
            as_method = _AS_METHODS.get((table, key))
            named = ("shard", "shards") if is_sharded else ()
            yield EntryCall(text, (table, key), given, args, named, as_method=as_method)
    yield from _of_data(raw)
    for path, of_set in set_tables(raw):
        if isinstance(text := of_set.get("entry"), str):
            yield EntryCall(text, (*path, "entry"), (), (*path, "args"))
        if isinstance(text := of_set.get("collate"), str):
            yield EntryCall(text, (*path, "collate"), ("samples",))
        given = batch
        if isinstance(text := of_set.get("step"), str):
            given = ("outputs", "targets")
            yield EntryCall(text, (*path, "step"), ("model", "batch"))
        yield from _of_metrics(of_set, (*path, "metrics"), given)
    yield from _of_groups(raw)
    yield from _of_wrap(raw)
    yield from _of_hooks(raw)
    yield from _of_sinks(raw)
    for each in objects_of(raw):
        path = each.path
        yield EntryCall(
            each.entry, (*path, "entry"), (), (*path, "args"), is_argument=True, is_partial=each.is_partial
        )
    for name, text in table_at(raw, "snapshots", "include").items():
        if isinstance(text, str):
            yield EntryCall(text, ("snapshots", "include", name), is_object=True)


def _of_data(raw: TomlTable) -> Iterator[EntryCall]:
    """Yield the sets of a mixture, collators with arguments, and the functions of a sampler."""
    for path, table in tables_in_array(raw, "dataset", "mix"):
        if isinstance(text := table.get("entry"), str):
            yield EntryCall(text, (*path, "entry"), (), (*path, "args"))
    for path, table in collate_tables(raw):
        if isinstance(text := table.get("entry"), str):
            is_called = (
                table.get("partial") is True
            )  # called with samples; if not partial, its result is called with them
            given = ("samples",) if is_called else ()
            yield EntryCall(text, (*path, "entry"), given, (*path, "args"), is_argument=True)
    for key, text in table_at(raw, "dataset", "sampler").items():
        if isinstance(text, str) and ":" in text:  # else a column of the data
            yield EntryCall(text, ("dataset", "sampler", key), ("the dataset",))


def _of_metrics(table: TomlTable, path: KeyPath, batch: tuple[str, ...]) -> Iterator[EntryCall]:
    """Yield the metrics of an evaluation set; *batch*: arguments of a function that is a mean over a batch."""
    for name, metric in table_at(table, "metrics").items():
        where: KeyPath = (*path, name)
        if isinstance(metric, str):
            given = ("loss",) if metric.startswith(OF_LOSS) else batch
            yield EntryCall(metric, where, given, is_metric=True)
        elif isinstance(metric, dict) and isinstance(entry := metric.get("entry"), str):
            given = ("outputs", "targets") if {"outputs", "targets"} & metric.keys() else batch
            given = {"set": ("outputs", "targets"), "loss": ("loss",)}.get(str(metric.get("over")), given)
            given = ("loss",) if entry.startswith(OF_LOSS) else given
            yield EntryCall(entry, (*where, "entry"), given, (*where, "args"), is_metric=True)


def _of_groups(raw: TomlTable) -> Iterator[EntryCall]:
    """Yield the classes that groups of parameters name, and the optimizer with the arguments of each group."""
    optimizer = table_at(raw, "optimizer").get("entry")
    for path, group in tables_in_array(raw, "optimizer", "groups"):
        module = group.get("module")
        if isinstance(module, str):
            yield EntryCall(module, (*path, "module"), is_class=True)
        for number, each in enumerate(module if isinstance(module, list) else []):
            if isinstance(each, str):
                yield EntryCall(each, (*path, "module", number), is_class=True)
        if isinstance(optimizer, str) and table_at(group, "args"):
            call = EntryCall(optimizer, ("optimizer", "entry"), ("the parameters",), (*path, "args"))
            yield call._replace(is_partial=True, as_method=())


def _of_wrap(raw: TomlTable) -> Iterator[EntryCall]:
    """Yield the classes of modules that a sharded model gathers as a whole."""
    named = table_at(raw, "parallel").get("wrap")
    for number, each in enumerate(named if isinstance(named, list) else []):
        if isinstance(each, str):
            yield EntryCall(each, ("parallel", "wrap", number), is_class=True)


def _of_hooks(raw: TomlTable) -> Iterator[EntryCall]:
    for name, hook in table_at(raw, "hooks").items():
        if isinstance(hook, str):
            yield EntryCall(hook, ("hooks", name), ("context",))
        elif isinstance(hook, dict) and isinstance(text := hook.get("entry"), str):
            path = ("hooks", name)
            yield EntryCall(text, (*path, "entry"), ("context",), (*path, "args"))


def _of_sinks(raw: TomlTable) -> Iterator[EntryCall]:
    for name, sink in table_at(raw, "logging", "custom").items():
        if isinstance(sink, dict) and isinstance(text := sink.get("entry"), str):
            yield EntryCall(text, ("logging", "custom", name, "entry"), ("options",), is_argument=True)


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
