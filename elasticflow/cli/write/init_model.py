"""The job of `elasticflow init MODEL_FILE`: from flags and from the file, else from answers; nothing is made up."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.write.init_files import NewJob
from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.entry_points.arguments import annotated_class
from elasticflow.jobfile.entry_points.object_arguments import with_objects_marked
from elasticflow.jobfile.tables.types import ENTRY
from elasticflow.jobfile.text.layers import flag_layer, lay_over
from elasticflow.jobfile.text.read import UnreadableError
from elasticflow.jobfile.type_checks.annotations import fits, in_words, ways
from elasticflow.jobfile.wording.foreign_names import ENTRIES, plain
from elasticflow.python_source.modules import CannotTellError, Definition, UnresolvedError
from elasticflow.python_source.signatures import signature_of
from elasticflow.scaffold.candidates import (
    ROLES,
    candidates_in,
    locate_module,
    method_of,
    resolver_of,
    wholes,
)
from elasticflow.scaffold.job_text import text_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.cli.write.init_files import InitOptions
    from elasticflow.jobfile.text.read import TomlTable
    from elasticflow.python_source.signatures import Parameter, Signature
    from elasticflow.scaffold.candidates import Candidate, Role

_TABLES = ("model", "optimizer", "dataset")
_OBJECT_KEYS = {"entry", "args", "partial"}
_TOGETHER = (
    "models that are trained together need a module that holds them: `elasticflow init --example dcgan`"
)


def job_for_model(options: InitOptions, file: Path, root: Path, *, quiet: bool) -> NewJob:
    """Return the job for a model that a file defines; print its candidates, on standard error if *quiet*.

    Raises:
        ScaffoldError: the file cannot be read, has no such model, dataset or loss, or a key has no value and the command may not ask.
    """
    return _ModelJob(options, file, root, quiet=quiet).made()


class _ModelJob:
    """The keys of a job, and the missing ones."""

    def __init__(self, options: InitOptions, file: Path, root: Path, *, quiet: bool) -> None:
        self.options, self.file, self.root = options, file, root
        self.location = locate_module(file, root)
        self.resolver = resolver_of(self.location, root)
        self.found = candidates_in(file, self.location, self.resolver)
        self.missing: list[tuple[str, str]] = []
        if self.found:
            click.echo("\n".join((f"found in {file} and beside it", *_lines(self.found))), err=quiet)

    def made(self) -> NewJob:
        model_keys, optimizer, dataset_keys = self._overridden()
        model = self._entry("model", self.options.model or model_keys.get("entry"))
        model_args = self._args("model.args", model, model_keys.get("args"))
        loss = self._loss(model, model_keys)
        dataset = self._entry("dataset", self.options.dataset or dataset_keys.get("entry"))
        # With dataset.shards, each call gets these two arguments.
        passed = ("shard", "shards") if "shards" in dataset_keys else ()
        dataset_args = self._args("dataset.args", dataset, dataset_keys.get("args"), passed=passed)
        batch_size = self.options.batch_size or 32
        tables = {
            "model": {"entry": model, "args": model_args, **loss, **_others(model_keys)},
            "optimizer": optimizer,
            "dataset": {
                "entry": dataset,
                "args": dataset_args,
                "global_batch_size": batch_size,
                **_others(dataset_keys),
            },
        }
        if self.missing:
            raise self._refusal()
        name = self.options.name or _job_name(model.rpartition(":")[2])
        epochs, workers = self.options.epochs or 5, self.options.workers
        text = text_of(name, tables, path=self.location.path, epochs=epochs, workers=workers)
        job_file = self.options.output or self.root / "jobs" / f"{name}.toml"
        return NewJob(self.root, job_file, text, notes=self._notes(model))

    def _refusal(self) -> ScaffoldError:
        names = "".join(f"\n  {what}" for what, _ in self.missing)
        flags = " ".join(flag for _, flag in self.missing)
        together = f"\n{_TOGETHER}" if self.missing[0][0].startswith("model.entry") else ""
        several = "s" if len(self.missing) > 1 else ""
        return ScaffoldError(f"{self.file} does not tell the key{several}{names}", f"give: {flags}{together}")

    def _overridden(self) -> list[TomlTable]:
        """Return the keys of model, optimizer and dataset given by `--set`, with the optimizer's defaults."""
        raw: TomlTable = {"optimizer": {"entry": "torch.optim:AdamW", "args": {"lr": 1e-3}}}
        for text in self.options.overrides:
            try:
                raw = lay_over(raw, flag_layer(text))
            except UnreadableError as error:
                raise click.BadParameter(f"{text}: no TOML value", param_hint="--set") from error
        tables = [raw.get(table, {}) for table in _TABLES]
        if not raw.keys() <= set(_TABLES) or not all(map(_is_table, tables)):
            raise click.BadParameter(
                "write it like model.args.width=64; keys of other tables can be edited in the file",
                param_hint="--set",
            )
        return tables

    def _entry(self, role: Role, given: str | None) -> str:
        """Return the entry point for a role: from a flag, the only candidate, or an answer.

        Empty if it is missing.
        """
        if given is not None:
            return self._named(role, given)
        offered = wholes(self.found, role)
        if role == "model" and not offered:
            raise ScaffoldError(
                f"{self.file} defines no nn.Module",
                "name the file that does, or a function that returns one: --model NAME; a training script: --script",
            )
        if len(offered) == 1:
            return offered[0].entry
        key, flag = ("model.loss", "--loss") if role == "loss" else (f"{role}.entry", f"--{role}")
        if not self.options.may_ask:
            self.missing.append(_missing_entry(key, flag, offered))
            return ""
        if offered:
            return _chosen(role, offered)
        return self._asked_entry(role, f"{key} (module:name)")

    def _named(self, role: Role, name: str) -> str:
        """Return the entry point of a name: a candidate, another name of the model's file, or a loss of torch."""
        offered = [each for each in self.found if each.role == role]
        if ":" in name:
            return name
        entry = next((each.entry for each in offered if each.name == name), f"{self.location.module}:{name}")
        if self._is_there(entry):
            return entry
        if role == "loss" and (of_torch := ENTRIES["model.loss"].get(plain(name))) is not None:
            return of_torch
        names = ", ".join(each.name for each in offered) or "none"
        raise ScaffoldError(f"{self.file} has no {role} {name}", f"there are: {names}")

    def _is_there(self, entry: str) -> bool:
        """Return whether an entry point exists, or reading cannot tell."""
        try:
            self.resolver.entry(entry)
        except CannotTellError:
            return True
        except UnresolvedError:
            return False
        return True

    def _loss(self, model: str, keys: TomlTable) -> TomlTable:
        """Return `loss` or `step` of the model's table; empty if it is missing."""
        if keys.get("step") is not None or keys.get("loss") is not None:
            return {}
        if self.options.loss is not None:
            return {"loss": self._named("loss", self.options.loss)}
        steps = [each.entry for each in wholes(self.found, "step")]
        own = method_of(model, "training_step", self.resolver) if model else None
        # self and batch; Lightning's takes a batch_idx, too
        if own is not None and isinstance(own.node, ast.FunctionDef) and len(own.node.args.args) == 2:
            steps.insert(0, f"{model}.training_step")
        if len(steps) == 1 or (steps and steps[0].endswith(".training_step")):
            return {"step": steps[0]}
        if self.options.may_ask and not wholes(self.found, "loss"):
            question = "model.loss, called with outputs and targets (module:name, or cross_entropy, mse_loss ...; none: a step)"
            if loss := self._asked_entry("loss", question, default=""):
                return {"loss": loss}
            return {
                "step": self._asked_entry("step", "model.step, called with model and batch (module:name)")
            }
        return {"loss": self._entry("loss", None)}

    def _asked_entry(self, role: Role, question: str, default: str | None = None) -> str:
        """Ask for an entry point until the answer names one, or is empty if the default is empty."""
        while True:
            text = str(click.prompt(question, type=str, default=default, show_default=False)).strip()
            if text == default:
                return text
            is_entry = re.fullmatch(ENTRY, text) is not None
            try:
                if not is_entry or self._is_there(text):
                    return self._named(role, text)
            except ScaffoldError:
                pass
            click.echo(f"  {text!r} {'does not exist' if is_entry else 'is not of the form module:name'}")

    def _args(
        self,
        key: str,
        entry: str,
        given: TomlTable | None,
        *,
        passed: Sequence[str] = (),
        is_object: bool = False,
    ) -> TomlTable:
        """Return the arguments of a class or function, with a value for each parameter without a default.

        A parameter annotated with a class of the job's own code gets an object, made by an entry of its own.
        """
        args = dict(given or {})
        signature = self._signature(entry) if entry else None
        for parameter in [] if signature is None else [*signature.positional, *signature.named]:
            name, where = parameter.name, f"{key}.{parameter.name}"
            made = self._object_entry(parameter)
            value = args.get(name)
            is_meant = isinstance(value, dict) and value.keys() <= _OBJECT_KEYS
            if made is not None and (is_meant or (value is None and not parameter.is_optional)):
                table = value or {}
                entry_of = table.get("entry", made)
                inner = self._args(f"{where}.args", entry_of, table.get("args"), is_object=True)
                args[name] = {**table, "entry": entry_of, "args": inner}
            elif name not in args and not parameter.is_optional and name not in passed:
                args[name] = self._asked_value(where, parameter, entry)
            elif name not in args and is_object and (default := _constant(parameter.default)) is not None:
                args[name] = default  # written out, so that it can be changed
        return args

    def _signature(self, entry: str) -> Signature | None:
        """Return the signature of an entry point; None if reading does not show it: the check of the job says why."""
        try:
            definition = self.resolver.entry(entry)
            return signature_of(definition, self.resolver) if isinstance(definition, Definition) else None
        except (UnresolvedError, RecursionError):
            return None

    def _object_entry(self, parameter: Parameter) -> str | None:
        """Return the entry point of the class in a parameter's annotation, if the class is the job's own code."""
        made = annotated_class(parameter, self.resolver)
        if made is None or not made.module.is_own or not isinstance(made.node, ast.ClassDef):
            return None
        entry = f"{made.module.name}:{made.node.name}"
        return None if self._signature(entry) is None else entry

    def _asked_value(self, key: str, parameter: Parameter, entry: str) -> Any:
        """Ask for an argument until the answer fits; if the command may not ask, note that the argument is missing."""
        annotation, module = parameter.annotation, parameter.module
        takes = "a value" if annotation is None else in_words(annotation, module)
        if not self.options.may_ask:
            self.missing.append((f"{key} ({takes}), which {entry} needs", f"--set {key}=VALUE"))
            return None
        while True:
            text = str(click.prompt(f"{key} of {entry} ({takes})", type=str))
            try:
                value = flag_layer(f"v={text}").raw["v"]
            except (UnreadableError, KeyError):
                value = text
            for each in (value, *ways(value)):
                if fits(with_objects_marked(each), annotation, module):
                    return each
            click.echo(
                f'  {text!r} is not {takes}; an object is {{ entry = "module:name", args = {{ ... }} }}'
            )

    def _notes(self, model: str) -> list[str]:
        name = "configure_optimizers"
        if method_of(model, name, self.resolver) is None:
            return []
        setting = f'optimizer.entry = "{model}.{name}", its arguments in optimizer.args'
        return [f"{model}.{name} was not taken for the optimizer; to take it: {setting}"]


def _others(keys: TomlTable) -> TomlTable:
    return {key: value for key, value in keys.items() if key not in {"entry", "args"}}


def _is_table(value: object) -> bool:
    """Return whether `--set` gives a table whose entry points are texts, and whose arguments are a table."""
    if not isinstance(value, dict) or not isinstance(value.get("args", {}), dict):
        return False
    return all(isinstance(value.get(key, ""), str) for key in ("entry", "loss", "step"))


def _missing_entry(key: str, flag: str, offered: Sequence[Candidate]) -> tuple[str, str]:
    if offered:
        listed = ", ".join(f"{each.entry} ({each.definition.where})" for each in offered)
        return f"{key}, one of {listed}", f"{flag} NAME"
    if key == "model.loss":
        return (
            f"{key}, a function of outputs and targets, or model.step",
            f"{flag} NAME (or --set model.step=MODULE:NAME)",
        )
    return f"{key}, a function or class that gives samples", f"{flag} MODULE:NAME"


def _chosen(role: Role, offered: Sequence[Candidate]) -> str:
    for number, each in enumerate(offered, 1):
        click.echo(f"  {number}  {each.entry:<24}  {each.definition.where}")
    number = click.prompt(f"which {role}", type=click.IntRange(1, len(offered)), default=1)
    return offered[number - 1].entry


def _constant(node: ast.expr | None) -> bool | int | float | str | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, bool | int | float | str) else None


def _job_name(model: str) -> str:
    """Return a job's name from its model's name: `resnet18` from ResNet18, `policy-network` from PolicyNetwork."""
    return re.sub(r"(?<=[a-z]{4})(?=[A-Z][a-z]{3})", "-", model).lower().strip("_")


def _lines(found: Sequence[Candidate]) -> list[str]:
    ordered = sorted(found, key=lambda each: ROLES.index(each.role))
    return [
        f"  {each.role:<8} {each.entry:<24}  {each.definition.where}"
        + ("  part of another" if each.is_part else "")
        for each in ordered
    ]
