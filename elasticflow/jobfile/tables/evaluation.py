"""[evaluation]: one set or several named sets, their metrics, and the rule that ends training by a metric."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from elasticflow.jobfile.tables.types import (
    MOST_SAMPLES,
    Args,
    Collate,
    Description,
    Entry,
    IntervalText,
    MayRefer,
    Table,
    optional,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.text.read import TomlTable

MetricName = Annotated[
    str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$"), Description("a name of letters, digits and _")
]
SET_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,49}$"
SetName = Annotated[
    str, Field(pattern=SET_NAME), Description("a name of at most 50 letters, digits and _, like val")
]
Best = Annotated[
    str,
    Field(pattern=r"^(max|min) [A-Za-z_][A-Za-z0-9_]*$", examples=["max accuracy", "min loss"]),
    Description('"max" or "min" and a metric, like "max accuracy"'),
]
Part = Annotated[
    str | int,
    Description('a key or an attribute, like "logits", or a place in a list, like 1'),
]


OF_LOSS = "elasticflow.metrics:"
"""Entries that begin so are functions of the mean loss over the whole set."""


class MetricTable(Table):
    """A metric with arguments, or over the whole set."""

    entry: Entry = Field(
        description="A function, or a class whose objects have update(outputs, targets) and compute(): torchmetrics as they are.",
        examples=["torchmetrics.classification:BinaryAUROC"],
    )
    args: Args = Field(
        default={},
        description="Keyword arguments; a table { entry, args } among them makes an object.",
        examples=[{"num_classes": 10}],
    )
    over: Literal["batch", "set", "loss"] | None = optional(
        description="Arguments of a function: (outputs, targets) of a batch (default: its value is a mean over the "
        "batch), of the whole set in the order of its samples, or the mean loss over the whole set.",
    )
    outputs: Part | None = optional(
        description="The part of the model's output to use: a key, an attribute or an index; default: all.",
        examples=["logits", 0],
    )
    targets: Part | None = optional(
        description="The part of the targets to use or, with model.step, of the batch; default: all.",
        examples=["labels", 1],
    )


class EvaluationTable(Table):
    """Metrics over a second dataset, every sample once; for several datasets a table each: [evaluation.val]."""

    entry: Entry = Field(
        description="Any callable that returns a map-style dataset.", examples=["examples.mnist:digits"]
    )
    args: Annotated[Args, MayRefer()] = Field(
        default={},
        description="Keyword arguments of the callable; a table { entry, args } among them makes an object; "
        "texts may hold ${env:NAME}.",
        examples=[{"split": "test"}],
    )
    samples: int | None = optional(
        ge=1,
        le=MOST_SAMPLES,
        description="Measure at most this many samples: always the same, spread at random over the whole set, "
        "depending only on its length; default: all.",
        examples=[2000],
    )
    every: IntervalText | list[IntervalText] = Field(
        default="1 epoch",
        description="Intervals between evaluations; there is always one at the end.",
        examples=["1 epoch", ["500 steps", "10 min"]],
    )
    batch_size: int | None = optional(
        ge=1,
        le=10**9,
        description="Samples per forward; default: dataset.micro_batch_size, else 256.",
        examples=[256],
    )
    collate: Collate | None = optional(
        description="Turns a list of samples into a batch; default: dataset.collate.",
        examples=["examples.mnist:collate"],
    )
    step: Entry | None = optional(
        description="Called as step(model, batch) in evaluation mode, in place of the training step; returns the pair "
        "(outputs, targets) that every metric is called with; no loss is measured.",
        examples=["detection:evaluation_step"],
    )
    metrics: dict[MetricName, Entry | MetricTable] = Field(
        default={},
        description="Name to callable(outputs, targets) -> mean over the batch; with model.step, and without a step of "
        "the evaluation's own: callable(model, batch). "
        "Or a class of whole-set metrics such as torchmetrics', or a table { entry, args, over, outputs, targets }.",
        examples=[
            {"accuracy": "examples.mnist:accuracy"},
            {
                "f1": {
                    "entry": "torchmetrics.classification:MulticlassF1Score",
                    "args": {"num_classes": 10},
                }
            },
        ],
    )
    best: Best | None = optional(
        description='Criterion of keep.best: "max accuracy", "min loss"; a value equal to the best counts as best, '
        "too.",
    )
    weights: Literal["ema", "raw", "both"] | None = optional(
        description="Weights to evaluate: ema (the average; default with train.ema), raw, or both; best uses the "
        "average.",
    )
    overlap: Literal["reported", "allowed"] = Field(
        default="reported",
        description="Samples that are also in the training data: reported (an error of `validate --deep`), or "
        "allowed because it is intended.",
    )

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of what an evaluation measures: the metrics and, unless it has a step of its own, the loss."""
        return tuple(self.metrics) if self.step is not None else ("loss", *self.metrics)


Evaluation = EvaluationTable | dict[SetName, EvaluationTable]
"""One set, or several by name."""


def metric_entry(metric: str | MetricTable) -> str:
    """Return the entry point of a metric."""
    return metric if isinstance(metric, str) else metric.entry


def evaluation_sets(evaluation: Evaluation | None) -> dict[str, EvaluationTable]:
    """Return every set by its name; the name of a single set is empty."""
    if evaluation is None:
        return {}
    return {"": evaluation} if isinstance(evaluation, EvaluationTable) else dict(evaluation)


def path_of_set(name: str) -> KeyPath:
    """Return the key of a set's table."""
    return ("evaluation", name) if name else ("evaluation",)


def without_set(path: KeyPath) -> KeyPath:
    """Return the key of a value in a set's table as if the set were the only one: `evaluation.entry`."""
    if path[:1] == ("evaluation",) and len(path) > 2 and path[1] not in EvaluationTable.model_fields:
        return (path[0], *path[2:])
    return path


def sets_beside_keys(table: object) -> list[str] | None:
    """Return the keys of [evaluation] itself, none of which may stand beside tables of sets; None without such tables."""
    if not isinstance(table, dict):
        return None
    keys = EvaluationTable.model_fields.keys()
    own = [key for key in table if key in keys]
    sets = [value for key, value in table.items() if key not in keys and isinstance(value, dict)]
    if not sets or (
        own and not any(keys & value.keys() for value in sets)
    ):  # as of a misspelt [evaluation.metrics]
        return None
    return own


def set_tables(raw: TomlTable) -> Iterator[tuple[KeyPath, TomlTable]]:
    """Yield the table of each set of a merged job with its key, even if the job has errors."""
    table = raw.get("evaluation")
    if not isinstance(table, dict):
        return
    has_keys = any(key in EvaluationTable.model_fields for key in table)
    if table and not has_keys and all(isinstance(value, dict) for value in table.values()):
        for name, inner in table.items():
            yield ("evaluation", name), inner
    else:
        yield ("evaluation",), table


def ranking_set(evaluation: Evaluation | None) -> tuple[str, EvaluationTable] | None:
    """Return the set whose `best` ranks snapshots, with its name; None if no set has `best`."""
    sets = evaluation_sets(evaluation)
    return next(((name, table) for name, table in sets.items() if table.best is not None), None)


Better = Literal["min", "max"]

_METRIC = r"(?P<metric>[A-Za-z_]\w*(\.[A-Za-z_]\w*)?)"
_NUMBER = r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?"
_NOT_BETTER = re.compile(
    rf"((?P<better>min|max) )?{_METRIC} not better( by (?P<by>{_NUMBER}))? for (?P<times>[1-9][0-9]{{0,5}}) evaluations?",
    re.ASCII,
)
_BEYOND = re.compile(rf"{_METRIC} (?P<side>above|below) (?P<bound>-?{_NUMBER})", re.ASCII)
EXAMPLES = ("val.loss not better for 5 evaluations", "accuracy above 0.99")
# For editors: both forms, without the names of groups that other languages write otherwise.
PATTERN = "^({})$".format(
    "|".join(re.sub(r"\(\?P<\w+>", "(", each.pattern) for each in (_NOT_BETTER, _BEYOND))
)


class StopRule(NamedTuple):
    """The rule that ends training by a metric.

    Attributes:
        metric: Name as written: `loss`, or `val.loss` where sets have names.
        better: Direction in which the metric gets better, if given; for a bound, the side on which training ends.
        evaluations: Training ends after this many evaluations in a row that are not better; None: a bound ends it.
        by: Least improvement: a value counts as better only if it is better by more than this.
        bound: Training ends when the metric passes this value.
    """

    metric: str
    better: Better | None
    evaluations: int | None = None
    by: float = 0.0
    bound: float | None = None


def parse_stop_when(text: str) -> StopRule:
    """Return the rule that a text states.

    Raises:
        ValueError: the text has neither form.
    """
    if (found := _NOT_BETTER.fullmatch(text)) is not None:
        better: Better | None = found["better"]  # type: ignore[assignment]  # the pattern has both words
        return StopRule(found["metric"], better, int(found["times"]), float(found["by"] or 0))
    if (found := _BEYOND.fullmatch(text)) is not None:
        return StopRule(
            found["metric"], "max" if found["side"] == "above" else "min", bound=float(found["bound"])
        )
    raise ValueError(f'must be like "{EXAMPLES[0]}" or "{EXAMPLES[1]}"')


def metric_names(evaluation: Evaluation | None) -> Mapping[str, tuple[EvaluationTable, str]]:
    """Return every metric by its name in records, such as `val.loss`, with its set and its own name."""
    return {
        f"{name}.{metric}" if name else metric: (table, metric)
        for name, table in evaluation_sets(evaluation).items()
        for metric in table.measured
    }


def better_of(rule: StopRule, evaluation: Evaluation | None) -> Better | None:
    """Return the direction in which the metric gets better; None if neither the rule nor the job gives it."""
    if rule.better is not None:
        return rule.better
    table, metric = metric_names(evaluation)[rule.metric]
    if table.best is not None and table.best.split()[1] == metric:
        return "max" if table.best.startswith("max ") else "min"
    follows = metric in table.metrics and metric_entry(table.metrics[metric]).startswith(OF_LOSS)
    return "min" if metric == "loss" or follows else None
