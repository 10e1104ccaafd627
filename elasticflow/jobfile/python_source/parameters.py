"""What a call takes, and whether given arguments fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.python_source.annotations import fits, in_words, nearest_choice
from elasticflow.jobfile.python_source.modules import CannotTellError
from elasticflow.jobfile.python_source.near_values import in_words_of_default, near_value

if TYPE_CHECKING:
    import ast
    from collections.abc import Sequence

    from elasticflow.jobfile.python_source.modules import Module


class Parameter(NamedTuple):
    """One parameter.

    Attributes:
        name: Its name.
        is_optional: It has a default.
        annotation: Its annotation, if there is one.
        module: Whose names the annotation uses.
        default: Its default, if it has one.
    """

    name: str
    is_optional: bool
    annotation: ast.expr | None
    module: Module
    default: ast.expr | None = None


@dataclass(frozen=True)
class Signature:
    """What a call takes; `self` is left out.

    Attributes:
        positional_only: Cannot be given by name.
        positional: By place or by name.
        named: By name only.
        takes_any_positional: Has `*args`.
        takes_any_named: Has `**kwargs`.
    """

    positional_only: list[Parameter] = field(default_factory=list)
    positional: list[Parameter] = field(default_factory=list)
    named: list[Parameter] = field(default_factory=list)
    takes_any_positional: bool = False
    takes_any_named: bool = False

    def after(self, num_places: int, names: Sequence[str]) -> Signature:
        """Return what is left to give when the first places are taken and *names* have a value.

        Raises:
            CannotTellError: it takes fewer, or has no such name.
        """
        only, by_place = self.positional_only[num_places:], list(self.positional)
        by_place = by_place[max(0, num_places - len(self.positional_only)) :]
        if num_places > len(self.positional_only) + len(self.positional) and not self.takes_any_positional:
            raise CannotTellError("more arguments are given in advance than it takes")
        known = [each.name for each in (*by_place, *self.named)]
        if not self.takes_any_named and not set(names) <= set(known):
            raise CannotTellError("arguments are given in advance that it does not take")
        given = [each._replace(is_optional=each.is_optional or each.name in names) for each in by_place]
        first = next((n for n, each in enumerate(given) if each.name in names), len(given))
        named = [each._replace(is_optional=each.is_optional or each.name in names) for each in self.named]
        return replace(self, positional_only=only, positional=given[:first], named=[*given[first:], *named])


class Misfit(NamedTuple):
    """One argument that does not fit.

    Attributes:
        kind: unknown, missing, twice (given by place already), places (too many), or type.
        name: Name of the parameter or of the argument.
        wanted: What is taken instead: names, or a type in words.
        near: The nearest name or value, as it would be written.
    """

    kind: Literal["unknown", "missing", "twice", "places", "type"]
    name: str
    wanted: str = ""
    near: str | None = None


def from_arguments(arguments: ast.arguments, module: Module, *, skip: int = 0) -> Signature:
    """Return the signature that a `def` writes down, less its first *skip* parameters."""
    by_place = [*arguments.posonlyargs, *arguments.args]
    num_required = len(by_place) - len(arguments.defaults)
    defaults = [*([None] * num_required), *arguments.defaults]
    parameters = [
        Parameter(each.arg, default is not None, each.annotation, module, default)
        for each, default in zip(by_place, defaults, strict=True)
    ]
    num_only = len(arguments.posonlyargs)
    if skip > len(by_place) and arguments.vararg is None:
        raise CannotTellError("it takes no `self`")
    named = [
        Parameter(each.arg, default is not None, each.annotation, module, default)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return Signature(
        positional_only=parameters[skip:num_only],
        positional=parameters[max(skip, num_only) :],
        named=named,
        takes_any_positional=arguments.vararg is not None,
        takes_any_named=arguments.kwarg is not None,
    )


def misfits(signature: Signature, num_places: int, arguments: dict[str, object]) -> list[Misfit]:
    """Return what does not fit when called with *num_places* positional and the named arguments."""
    by_place = [*signature.positional_only, *signature.positional]
    found: list[Misfit] = []
    if num_places > len(by_place) and not signature.takes_any_positional:
        found.append(Misfit("places", "", f"{len(by_place)} ({_listed([each.name for each in by_place])})"))
    filled = {
        each.name for each in signature.positional[: max(0, num_places - len(signature.positional_only))]
    }
    open_names = {
        each.name: each for each in (*signature.positional, *signature.named) if each.name not in filled
    }
    for name, value in arguments.items():
        if name in filled:
            found.append(Misfit("twice", name))
        elif parameter := open_names.get(name):
            found += _wrong_type(parameter, value)
        elif name not in open_names and not signature.takes_any_named:
            near_names = nearest(name, open_names)
            found.append(Misfit("unknown", name, _listed(list(open_names)), next(iter(near_names), None)))
    only = signature.positional_only[num_places:]
    required = [*only, *open_names.values()]
    found += [
        Misfit("missing", each.name)
        for each in required
        if not each.is_optional and (each in only or each.name not in arguments)
    ]
    return found


def _wrong_type(parameter: Parameter, value: object) -> list[Misfit]:
    """Return that a value is not of the parameter's type, if that is certain."""
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
