"""Checks the arguments of an entry point against its signature."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Literal, NamedTuple

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.entry_points.calls import takes_optimizer_later, takes_optimizers
from elasticflow.jobfile.entry_points.object_arguments import not_passable
from elasticflow.jobfile.entry_points.own_steps import check_own_step
from elasticflow.jobfile.text.layers import table_at, value_at
from elasticflow.jobfile.type_checks.annotations import (
    ObjectTable,
    fits,
    in_words,
    in_words_of_default,
    near_value,
    nearest_choice,
)
from elasticflow.python_source.bindings import origin
from elasticflow.python_source.modules import Definition, UnresolvedError
from elasticflow.python_source.syntax import decorators_of, dotted_names, unquoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.entry_points.calls import EntryPoint
    from elasticflow.python_source.resolve import Resolver
    from elasticflow.python_source.signatures import Parameter, Signature

_BY_PLACE = "it is taken by place only, and a job file gives arguments by name: name a function of yours that passes it on"
_MOST_SHOWN = 600  # characters of the list of arguments that a function takes
_MOST_NEAR = 50  # near names are searched for at most this many unknown arguments of one call


class ArgumentCheck:
    """The check of an entry point's arguments.

    Attributes:
        depends_on_others: The problems also follow from keys other than the entry and its arguments.
    """

    def __init__(self, entry: EntryPoint, definition: Definition, signature: Signature) -> None:
        self._entry, self._definition, self._signature = entry, definition, signature
        self._by_place_only = {each.name for each in signature.positional_only}
        # A step's third argument, unless the step is a method: the optimizers, if it has that name.
        self._third_of_step: str | None = None
        self.depends_on_others = False

    def problems(self) -> list[Diagnostic]:
        """Return the problems of the arguments."""
        given = len(self._entry.call.given)
        beside: list[Diagnostic] = []
        names = [each.name for each in (*self._signature.positional_only, *self._signature.positional)]
        if self._entry.call.path == ("optimizer", "entry"):
            if names[:1] == ["model"] and (wrong := makes_its_own_groups(self._entry)):
                self.depends_on_others = True
                return [wrong]
            if self._entry.call.is_partial and not self._names_options():
                return []
        if self._entry.call.path == ("model", "step") and given == 2:
            self._third_of_step = next(iter(names[2:3]), None)
        if self._entry.call.path == ("model", "step") and takes_optimizers(names, is_method=given == 1):
            self.depends_on_others, given = True, given + 1
            beside = list(check_own_step(self._entry.source))
        if self._entry.call.path == ("lr_scheduler", "entry") and takes_optimizer_later(
            self._entry.call.text, names
        ):
            given, self._entry.call = 0, self._entry.call._replace(given=(), named=("optimizer",))
        if self._entry.call.is_metric and names[:2] == ["y_true", "y_pred"]:
            beside.append(self._of_sklearn())
        arguments = self._entry.named_arguments()
        beside += [
            self._plain(each) for each in dataclasses_meant(self._signature, arguments, self._entry.resolver)
        ]
        twice = [Misfit("twice", name) for name in self._entry.call.named if name in arguments]
        arguments = {**arguments, **dict.fromkeys(self._entry.call.named, 0)}
        found = [*twice, *misfits(self._signature, given, arguments)]
        misspelt = {each.near for each in found if each.kind == "unknown"}
        return beside + [
            self._misfit(each, arguments)
            for each in found
            if not (each.kind == "missing" and (self._entry.call.is_partial or each.name in misspelt))
            if each.kind != "type" or not_passable(arguments[each.name]) is None  # else said already
            if each.kind != "unknown" or each.name.isidentifier()  # else said already
        ]

    def _of_sklearn(self) -> Diagnostic:
        text = self._entry.call.text
        message = f"{text} takes the targets first, and classes: a metric is called with outputs, targets"
        name = text.rpartition(":")[2]
        remedy = (
            f"let a function of yours (outputs, targets) call it: {name}(targets, outputs.argmax(1), ...);\n"
            'over the whole set with { entry = "module:function", over = "set" }'
        )
        return self._entry.problem(codes.BAD_ARGUMENT, message, remedy, "warning")

    def _names_options(self) -> bool:
        """Return whether the optimizer's arguments are options of its groups; False for a function's, which may be anything."""
        others = len(self._signature.positional) + len(self._signature.named)
        return isinstance(self._definition.node, ast.ClassDef) and others > 1

    def _plain(self, argument: tuple[str, Definition]) -> Diagnostic:
        """Return the problem of a plain table in place of a dataclass."""
        name, kind = argument
        assert isinstance(kind.node, ast.ClassDef)
        message = f'{self._entry.call.text} takes {kind.node.name} as "{name}", not a plain table'
        entry = f"{kind.module.name}:{kind.node.name}"
        remedy = (
            f'write {name} = {{ entry = "{entry}", args = {{ ... }} }}\ndefined at {self._definition.where}'
        )
        where = (*(self._entry.call.args or ()), name)
        return self._entry.source.problem(codes.BAD_ARGUMENT_TYPE, message, where, remedy=remedy)

    def _misfit(self, misfit: Misfit, arguments: dict[str, object]) -> Diagnostic:
        defined = f"defined at {self._definition.where}"
        at_key = (*(self._entry.call.args or ()), misfit.name)
        if misfit.name in self._entry.call.named and misfit.kind != "twice":
            message = f'{self._entry.call.text} takes no whole number as "{misfit.name}"'
            remedy = "with dataset.shards it is called for each data shard, with shard (its number, from 0) and shards (how many)"
            return self._entry.problem(codes.BAD_ARGUMENT, message, f"{remedy}\n{defined}")
        match misfit.kind:
            case "unknown":
                message = f'{self._entry.call.text} takes no argument "{misfit.name}"'
                remedy = f"{self._instead(misfit, at_key)}\n{defined}"
                return self._entry.problem(codes.BAD_ARGUMENT, message, remedy, path=at_key)
            case "twice":
                message = f'{self._entry.call.text} gets "{misfit.name}" from elasticflow already'
                return self._entry.problem(codes.BAD_ARGUMENT, message, "leave it out", path=at_key)
            case "type":
                message = f'{self._entry.call.text} takes {misfit.wanted} as "{misfit.name}", not {show(arguments[misfit.name])}'
                value = arguments[misfit.name]
                remedy = f"did you mean {misfit.near}?\n{defined}" if misfit.near else defined
                if misfit.near and isinstance(value, str) and misfit.near[0] not in "\"'[":
                    remedy = f"without quotes: {misfit.name} = {misfit.near}\n{defined}"
                if isinstance(value, str) and misfit.wanted.startswith("Callable"):
                    remedy = f'name a function: {misfit.name} = {{ entry = "module:function", partial = true }}\n{defined}'
                if isinstance(value, list) and len(value) > 1 and not misfit.near:
                    remedy = (
                        f"several values, one run each: {dotted(at_key)} = [...] in [matrix.axes]\n{defined}"
                    )
                return self._entry.source.problem(codes.BAD_ARGUMENT_TYPE, message, at_key, remedy=remedy)
            case "missing":
                message = f'{self._entry.call.text} needs the argument "{misfit.name}"'
                remedy = self._how_to_give(misfit.name)
                return self._entry.problem(codes.BAD_ARGUMENT, message, f"{remedy}\n{defined}")
            case "places":
                given, number = ", ".join(self._entry.call.given), len(self._entry.call.given)
                several = "s" if number > 1 else ""
                message = f"{self._entry.call.text} is called with {number} argument{several} ({given}), but takes {misfit.wanted}"
                return self._entry.problem(codes.BAD_ARGUMENT, message, f"let it take {given}\n{defined}")

    def _how_to_give(self, name: str) -> str:
        call = self._entry.call
        if call.args is not None and name in self._by_place_only:
            return _BY_PLACE
        if call.args is not None:
            add = f"add to {dotted(call.args)}: {name} = ..."
            is_class = isinstance(self._definition.node, ast.ClassDef)
            if call.path[-2:] == ("collate", "entry") and not call.given and not is_class:
                return f"{add}; or, if it is itself what is called with samples: partial = true"
            if call.is_argument or call.is_metric or call.path[:2] == ("dataset", "mix"):
                return add
            table = f"[{call.args[0]}]" if len(call.args) == 2 else dotted(call.args[:-1])
            is_given = value_at(call.args, self._entry.source.raw) is not None
            return add if is_given else f"add to {table}: args = {{ {name} = ... }}"
        if name == "batch_idx" and call.path == ("model", "step"):
            return (
                'that is Lightning\'s training_step: step = "elasticflow.lightning:training_step" calls it and logs what '
                'self.log logs; or let a function step(model, batch) return {"loss": loss, "accuracy": accuracy}'
            )
        if name == self._third_of_step:
            if not name.startswith("opt"):
                return "a step is called with (model, batch), and takes the batch apart itself: x, y = batch"
            return 'call it "optimizers" to be given what optimizer.entry returns'
        if self._entry.call.is_metric and isinstance(self._definition.node, ast.ClassDef):
            return f'write {{ entry = "{self._entry.call.text}", args = {{ {name} = ... }} }}'
        given = ", ".join(self._entry.call.given) or "nothing"
        return (
            f"{'.'.join(map(str, self._entry.call.path))} is called with {given}: give the argument a default"
        )

    def _instead(self, misfit: Misfit, path: KeyPath) -> str:
        """Return the remedy for an argument that is not taken: another argument, or a key of the table around it."""
        from elasticflow.jobfile.wording.foreign_names import meaning_of
        from elasticflow.jobfile.wording.type_descriptions import keys_at
        from elasticflow.jobfile.wording.unknown_keys import has_header

        if misfit.name in self._by_place_only:
            return _BY_PLACE
        table, args = path[:1], path[:-1]
        near, meaning = misfit.near, meaning_of(misfit.name)
        if near is None and meaning is not None and meaning.key.startswith(f"{dotted(args)}."):
            name = meaning.key.removeprefix(f"{dotted(args)}.")
            near = name if name in misfit.wanted.split(", ") else None
        if near is not None:
            return f'did you mean "{near}"?'
        if len(args) == 2 and misfit.name in keys_at(table):
            where = (
                f"above [{dotted(args)}]" if has_header(self._entry.source, args) else f"out of {args[-1]}"
            )
            return f"it is a key of [{dotted(table)}]: move it up, {where}"
        wanted = misfit.wanted
        if len(wanted) > _MOST_SHOWN:
            wanted = f"{wanted[:_MOST_SHOWN].rpartition(', ')[0]}, ..."
        return f"it takes: {wanted}"


def makes_its_own_groups(entry: EntryPoint) -> Diagnostic | None:
    """Return the problem of groups beside an optimizer's factory that gets the model; None for a job without groups."""
    if not table_at(entry.source.raw, "optimizer").get("groups"):
        return None
    message = f"{entry.call.text} is given the model and makes its own groups: optimizer.groups would change nothing"
    remedy = "leave optimizer.groups out, or name a function that takes parameters, such as torch.optim:AdamW"
    where = ("optimizer", "groups")
    return entry.source.problem(codes.GROUPS_UNUSED, message, where, at_key=True, remedy=remedy)


def dataclasses_meant(
    signature: Signature, arguments: dict[str, object], resolver: Resolver
) -> Iterator[tuple[str, Definition]]:
    """Yield each argument that is a table in place of a dataclass, with the dataclass."""
    for parameter in (*signature.positional, *signature.named):
        value = arguments.get(parameter.name)
        # A table with an `entry` is an object, or is reported as a table that only resembles an object.
        if isinstance(value, dict) and not isinstance(value, ObjectTable) and "entry" not in value:
            definition = annotated_class(parameter, resolver)
            if definition is not None and _is_dataclass(definition):
                yield parameter.name, definition


def annotated_class(parameter: Parameter, resolver: Resolver) -> Definition | None:
    """Return the class in a parameter's annotation, also `... | None`; None if reading does not show one."""
    annotation = None if parameter.annotation is None else unquoted(parameter.annotation)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):  # Config | None
        annotation = annotation.left
    names = dotted_names(annotation) if annotation is not None else []
    if not names:
        return None
    try:
        resolved = resolver.dotted(parameter.module, names)
    except UnresolvedError:
        return None
    is_class = isinstance(resolved, Definition) and isinstance(resolved.node, ast.ClassDef)
    return resolved if isinstance(resolved, Definition) and is_class else None


def _is_dataclass(definition: Definition) -> bool:
    assert isinstance(definition.node, ast.ClassDef)
    decorators = {origin(definition.module, each) for each in decorators_of(definition.node)}
    return "dataclasses.dataclass" in decorators


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
