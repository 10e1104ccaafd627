"""The types of the job file's tables: strict, with bounds, and described in words."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from elasticflow.jobfile.diagnostics import codes
from elasticflow.system.units import (
    DURATION,
    INTERVAL,
    PROGRESS,
    SIZE,
    parse_duration,
    parse_interval,
    parse_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_NODES = 65_536
MOST_SAMPLES = 10**15

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ENTRY = rf"^{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*$"
_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"


# Tables that must have exactly one of each pair of keys.
ONE_OF = {
    "model": ("loss", "step"),
    "dataset": ("entry", "mix"),
    "train": ("epochs", "steps"),
    "script": ("entry", "module"),
}


class Description(NamedTuple):
    """The description of a text of the type, as in "must be <description>"."""

    words: str


class MayRefer(NamedTuple):
    """The mark of a key whose texts may hold references such as `${env:NAME}` (see `jobfile/checks/references.py`).

    Attributes:
        instead: Text to check in place of a reference that is not looked up; None: the reference as written.
        is_late: `${env:NAME}`, a secret, stays as written in the job and in all records until the value is used.
    """

    instead: str | None = None
    is_late: bool = False


class SecretVariable(NamedTuple):
    """A variable of the environment that holds a secret, and the default where the variable is not set or empty."""

    name: str
    default: str | None


TextWithSecrets = tuple[str | SecretVariable, ...]
"""A text that holds secrets, in pieces: generated code looks up the variables."""


def bad_key(
    key: str, code: str, message: str, remedy: str | None = None, *, at_key: bool = False
) -> PydanticCustomError:
    """Return the error that a table's own check raises, under *code*: shown at *key*, or at the table if *key* is empty.

    With *at_key* the error points at the key itself, not at its value.
    """
    context = {"key": key, "code": code, "message": message, "remedy": remedy, "at_key": at_key}
    return PydanticCustomError("bad_key", "{message}", context)


def one_of(first: str, second: str) -> PydanticCustomError:
    """Return the error of a table that must have exactly one of two keys."""
    return bad_key(second, codes.EXCLUSIVE, f"exactly one of {first} and {second} must be given")


def parsed_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return the check of a text that *parse* must accept; its ValueError says what it must be."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


def _progress(text: str) -> None:
    if parse_interval(text).unit == "sample":
        raise ValueError("must be a time, or counted in steps or epochs")


def _endpoint(text: str) -> str:
    if "${" not in text and not re.fullmatch(_PORT, text.rpartition(":")[2]):
        raise ValueError("must have a port from 1 to 65535")
    return text


def editor_hints(pattern: str, *examples: str) -> Any:
    """Return a pattern and examples for editors; the text's own check refuses mistakes with a better message."""
    return Field(examples=list(examples), json_schema_extra={"pattern": pattern})


def or_reference(pattern: str) -> str:
    """Return the pattern of a text that may also hold references (`jobfile/checks/references.py`), not yet looked up."""
    return rf"^({pattern}|.*\$\{{.*)$"


Entry = Annotated[
    str,
    Field(pattern=ENTRY, max_length=500, examples=["examples.mnist:Net"]),
    Description('"package.module:name", like "examples.mnist:Net"'),
]
"""`package.module:attribute`."""
IntervalText = Annotated[
    str,
    parsed_by(parse_interval),
    editor_hints(INTERVAL, "500 steps", "10 min", "1 epoch"),
    Description('a number and a unit, like "500 steps", "10 min" or "1 epoch"'),
]
DurationText = Annotated[
    str,
    parsed_by(parse_duration),
    editor_hints(DURATION, "30 s", "10 min"),
    Description('a time, like "30 s" or "10 min"'),
]
ProgressText = Annotated[
    str,
    parsed_by(_progress),
    editor_hints(PROGRESS, "1 h", "1000 steps"),
    Description('a number and a unit, like "1 h" or "1000 steps"'),
]
SizeText = Annotated[
    str,
    parsed_by(parse_size),
    editor_hints(SIZE, "4 GiB", "500 MB"),
    Description('a size, like "4 GiB"'),
]
StepsText = Annotated[
    str,
    Field(pattern=r"^[1-9][0-9]{0,8} steps?$", examples=["1 step", "10 steps"]),
    Description('steps, like "10 steps"'),
]
Endpoint = Annotated[
    str,
    Field(pattern=or_reference(f"{_HOST}:[0-9]{{1,5}}")),
    AfterValidator(_endpoint),
    editor_hints(or_reference(f"{_HOST}:{_PORT}"), "head:29400", "[fd00::1]:29400"),
    Description('"host:port", like "head:29400"'),
]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100, examples=["mnist"]),
    Description('a name of letters, digits, ".", "_" and "-", at most 100'),
]
Args = dict[str, Any]


optional: partial[None] = partial(Field, default=None)
"""The field of a key that may be left out. As a type checker sees it, the field is None: its annotation has to allow that."""


class Table(BaseModel):
    """A closed, frozen, strict table: "8" is not 8, unknown keys are errors.

    Built on first use, so that a job without [torchrun] does not wait for that table's schema.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


class CollateTable(Table):
    """A collator with arguments: an object that is called with a list of samples, or a function."""

    entry: Entry = Field(
        description="Called with args; the result makes a batch from a list of samples, as transformers' collators "
        "do.",
        examples=["transformers:DataCollatorWithPadding", "examples.texts:padded"],
    )
    args: Args = Field(
        default={},
        description="Keyword arguments; a table { entry, args } among them makes an object, such as a tokenizer; "
        '"${dataset.NAME}" is an attribute of the training data.',
        examples=[
            {
                "tokenizer": {
                    "entry": "transformers:AutoTokenizer.from_pretrained",
                    "args": {"pretrained_model_name_or_path": "models/bert"},
                }
            },
            {"padding": 0},
        ],
    )
    partial: bool = Field(
        default=False,
        description="Call the entry itself with a list of samples and these args, as functools.partial does.",
    )


Collate = Entry | CollateTable
"""A function called with a list of samples, or what is made with arguments."""


def collate_entry(collate: str | CollateTable) -> str:
    """Return the entry point that makes batches, or that makes the object that does."""
    return collate if isinstance(collate, str) else collate.entry
