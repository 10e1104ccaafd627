"""The entry points a job names, and what each is called with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.jobfile.entry_points.object_arguments import objects_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.jobfile.diagnostics.positions import KeyPath

_AS_METHODS: dict[tuple[str, str], tuple[str, ...]] = {
    ("optimizer", "entry"): (),
    ("model", "step"): ("batch",),
}


class Use(NamedTuple):
    """One entry point and how it is called.

    Attributes:
        text: `module:attribute`.
        path: Its key.
        given: Names of what is passed by place.
        args: Where its named arguments stand; None when it takes none.
        named: Names of what is passed by name besides.
        is_object: It is not called: the object itself is meant, for its state.
        is_argument: It makes an argument of another entry point.
        is_partial: Its arguments need not be all.
        as_method: What is passed by place if it turns out to be a method of the model's class; None if it may not be one.
    """

    text: str
    path: KeyPath
    given: tuple[str, ...] = ()
    args: KeyPath | None = None
    named: tuple[str, ...] = ()
    is_object: bool = False
    is_argument: bool = False
    is_partial: bool = False
    as_method: tuple[str, ...] | None = None


def uses_in(raw: dict[str, Any]) -> Iterator[Use]:
    """Yield every entry point of a merged job, whatever else is wrong with its table."""
    batch = ("model", "batch") if "step" in inside(raw, "model") else ("outputs", "targets")
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
        ("evaluation", "entry", (), True),
    ]
    for table, key, given, takes_args in fixed:
        text = inside(raw, table).get(key)
        if isinstance(text, str):
            args = (table, "args") if takes_args else None
            is_sharded = (table, key) == ("dataset", "entry") and "shards" in inside(raw, "dataset")
            as_method = _AS_METHODS.get((table, key))
            named = ("shard", "shards") if is_sharded else ()
            yield Use(text, (table, key), given, args, named, as_method=as_method)
    for name, text in inside(inside(raw, "evaluation"), "metrics").items():
        if isinstance(text, str):
            yield Use(text, ("evaluation", "metrics", name), batch)
    for each in objects_of(raw):
        path = each.path
        yield Use(
            each.entry, (*path, "entry"), (), (*path, "args"), is_argument=True, is_partial=each.is_partial
        )
    for name, text in inside(inside(raw, "snapshots"), "include").items():
        if isinstance(text, str):
            yield Use(text, ("snapshots", "include", name), is_object=True)


def takes_optimizers(names: Sequence[str]) -> bool:
    """Return whether a step with parameters of these names is called with the optimizers, which it moves itself."""
    return list(names[2:3]) == ["optimizers"]


def inside(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of the raw dict; empty when there is none."""
    inner = raw.get(name)
    return inner if isinstance(inner, dict) else {}
