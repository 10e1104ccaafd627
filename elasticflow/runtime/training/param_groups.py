"""Parameters of the model in groups, each with options of its own for the optimizer."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from elasticflow import events
from elasticflow.errors import JobKeyError
from elasticflow.runtime.process.torch_private import COMPILED_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from elasticflow.runtime.process.context import Worker

REST = "rest"
"""What the group of all other parameters is called."""
_MOST_NAMED = 5


@dataclass(frozen=True)
class Group:
    """One `[[optimizer.groups]]`: the parameters that match all its selectors and no earlier group's.

    Attributes:
        match: A glob, or several, one of which fits a name of the parameter, such as `*.bias`; `*` also stands for dots.
        ndim: Number of dimensions of a parameter, or several.
        module: A class, or several: the parameter belongs to a module of that class, or to one inside such a module.
        args: Options of the optimizer that override those of all parameters.
        name: Label in logged learning rates; None: its selectors are the label.
    """

    match: str | Sequence[str] | None = None
    ndim: int | Sequence[int] | None = None
    module: type[nn.Module] | Sequence[type[nn.Module]] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None

    @property
    def label(self) -> str:
        """Name of the group."""
        return self.selectors if self.name is None else self.name

    @property
    def selectors(self) -> str:
        """The selectors as a text."""
        dimensions = " or ".join(map(str, _several(self.ndim)))
        parts = [*_several(self.match), *([f"ndim {dimensions}"] if dimensions else [])]
        return ", ".join([*parts, *(kind.__name__ for kind in _several(self.module))])


def parameter_groups(model: nn.Module, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the model's parameters as torch's optimizers take groups: those of *groups* in their order, then the rest.

    A parameter is in the first group that takes it. Within a group parameters have the order of `model.parameters()`, so
    that the state of the optimizer means the same after each start.

    Raises:
        JobKeyError: a group takes no parameter; the message names similar parameters, or the group that took them.
    """
    names = _names(model)
    left = dict(model.named_parameters())
    made = []
    for number, group in enumerate(groups):
        taken = {key: p for key, p in left.items() if _takes(group, model, p, names[id(p)])}
        if not taken:
            raise _takes_none(groups, number, model)
        left = {key: p for key, p in left.items() if key not in taken}
        made.append({"params": list(taken.values()), "name": group.label, **group.args})
    if left:
        made.append({"params": list(left.values()), "name": REST})
    return made


def log_groups(worker: Worker, optimizer: Any, groups: Sequence[Group]) -> None:
    """Log what each group took, on rank 0.

    Raises:
        JobKeyError: the optimizer has no such option of a group.
    """
    require_options(optimizer, groups)
    if worker.rank == 0:
        worker.event(events.PARAMETERS_GROUPED, groups=list(taken_by(optimizer, groups)))


def require_options(optimizer: Any, groups: Sequence[Group]) -> None:
    """Make sure that the optimizer's groups have the options that the job gives them: others would change nothing.

    Raises:
        JobKeyError: it has no such option.
    """
    options = getattr(optimizer, "defaults", None)
    for number, group in enumerate(groups):
        for option in group.args:
            if options and option not in options:  # without defaults it reads its groups itself
                kind = type(optimizer).__name__
                raise JobKeyError(
                    f"optimizer.groups.{number}.args.{option}",
                    f"optimizer.groups[{number}].args.{option}: {kind} has no option `{option}` that groups can have otherwise",
                    f"groups may have: {', '.join(sorted(options))}",
                )


def taken_by(optimizer: Any, groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """Yield name, tensors, number of elements and own options of each group."""
    own = [{key: _plain(value) for key, value in group.args.items()} for group in groups]
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        yield {
            "name": group.get("name", str(number)),
            "tensors": len(group["params"]),
            "parameters": sum(0 if is_lazy(p) else p.numel() for p in group["params"]),
            "args": own[number] if number < len(own) else {},
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list | tuple) else repr(value)


def _several(value: Any) -> tuple[Any, ...]:
    """Return one, several or none as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Return by `id` of each parameter all names it has: one that is tied has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _takes(group: Group, model: nn.Module, parameter: nn.Parameter, names: Sequence[str]) -> bool:
    """Return True if a parameter matches all selectors of a group."""
    return (
        (group.match is None or any(_fits(name, each) for name in names for each in _several(group.match)))
        and (group.ndim is None or _ndim(parameter, names[0]) in _several(group.ndim))
        and (group.module is None or any(_is_inside(model, name, _several(group.module)) for name in names))
    )


def _fits(name: str, glob: str) -> bool:
    """Return True if a glob matches a name, as the name is without torch.compile."""
    return fnmatchcase(name.replace(f"{COMPILED_MODEL}.", ""), glob)


def _ndim(parameter: nn.Parameter, name: str) -> int:
    if is_lazy(parameter):
        raise JobKeyError(
            "optimizer.groups",
            f"optimizer.groups: {name} has no dimensions yet: it is made by the first batch",
            "select its group by `match` or `module`, or give the module its size",
        )
    return parameter.ndim


def _is_inside(model: nn.Module, name: str, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return True if a parameter's module, or a module around it, is of one of *kinds*."""
    path = name.split(".")[:-1]
    return any(isinstance(model.get_submodule(".".join(path[:end])), kinds) for end in range(len(path) + 1))


def _takes_none(groups: Sequence[Group], number: int, model: nn.Module) -> JobKeyError:
    """Return the error for a group that took no parameter."""
    group, names, key = groups[number], _names(model), f"optimizer.groups.{number}"
    parameters = dict(model.named_parameters())
    fitting = [p for p in parameters.values() if _takes(group, model, p, names[id(p)])]
    where = f"optimizer.groups[{number}] takes no parameter"
    if fitting:
        earlier = Counter(
            next(n for n, each in enumerate(groups) if _takes(each, model, p, names[id(p)])) for p in fitting
        )
        taken = ", ".join(f"{count} by groups[{each}]" for each, count in sorted(earlier.items()))
        message = f"{where}: what it selects is taken before it ({taken})"
        return JobKeyError(key, message, "the first group that fits counts: put it first")
    # The first of names that differ in numbers only.
    by_form = {re.sub(r"\d+", "0", name): name for name in reversed(parameters)}
    texts = [re.sub(r"\[.*?\]|[*?]", "", glob).strip(".") for glob in _several(group.match)] or [""]
    near = sorted(
        by_form.values(), key=lambda name: -max(SequenceMatcher(None, t, name).ratio() for t in texts)
    )
    told = ", ".join(_form(name, parameters[name], model) for name in near[:_MOST_NAMED])
    message = f"{where}: none of the {type(model).__name__} is {group.selectors}"
    return JobKeyError(key, message, f"the nearest are: {told}")


def _form(name: str, parameter: Any, model: nn.Module) -> str:
    kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
    return f"{name} of a {kind}" + ("" if is_lazy(parameter) else f", ndim {parameter.ndim}")
