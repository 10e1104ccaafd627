"""What the job of `elasticflow init` is to be: by flags, by what the model's file tells, else by asking (floor 5)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticflow.errors import ScaffoldError
from elasticflow.scaffold import beginning
from elasticflow.scaffold.example import loss_for, made_up_data
from elasticflow.scaffold.job_text import Draft
from elasticflow.scaffold.shapes import shapes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.scaffold.beginning import Option

_TABLES = ("model", "optimizer", "dataset")
_GUESS = "torch.nn.functional:cross_entropy"


@dataclass(frozen=True)
class Asked:
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
class Answers:
    """What is to be written.

    Attributes:
        root: The project's root.
        job_file: Where the job goes.
        draft: What it says.
        code: Files of code that are written with it, by their path from the root.
        notes: What a person should know.
    """

    root: Path
    job_file: Path
    draft: Draft
    code: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def answers(asked: Asked) -> Answers:
    """Return what is to be written.

    Raises:
        ScaffoldError: something is missing that nobody may be asked for.
    """
    from elasticflow.spec.project import project_root_of

    beside = asked.output or Path.cwd() / "job.toml"
    root = project_root_of(beside.resolve())
    if asked.model_file is None:
        return _example(asked, root)
    return _Choice(asked, asked.model_file, root).made()


def _example(asked: Asked, root: Path) -> Answers:
    from dataclasses import replace

    if asked.model or asked.dataset or asked.loss or asked.overrides:
        raise click.UsageError("--model, --dataset, --loss and --set go with a model file: init FILE.py")
    name = asked.name or "spirals"
    if not name.isidentifier():
        raise ScaffoldError(
            f'"{name}" cannot be a package', "give a name of letters, digits and _: --name NAME"
        )
    draft, code = beginning.example(name, asked.workers)
    draft = replace(
        draft,
        epochs=asked.epochs or draft.epochs,
        global_batch_size=asked.batch_size or draft.global_batch_size,
    )
    return Answers(root, asked.output or root / "jobs" / f"{name}.toml", draft, code)


class _Choice:
    """The job of a model that is there."""

    def __init__(self, asked: Asked, file: Path, root: Path) -> None:
        self.asked, self.file, self.root = asked, file, root
        self.options = beginning.options_in(file, root)
        self.arguments = _arguments(asked.overrides)
        self.code: dict[str, str] = {}
        self.notes: list[str] = []

    def made(self) -> Answers:
        model = self._pick("model", self.asked.model)
        if model is None:
            raise ScaffoldError(
                f"{self.file} defines no nn.Module",
                "name the file that does, or a function that returns one: --model NAME",
            )
        name = self.asked.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", model.candidate.name).lower().strip(
            "_"
        )
        self._fill("model", model)
        if beginning.forward_takes(model) > 1:
            self.notes.append(
                f"{model.entry}.forward takes several inputs: name a step of model and batch instead of a loss"
            )
        dataset, loss = self._data(model)
        step = beginning.first(self.options, "step")
        loss, is_guessed = self._loss(loss)
        draft = Draft(
            name=name,
            path=model.place.path,
            model=model.entry,
            dataset=dataset,
            loss=loss,
            step=step.entry if step is not None and self.asked.loss is None else None,
            loss_is_guessed=is_guessed,
            arguments=self.arguments,
            epochs=self.asked.epochs or 5,
            global_batch_size=self.asked.batch_size or 32,
            workers=self.asked.workers,
        )
        job_file = self.asked.output or self.root / "jobs" / f"{name}.toml"
        return Answers(self.root, job_file, draft, self.code, self.notes)

    def _data(self, model: Option) -> tuple[str, str | None]:
        """Return the dataset's entry, and the loss that goes with it if that is known."""
        if self.asked.dataset is not None and ":" in self.asked.dataset:
            return self.asked.dataset, None
        found = self._pick("dataset", self.asked.dataset)
        if found is not None:
            if found.place.path != model.place.path:
                raise ScaffoldError(f"{found.entry} and {model.entry} are not found from the same folder")
            self._fill("dataset", found)
            return found.entry, beginning.loss_by_samples(found)
        shapes = shapes_of(model.candidate, self.arguments.get("model", {}))
        if shapes is None:
            raise ScaffoldError(
                f"{self.file} has no dataset, and the layers of {model.candidate.name} do not tell what it takes",
                "write a function that returns samples, and name it: --dataset MODULE:NAME",
            )
        folder = self.file.resolve().parent.relative_to(self.root.resolve())
        name = f"{self.file.stem if self.file.stem != '__init__' else self.file.resolve().parent.name}_data"
        path = folder / f"{name}.py"
        self.code[path.as_posix()] = made_up_data(model.candidate.name, shapes)
        self.notes.append(f"{path} holds made-up data of the model's shape: put your own in its place")
        place = beginning.place_of(self.root / path, self.root)
        return f"{place.module}:samples", loss_for(shapes)

    def _loss(self, told: str | None) -> tuple[str | None, bool]:
        if self.asked.loss is not None:
            if ":" in self.asked.loss:
                return self.asked.loss, False
            found = self._pick("loss", self.asked.loss)
            return (found.entry if found else None), False
        own = beginning.first(self.options, "loss")
        if own is not None:
            return own.entry, False
        return (told, False) if told is not None else (_GUESS, True)

    def _pick(self, kind: str, name: str | None) -> Option | None:
        """Return the candidate that is named, the only one, the one chosen by a person, or the likeliest."""
        offered = [each for each in self.options if each.candidate.kind == kind]
        if name is not None:
            found = next((each for each in offered if name in {each.candidate.name, each.entry}), None)
            if found is None:
                names = ", ".join(each.candidate.name for each in offered) or "none"
                raise ScaffoldError(f"{self.file} has no {kind} {name}", f"there are: {names}")
            return found
        if len(offered) < 2 or not self.asked.may_ask:
            if len(offered) > 1:
                others = ", ".join(each.candidate.name for each in offered[1:])
                self.notes.append(
                    f"{kind}: {offered[0].entry} was taken; there are {others} too: --{kind} NAME"
                )
            return offered[0] if offered else None
        for number, each in enumerate(offered, 1):
            click.echo(f"  {number}  {each.entry}")
        chosen = click.prompt(f"which {kind}", type=click.IntRange(1, len(offered)), default=1)
        return offered[chosen - 1]

    def _fill(self, table: str, option: Option) -> None:
        """Have a value for every argument that needs one.

        Raises:
            ScaffoldError: one has none, and nobody may be asked.
        """
        given = self.arguments.setdefault(table, {})
        for name in beginning.missing_arguments(option, given):
            if not self.asked.may_ask:
                raise ScaffoldError(
                    f"{option.entry} needs the argument {name}", f"give it: --set {table}.args.{name}=VALUE"
                )
            given[name] = _value(f"v={click.prompt(f'{option.entry}: {name}')}")


def _arguments(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for text in overrides:
        key, equals, _ = text.partition("=")
        table, args, *name = key.strip().split(".")[:3] + [""] * max(0, 2 - key.count("."))
        if not equals or table not in _TABLES or args != "args" or not name or not name[0]:
            raise click.BadParameter(
                "write it like model.args.width=64; other keys can be edited in the file", param_hint="--set"
            )
        found.setdefault(table, {})[name[0]] = _value(text)
    return found


def _value(text: str) -> Any:
    """Return the value of `key=value`, as `--set` reads it everywhere."""
    from elasticflow.spec.text.flags import flag_layer
    from elasticflow.spec.text.reading import UnreadableError

    try:
        raw: Any = flag_layer(text).raw
    except UnreadableError as error:
        raise click.BadParameter(f"{text}: no TOML value", param_hint="--set") from error
    while isinstance(raw, dict) and len(raw) == 1 and text.lstrip().startswith(key := next(iter(raw))):
        raw, text = raw[key], text.lstrip()[len(key) + 1 :]
    return raw
