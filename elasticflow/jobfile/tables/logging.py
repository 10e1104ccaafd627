"""The table of what is logged, and a table for each sink that takes it elsewhere."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.tables.types import (
    Args,
    Description,
    Endpoint,
    Entry,
    MayRefer,
    StepsText,
    Table,
    bad_key,
    editor_hints,
    optional,
    or_reference,
)
from elasticflow.system.redaction import without_password

SinkName = Literal["tensorboard", "mlflow", "wandb", "trackio", "otlp", "prometheus"]
SINKS: tuple[SinkName, ...] = get_args(SinkName)


def _without_password(text: str) -> str:
    if "${" not in text and not re.fullmatch(r"[a-z][a-z0-9+.-]*:\S+", text):
        raise ValueError("must begin with a scheme, like https:, and hold no blank")
    if without_password(text) != text and "${" not in text:
        raise ValueError("must hold no secret: it comes from the environment")
    return text


CountName = Annotated[
    str,
    Field(pattern=r"^[a-z][a-z0-9_]{0,39}$", examples=["tokens"]),
    Description('a name of small letters, digits and _, like "tokens"'),
]
CustomName = Annotated[
    str, Field(pattern=r"^[a-z][a-z0-9_-]{0,39}$"), Description("a name of small letters, digits, _ and -")
]
PathText = Annotated[
    str,
    Field(min_length=1, max_length=4000, pattern=r"^[^\x00\n]+$"),
    Description("a path"),
]


UriText = Annotated[
    str,
    AfterValidator(_without_password),
    Field(min_length=1, max_length=4000),
    editor_hints(or_reference(r"[a-z][a-z0-9+.-]*:\S+"), "https://mlflow.example.org"),
    Description('a URI, like "https://mlflow.example.org"'),
]
NameText = Annotated[
    str,
    Field(min_length=1, max_length=250, pattern=r"^[^\x00\n]+$"),
    Description("a name, on one line"),
]


class TensorBoardTable(Table):
    """Event files for TensorBoard."""

    folder: Annotated[PathText | None, MayRefer()] = optional(
        description="Folder of the event files, with a folder <job>/<run id> for each run; default: tensorboard in "
        "the run folder. A relative path starts at the project root.",
        examples=["tensorboard"],
    )


class MlflowTable(Table):
    """A run of an MLflow experiment."""

    uri: Annotated[UriText | None, MayRefer()] = optional(
        description="The tracking server, or a database; default: $MLFLOW_TRACKING_URI, else mlflow.db in the project root. "
        "User and password come from $MLFLOW_TRACKING_USERNAME and $MLFLOW_TRACKING_PASSWORD.",
        examples=["https://mlflow.example.org"],
    )
    experiment: Annotated[NameText | None, MayRefer()] = optional(
        description="Its experiment; default: the job's name.", examples=["mnist"]
    )


class WandbTable(Table):
    """A run of Weights & Biases; the key comes from $WANDB_API_KEY or `wandb login`."""

    project: Annotated[NameText | None, MayRefer()] = optional(
        description="Its project; default: the job's name.", examples=["mnist"]
    )
    entity: Annotated[NameText | None, MayRefer()] = optional(
        description="User or team; default: that of W&B.", examples=["my-team"]
    )
    mode: Literal["online", "offline"] | None = optional(
        description="offline: files that `wandb sync` sends; default: $WANDB_MODE, else online."
    )


class TrackioTable(Table):
    """A run of trackio."""

    project: Annotated[NameText | None, MayRefer()] = optional(
        description="Its project; default: the job's name.", examples=["mnist"]
    )
    space: Annotated[NameText | None, MayRefer()] = optional(
        description="A Hugging Face Space instead of the local database.",
        examples=["my-team/runs"],
    )


class OtlpTable(Table):
    """An OpenTelemetry collector, by OTLP over HTTP."""

    endpoint: Annotated[UriText | None, MayRefer()] = optional(
        description="Its address; default: $OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318. Headers, with "
        "their secrets, come from $OTEL_EXPORTER_OTLP_HEADERS.",
        examples=["http://collector:4318"],
    )


class PrometheusTable(Table):
    """The newest value of each measure, for Prometheus."""

    textfile: Annotated[PathText | None, MayRefer()] = optional(
        description="A file for node_exporter's textfile collector, replaced as a whole; default: prometheus.prom in the run "
        "folder. A relative path starts at the project root.",
        examples=["/var/lib/node_exporter/training.prom"],
    )
    listen: Annotated[Endpoint | None, MayRefer()] = optional(
        description="Address at which /metrics is served during the run as well; 0.0.0.0:9464: for other machines, "
        "too.",
        examples=["127.0.0.1:9464"],
    )


class CustomSinkTable(Table):
    """A sink of your own."""

    entry: Entry = Field(
        description="A subclass of elasticflow.sinks.sink.Sink; it runs beside the supervisor, never in a worker.",
        examples=["my_sinks:Table"],
    )
    args: Args = Field(
        default={},
        description="Its options, which the object has as `options`.",
        examples=[{"path": "table.csv"}],
    )


class LoggingTable(Table):
    """Log levels, metrics and sinks."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lines below it are dropped."
    )
    every: StepsText = Field(default="1 step", description="Interval of the lines in metrics.jsonl.")
    count_name: CountName | None = optional(
        description='Name of the items in a step\'s `count`, such as "tokens": their number per second is logged; '
        "default: items.",
    )
    grad_norm: bool | None = optional(
        description="Log the norm of the global batch's gradient; default: where clip_grad_norm computes it anyway.",
    )
    peak_flops: float | None = optional(
        gt=0,
        allow_inf_nan=False,
        description="Peak FLOP/s of one device, for MFU; default: by the name of a known GPU.",
        examples=[989.5e12],
    )
    sinks: list[SinkName] = Field(
        default=[],
        description="Destinations of metrics, events and logged values of hooks, besides the run folder; a process "
        "beside the supervisor sends them.",
        examples=[["tensorboard"]],
    )
    tensorboard: TensorBoardTable | None = optional(
        description="Options of the sink tensorboard.", examples=[{"folder": "tensorboard"}]
    )
    mlflow: MlflowTable | None = optional(
        description="Options of the sink mlflow.",
        examples=[{"uri": "https://mlflow.example.org"}],
    )
    wandb: WandbTable | None = optional(
        description="Options of the sink wandb.", examples=[{"project": "mnist"}]
    )
    trackio: TrackioTable | None = optional(
        description="Options of the sink trackio.", examples=[{"project": "mnist"}]
    )
    otlp: OtlpTable | None = optional(
        description="Options of the sink otlp.",
        examples=[{"endpoint": "http://collector:4318"}],
    )
    prometheus: PrometheusTable | None = optional(
        description="Options of the sink prometheus.",
        examples=[{"textfile": "/var/lib/node_exporter/training.prom"}],
    )
    custom: dict[CustomName, CustomSinkTable] = Field(
        default={},
        description="Sinks of your own, by name: all given here are used.",
        examples=[{"table": {"entry": "my_sinks:Table"}}],
    )

    @model_validator(mode="after")
    def _names_are_free(self) -> LoggingTable:
        if clash := next((name for name in self.custom if name in SINKS), None):
            message = f"logging.custom.{clash} has the name of a sink that is there already"
            raise bad_key("custom", codes.EXCLUSIVE, message, "take another name")
        return self

    def chosen_sinks(self) -> dict[str, dict[str, Any]]:
        """Return the options of each chosen sink by name, without defaults; custom sinks come last."""
        options = {name: getattr(self, name) for name in self.sinks}
        return {
            **{
                name: {key: value for key, value in table or () if value is not None}
                for name, table in options.items()
            },
            **{name: dict(table.args) for name, table in self.custom.items()},
        }
