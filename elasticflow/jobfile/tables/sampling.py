"""`[dataset.sampler]` and `[[dataset.mix]]`: other orders than each sample once per epoch, shuffled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.types import MOST_SAMPLES, Args, Description, Entry, Table, bad_key, optional

if TYPE_CHECKING:
    from pydantic.config import JsonDict

_KINDS = ("weights", "balance_by", "bucket_by", "temperature")
_WITH_DRAWS = ("weights", "balance_by")
_COLUMN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
SampleValues = Annotated[
    str,
    Field(pattern=rf"^{_COLUMN}(:{_COLUMN})?$", max_length=500, examples=["label", "examples.mnist:weights"]),
    Description('a column or an attribute of the dataset, like "label", or a function, like "mine:labels"'),
]


def _exactly_one() -> JsonDict:
    """Return the part of the schema that tells an editor which keys exclude each other."""
    choices: list[JsonDict] = [{"required": [key], "additionalProperties": True} for key in _KINDS]
    for key, choice in zip(_KINDS, choices, strict=True):
        if key not in _WITH_DRAWS:
            choice["properties"] = {"draws": False}
    return {"oneOf": [*choices]}


class SamplerTable(Table):
    """Another order than each sample once per epoch, shuffled."""

    model_config = ConfigDict(json_schema_extra=_exactly_one())

    weights: SampleValues | None = optional(
        description="A number for each sample, which is drawn with replacement in proportion to it. A column or an "
        "attribute of the dataset, or a function called once with it.",
        examples=["weight", "examples.mnist:weights"],
    )
    balance_by: SampleValues | None = optional(
        description="The class of each sample: drawn with replacement, each class as often as any other. "
        "A column or an attribute of the dataset, or a function called once with it.",
        examples=["label", "targets"],
    )
    bucket_by: SampleValues | None = optional(
        description="The length of each sample: batches of similar length, in a shuffled order, each sample once per "
        "epoch. A column or an attribute of the dataset, or a function called once with it.",
        examples=["length", "texts:lengths"],
    )
    temperature: float | None = optional(
        gt=0,
        le=1000,
        description="Of [[dataset.mix]]: each set's share is its size to the power of 1 / temperature: 1 draws by "
        "size, a higher value raises the shares of small sets.",
        examples=[2.0],
    )
    draws: int | None = optional(
        ge=1,
        le=MOST_SAMPLES,
        description="Draws in an epoch, with weights or balance_by; default: the number of samples.",
        examples=[100_000],
    )

    @property
    def kind(self) -> str:
        """The key that chooses the order: `weights`, `balance_by` and so on."""
        return next(key for key in _KINDS if getattr(self, key) is not None)

    @property
    def values(self) -> str:
        """The column, attribute or function that gives the number or the class of each sample."""
        return str(getattr(self, self.kind))

    @model_validator(mode="after")
    def _one_kind(self) -> SamplerTable:
        given = [key for key in _KINDS if getattr(self, key) is not None]
        if not given:
            message = (
                "a sampler needs `weights`, `balance_by`, `bucket_by` or, with [[dataset.mix]], `temperature`"
            )
            remedy = 'such as { balance_by = "label" }; without a sampler, each sample comes once per epoch, shuffled'
            raise bad_key("", codes.MISSING, message, remedy)
        if len(given) > 1:
            message = f"{' and '.join(f'`{key}`' for key in given)} of a sampler exclude each other"
            remedy = "keep one of them"
            if set(given) == {"weights", "balance_by"}:
                remedy = "keep one of them: weights of your own can balance classes, too"
            raise bad_key(given[1], codes.SAMPLER, message, remedy)
        if self.draws is not None and self.kind not in _WITH_DRAWS:
            what = "with `bucket_by` each comes once per epoch"
            if self.kind == "temperature":
                what = "an epoch of a mixture is as many samples as its sets have"
            message = f"`draws` is for samples that are drawn with replacement; {what}"
            raise bad_key("draws", codes.SAMPLER, message, "leave it out")
        return self


class MixTable(Table):
    """One of several training sets."""

    entry: Entry = Field(
        description="Any callable that returns a map-style dataset.", examples=["texts:Books"]
    )
    args: Args = Field(
        default={},
        description="Keyword arguments of the callable; a table { entry, args } among them makes an object; texts may hold ${env:NAME}.",
        examples=[{"split": "train"}],
    )
    weight: float | None = optional(
        gt=0,
        le=10**9,
        description="The set's share of all samples drawn, relative to the other sets' weights; default: by size.",
        examples=[0.7],
    )
