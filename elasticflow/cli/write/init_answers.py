"""What goes into the job file of `elasticflow init`: from flags, from the model's file, else by asking."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticflow.errors import ScaffoldError
from elasticflow.jobfile.tables.types import ENTRY
from elasticflow.scaffold import begin
from elasticflow.scaffold.answers import coerced
from elasticflow.scaffold.example import loss_for, made_up_data, made_up_texts
from elasticflow.scaffold.job_text import Draft
from elasticflow.scaffold.shapes import shapes_of
from elasticflow.scaffold.steps import loss_of_outputs, step_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.scaffold.arguments import Argument, Config
    from elasticflow.scaffold.begin import Option
    from elasticflow.scaffold.steps import Step

_TABLES = ("model", "optimizer", "dataset")


@dataclass(frozen=True)
class InitOptions:
    """The command line; see `elasticflow init --help`."""

    model_file: Path | None
    output: Path | None
    name: str | None
    model: str | None
    dataset: str | None
    loss: str | None
    epochs: int | None
    batch_size: int | None
    workers: int | str
    overrides: tuple[str, ...]
    may_ask: bool


@dataclass
class NewJob:
    """What is to be written.

    Attributes:
        root: The project's root.
        job_file: Where the job goes.
        draft: The content of the job file.
        code: Text of the Python files that are written with it, by their path from the root.
        notes: What a person should know.
        to_write: The file in which a person has to write the loss before it can train.
        has_made_up_data: The data is generated, so one step is quickly tried.
    """

    root: Path
    job_file: Path
    draft: Draft
    code: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    to_write: str | None = None
    has_made_up_data: bool = False


def new_job(options: InitOptions) -> NewJob:
    """Return what is to be written.

    Raises:
        ScaffoldError: something is missing, and nobody may be asked.
    """
    from elasticflow.jobfile.project import project_root_of

    beside = options.output or Path.cwd() / "job.toml"
    root = project_root_of(beside.resolve())
    if options.model_file is None:
        return _example(options, root)
    return _ModelJob(options, options.model_file, root).made()


def _example(options: InitOptions, root: Path) -> NewJob:
    from dataclasses import replace

    if options.model or options.dataset or options.loss or options.overrides:
        raise click.UsageError("--model, --dataset, --loss and --set go with a model file: init FILE.py")
    name = options.name or "spirals"
    if not name.isidentifier():
        raise ScaffoldError(
            f'"{name}" cannot be a package', "give a name of letters, digits and _: --name NAME"
        )
    draft, code = begin.example(name, options.workers)
    draft = replace(
        draft,
        epochs=options.epochs or draft.epochs,
        global_batch_size=options.batch_size or draft.global_batch_size,
    )
    return NewJob(root, options.output or root / "jobs" / f"{name}.toml", draft, code, has_made_up_data=True)


class _ModelJob:
    """The job of a model that a file defines."""

    def __init__(self, options: InitOptions, file: Path, root: Path) -> None:
        self.options, self.file, self.root = options, file, root
        self.candidates = begin.options_in(file, root)
        self.given = _override_texts(options.overrides)
        self.arguments: dict[str, dict[str, Any]] = {
            "optimizer": {name: _value(f"v={text}") for name, text in self.given.get("optimizer", {}).items()}
        }
        self.step: Step | None = None
        self.code: dict[str, str] = {}
        self.notes: list[str] = []

    def made(self) -> NewJob:
        if self.options.model is None:
            begin.refuse_pair(self.candidates)
        model = self._pick("model", self.options.model)
        if model is None:
            raise ScaffoldError(
                f"{self.file} defines no nn.Module",
                "name the file that does, or a function that returns one: --model NAME; a training script: --script",
            )
        name = self.options.name or _job_name(model.candidate.name)
        self._fill("model", model)
        if (own := begin.own_optimizers(model)) is not None:
            setting = f'optimizer.entry = "{own}", its arguments in optimizer.args'
            self.notes.append(f"{own} was not taken for the optimizer; to take it: {setting}")
        own_step = begin.first_for(self.candidates, "step")
        if own_step is None and self.options.loss is None:
            module = model.location.module
            self.step = step_for(model.candidate, begin.long_losses(self.file), module)
        dataset, loss = self._data(model)
        loss, is_guessed = self._loss(model, loss)
        entry = own_step.entry if own_step is not None and self.options.loss is None else None
        if self.step is not None:
            entry = self._write_step(self.step)
        draft = Draft(
            name=name,
            path=model.location.path,
            model=model.entry,
            dataset=dataset,
            loss=loss,
            step=entry,
            loss_is_guessed=is_guessed,
            arguments=self.arguments,
            epochs=self.options.epochs or 5,
            global_batch_size=self.options.batch_size or 32,
            workers=self.options.workers,
        )
        job_file = self.options.output or self.root / "jobs" / f"{name}.toml"
        return NewJob(
            self.root,
            job_file,
            draft,
            self.code,
            self.notes,
            to_write=(str(self._beside("step")) if self.step is not None and self.step.is_draft else None),
            has_made_up_data=any(path.endswith("_data.py") for path in self.code),
        )

    def _write_step(self, step: Step) -> str:
        """Add a module with *step* to the files to write, beside the model's, and return its entry point."""
        path = self._beside("step")
        self.code[path.as_posix()] = step.text
        does = "a draft of a training step: write the loss there" if step.is_draft else "a training step"
        self.notes.append(f"{path} holds {does}, since {step.reason}")
        return f"{begin.locate_module(self.root / path, self.root).module}:training_step"

    def _beside(self, what: str) -> Path:
        """Return the path, from the root, of a file beside the model's: `net_step.py`."""
        folder = self.file.resolve().parent.relative_to(self.root.resolve())
        stem = self.file.stem if self.file.stem != "__init__" else self.file.resolve().parent.name
        return folder / f"{stem}_{what}.py"

    def _data(self, model: Option) -> tuple[str, str | None]:
        """Return the dataset's entry point, and the loss that goes with it if that is known."""
        option = None
        if self.options.dataset is not None and ":" in self.options.dataset:
            option = begin.option_named(self.options.dataset, self.root, model.location.path)
            if option is None:
                self._take_as_given("dataset")
                return self.options.dataset, None
        option = option or self._pick("dataset", self.options.dataset)
        if option is not None:
            if option.location.path != model.location.path:
                raise ScaffoldError(f"{option.entry} and {model.entry} are not found from the same folder")
            self._fill("dataset", option)
            return option.entry, begin.loss_by_samples(option)
        shapes = shapes_of(model.candidate, self.arguments.get("model", {}))
        if shapes is None or (self.step is not None and self.step.is_draft and shapes.outputs is None):
            if self.options.may_ask:
                self._take_as_given("dataset")
                return _ask_for_entry(model), None
            raise ScaffoldError(
                f"{self.file} has no dataset, and the layers of {model.candidate.name} do not tell what it takes",
                "write a function that returns samples, and name it: --dataset MODULE:NAME",
            )
        path = self._beside("data")
        follows = shapes.tokens is not None and shapes.tokens == shapes.outputs and self.step is not None
        text = made_up_texts if follows else made_up_data
        self.code[path.as_posix()] = text(model.candidate.name, shapes)
        self.notes.append(f"{path} holds made-up data of the model's shape: put your own in its place")
        location = begin.locate_module(self.root / path, self.root)
        return f"{location.module}:samples", loss_for(shapes)

    def _loss(self, model: Option, of_data: str | None) -> tuple[str | None, bool]:
        """Return the loss, and whether it is a guess.

        Args:
            model: What gives the outputs.
            of_data: The loss that the data's annotations or shapes tell; None: they tell none.
        """
        if self.options.loss is not None:
            if ":" in self.options.loss:
                return self.options.loss, False
            option = self._pick("loss", self.options.loss)
            return (option.entry if option else None), False
        own = begin.first_for(self.candidates, "loss")
        if own is not None:
            return own.entry, False
        fitting, is_guess = loss_of_outputs(model.candidate)
        return (fitting, is_guess) if of_data is None or not is_guess else (of_data, False)

    def _pick(self, kind: str, name: str | None) -> Option | None:
        """Return the candidate that is named, the only one, the one chosen by a person, or the likeliest."""
        offered = [option for option in self.candidates if option.candidate.role == kind]
        if name is not None:
            named = next(
                (option for option in offered if name in {option.candidate.name, option.entry}), None
            )
            if named is None:
                names = ", ".join(option.candidate.name for option in offered) or "none"
                raise ScaffoldError(f"{self.file} has no {kind} {name}", f"there are: {names}")
            return named
        if len(offered) < 2 or not self.options.may_ask:
            if len(offered) > 1:
                whole = [e.candidate.name for e in offered[1:] if not e.candidate.is_part]
                others = ", ".join(whole or [e.candidate.name for e in offered[1:]])
                are = "are" if "," in others else "is"
                self.notes.append(
                    f"{kind}: {offered[0].entry} was taken; there {are} {others} too: --{kind} NAME"
                )
            return offered[0] if offered else None
        for number, option in enumerate(offered, 1):
            click.echo(f"  {number}  {option.entry}")
        chosen = click.prompt(f"which {kind}", type=click.IntRange(1, len(offered)), default=1)
        return offered[chosen - 1]

    def _fill(self, table: str, option: Option) -> None:
        """Fill in a value of the right type for every argument that needs one.

        Raises:
            ScaffoldError: an argument has no value and nobody may be asked, or a job file cannot express it.
        """
        candidate, texts = option.candidate, self.given.get(table, {})
        values = self.arguments.setdefault(table, {})
        known = {argument.name: argument for argument in candidate.arguments}
        for name, text in texts.items():
            # An argument that the signature does not name, such as one of **kwargs, is checked when the job is tried.
            declared = known.get(name)
            key = f"{table}.args.{name}"
            if "." not in name:
                values[name] = _value(f"v={text}") if declared is None else _coerced(declared, key, text)
        missing = [
            argument
            for argument in candidate.arguments
            if argument.is_required and argument.name not in values
        ]
        self._require(option, table, [argument for argument in missing if argument.takes.config is None])
        objects = {name.partition(".")[0] for name in texts if "." in name}
        for argument in candidate.arguments:
            config = candidate.configs.get(argument.takes.config or "")
            if config is not None and (argument in missing or argument.name in objects):
                values[argument.name] = self._object(config, option, table, argument.name)
            elif argument in missing:
                values[argument.name] = self._ask(argument, option)

    def _take_as_given(self, table: str) -> None:
        """Fill in the values of `--set` unchecked: the entry point is in none of the files that were read."""
        texts = self.given.get(table, {})
        self.arguments[table] = {name: _value(f"v={text}") for name, text in texts.items()}

    def _require(self, option: Option, table: str, missing: Sequence[Argument]) -> None:
        """Check that a value can be had for each of the arguments.

        Raises:
            ScaffoldError: a job file cannot express one, or nobody may be asked.
        """
        objects = [argument.name for argument in missing if argument.takes.is_object]
        if objects:
            made = option.candidate.role
            raise ScaffoldError(
                f"{option.entry} needs the argument {objects[0]}, an object that a job file cannot give",
                f"write a function without it that returns the {made}, and name it: --{made} NAME",
            )
        if missing and not self.options.may_ask:
            several = "s" if len(missing) > 1 else ""
            needed = ", ".join(f"{argument.name} ({argument.takes.words})" for argument in missing)
            flags = " ".join(f"--set {table}.args.{argument.name}=VALUE" for argument in missing)
            raise ScaffoldError(f"{option.entry} needs the argument{several} {needed}", f"give it: {flags}")

    def _object(self, config: Config, option: Option, table: str, path: str) -> dict[str, Any]:
        """Return a dataclass as a job file names it, with its fields written out so that they can be changed.

        Args:
            config: The dataclass.
            option: The model, optimizer or dataset that takes it as an argument.
            table: The table of the job file.
            path: Name of the argument; for a field inside it, the dotted path to that field.
        """
        given = self.given.get(table, {})
        wrong = [name for name in given if name.startswith(f"{path}.")]
        fields: dict[str, Any] = {}
        for argument in config.fields:
            name = f"{path}.{argument.name}"
            inner = option.candidate.configs.get(argument.takes.config or "")
            wrong = [other for other in wrong if other != name and not other.startswith(f"{name}.")]
            if inner is not None and (
                argument.is_required or any(other.startswith(f"{name}.") for other in given)
            ):
                fields[argument.name] = self._object(inner, option, table, name)
            elif name in given:
                fields[argument.name] = _coerced(argument, f"{table}.args.{name}", given[name])
            elif argument.is_required:
                self._require(option, table, [argument._replace(name=name)])
                fields[argument.name] = self._ask(argument, option)
            elif argument.default is not None:
                fields[argument.name] = argument.default
        if wrong:
            names = ", ".join(argument.name for argument in config.fields)
            message = f"{config.name} has no {wrong[0].removeprefix(path + '.')}; it has {names}"
            raise click.BadParameter(message, param_hint="--set")
        return {"entry": f"{option.location.module}:{config.name}", "args": fields}

    def _ask(self, argument: Argument, option: Option) -> Any:
        """Ask a person for an argument until the answer is what the argument takes, and return it."""
        while True:
            text = click.prompt(f"{option.entry}: {argument.name} ({argument.takes.words})", type=str)
            try:
                return coerced(argument.takes, text)
            except ValueError:
                click.echo(f"  {text!r} is not {argument.takes.words}")


def _ask_for_entry(model: Option) -> str:
    """Ask a person for the entry point of the data until the answer has the form of one, and return it."""
    click.echo(f"there is no dataset, and the layers of {model.candidate.name} do not tell what it takes")
    while True:
        text = str(click.prompt("function that returns samples (module:name)", type=str)).strip()
        if re.fullmatch(ENTRY, text):
            return text
        click.echo(f"  {text!r} is not of the form module:name")


def _job_name(model: str) -> str:
    """Return a job's name from its model's: `resnet18` from ResNet18, `policy-network` from PolicyNetwork."""
    return re.sub(r"(?<=[a-z]{4})(?=[A-Z][a-z]{3})", "-", model).lower().strip("_")


def _coerced(argument: Argument, key: str, text: str) -> Any:
    try:
        return coerced(argument.takes, text)
    except ValueError:
        message = f"{key} takes {argument.takes.words}, not {text.strip()}"
        raise click.BadParameter(message, param_hint="--set") from None


def _override_texts(overrides: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the values of `--set` as typed, by table and argument; an object's field is named `config.width`."""
    texts: dict[str, dict[str, str]] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        table, args, *names = [*key.strip().split("."), "", ""]
        # A field of an object is model.args.config.width, or as the file has it, model.args.config.args.width.
        name = ".".join(part for number, part in enumerate(names) if part and (number == 0 or part != "args"))
        if not equals or table not in _TABLES or args != "args" or not name:
            raise click.BadParameter(
                "write it like model.args.width=64; other keys can be edited in the file", param_hint="--set"
            )
        texts.setdefault(table, {})[name] = value
    return texts


def _value(text: str) -> Any:
    """Return the value of `key=value`, as `--set` reads it everywhere."""
    from elasticflow.jobfile.text.layers import flag_layer
    from elasticflow.jobfile.text.read import UnreadableError

    try:
        raw: Any = flag_layer(text).raw
    except UnreadableError as error:
        raise click.BadParameter(f"{text}: no TOML value", param_hint="--set") from error
    while isinstance(raw, dict) and len(raw) == 1 and text.lstrip().startswith(key := next(iter(raw))):
        raw, text = raw[key], text.lstrip()[len(key) + 1 :]
    return raw
