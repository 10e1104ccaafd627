"""The arguments of a call that do not fit a signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.type_checks.annotations import (
    fits,
    in_words,
    in_words_of_default,
    near_value,
    nearest_choice,
)

if TYPE_CHECKING:
    from elasticflow.python_source.signatures import Parameter, Signature

_MOST_NEAR = 50  # near names are searched for at most this many unknown arguments of one call


class Misfit(NamedTuple):
    """One argument that does not fit.

    Attributes:
        kind: unknown, missing, twice (given by position already), places (too many positions), or type.
        name: Name of the parameter or of the argument.
        wanted: The accepted names, or the accepted type in words.
        near: The nearest name or value, as the job file would write it.
    """

    kind: Literal["unknown", "missing", "twice", "places", "type"]
    name: str
    wanted: str = ""
    near: str | None = None


def misfits(signature: Signature, num_places: int, arguments: dict[str, object]) -> list[Misfit]:
    """Return the misfits of a call with *num_places* positional and the named arguments."""
    by_place = [*signature.positional_only, *signature.positional]
    wrong: list[Misfit] = []
    if num_places > len(by_place) and not signature.takes_any_positional:
        wrong.append(Misfit("places", "", f"{len(by_place)} ({_listed([each.name for each in by_place])})"))
    filled = {
        each.name for each in signature.positional[: max(0, num_places - len(signature.positional_only))]
    }
    open_names = {
        each.name: each for each in (*signature.positional, *signature.named) if each.name not in filled
    }
    wanted, num_unknown = _listed(list(open_names)), 0
    for name, value in arguments.items():
        if name in filled:
            wrong.append(Misfit("twice", name))
        elif parameter := open_names.get(name):
            wrong += _wrong_type(parameter, value)
        elif name not in open_names and not signature.takes_any_named:
            num_unknown += 1
            near_names = nearest(name, open_names) if num_unknown <= _MOST_NEAR else []
            wrong.append(Misfit("unknown", name, wanted, next(iter(near_names), None)))
    only = signature.positional_only[num_places:]
    required = [*only, *open_names.values()]
    wrong += [
        Misfit("missing", each.name)
        for each in required
        if not each.is_optional and (each in only or each.name not in arguments)
    ]
    return wrong


def _wrong_type(parameter: Parameter, value: object) -> list[Misfit]:
    """Return a misfit if a value is certainly not of the parameter's type, else nothing."""
    annotation, module = parameter.annotation, parameter.module
    if annotation is None:
        words = in_words_of_default(parameter.default, value)
        return [Misfit("type", parameter.name, words, near_value(value, words))] if words else []
    if fits(value, annotation, module):
        return []
    near = nearest_choice(value, annotation, module) or near_value(value, annotation, module)
    return [Misfit("type", parameter.name, in_words(annotation, module), near)]


def _listed(names: list[str]) -> str:
    return ", ".join(names) if names else "no arguments"
