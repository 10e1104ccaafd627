"""How samples are drawn, where not each once per epoch in a shuffled order: `[dataset.sampler]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.types import MOST_SAMPLES, Description, Table, bad_key

if TYPE_CHECKING:
    from pydantic.config import JsonDict

_KINDS = ("weights", "balance_by", "bucket_by")
_COLUMN = r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*"
SampleValues = Annotated[
    str,
    Field(pattern=rf"^{_COLUMN}(:{_COLUMN})?$", max_length=500, examples=["label", "examples.mnist:weights"]),
    Description('a column or an attribute of the dataset, like "label", or a function, like "mine:labels"'),
]


def _exactly_one() -> JsonDict:
    """Return what an editor is told of keys that exclude each other."""
    choices: list[JsonDict] = [{"required": [key], "additionalProperties": True} for key in _KINDS]
    choices[_KINDS.index("bucket_by")]["properties"] = {"draws": False}
    return {"oneOf": [*choices]}


class SamplerTable(Table):
    """How samples are drawn, where not each once per epoch in a shuffled order."""

    model_config = ConfigDict(json_schema_extra=_exactly_one())

    weights: SampleValues | None = Field(
        default=None,
        description="A number for each sample: drawn with replacement, as often as it says. A column or an attribute of the "
        "dataset, or a function called once with it.",
    )
    balance_by: SampleValues | None = Field(
        default=None,
        description="The class of each sample: drawn with replacement, each class as often as any other. "
        "A column or an attribute of the dataset, or a function called once with it.",
    )
    bucket_by: SampleValues | None = Field(
        default=None,
        description="The length of each sample: batches of like length, in a shuffled order, each sample once per epoch. "
        "A column or an attribute of the dataset, or a function called once with it.",
    )
    draws: int | None = Field(
        default=None,
        ge=1,
        le=MOST_SAMPLES,
        description="Draws that make an epoch, with weights or balance_by; default: as many as there are samples.",
    )

    @property
    def kind(self) -> str:
        """Which of its keys says how samples are drawn."""
        return next(key for key in _KINDS if getattr(self, key) is not None)

    @property
    def values(self) -> str:
        """What gives the number or the class of each sample."""
        return str(getattr(self, self.kind))

    @model_validator(mode="after")
    def _one_kind(self) -> SamplerTable:
        given = [key for key in _KINDS if getattr(self, key) is not None]
        if not given:
            message = "a sampler needs `weights`, `balance_by` or `bucket_by`"
            remedy = 'such as { balance_by = "label" }; without a sampler, each sample comes once per epoch, shuffled'
            raise bad_key("", codes.MISSING, message, remedy)
        if len(given) > 1:
            message = f"{' and '.join(f'`{key}`' for key in given)} of a sampler exclude each other"
            remedy = "keep one of them"
            if set(given) == {"weights", "balance_by"}:
                remedy = "keep one of them: weights of your own can balance classes, too"
            raise bad_key(given[1], codes.SAMPLER, message, remedy)
        if self.draws is not None and self.bucket_by is not None:
            message = "`draws` is for samples that are drawn with replacement; with `bucket_by` each comes once per epoch"
            raise bad_key("draws", codes.SAMPLER, message, "leave it out")
        return self
