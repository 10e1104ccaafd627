"""Lists the sinks with the packages each needs, and gives the command of the process that serves a run's sinks."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import SinkMissingError
from elasticflow.sinks.sink import Sink
from elasticflow.system.installation import module_command

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.logging import LoggingTable
    from elasticflow.sinks.sink import Options


class SinkKind(NamedTuple):
    """A sink of ours.

    Attributes:
        needs: The module that elasticflow's extra of the sink's name installs; None: it needs none.
    """

    entry: str
    needs: str | None = None


KINDS: dict[str, SinkKind] = {
    "tensorboard": SinkKind("elasticflow.sinks.tensorboard:TensorBoard", "tensorboard"),
    "mlflow": SinkKind("elasticflow.sinks.mlflow:MLflow", "mlflow"),
    "wandb": SinkKind("elasticflow.sinks.wandb:WandB", "wandb"),
    "trackio": SinkKind("elasticflow.sinks.trackio:Trackio", "trackio"),
    "otlp": SinkKind("elasticflow.sinks.otlp:Otlp", "opentelemetry.proto"),
    "prometheus": SinkKind("elasticflow.sinks.prometheus:Prometheus"),
}


def missing_of(name: str) -> str | None:
    """Return the extra that the sink *name* lacks; None if nothing is missing. Imports none of its modules."""
    needs = KINDS[name].needs if name in KINDS else None
    return None if needs is None or _is_installed(needs) else name


def _is_installed(module: str) -> bool:
    package = module.rpartition(".")[0]
    return (not package or find_spec(package) is not None) and find_spec(module) is not None


def check_installed(logging: LoggingTable) -> None:
    """Check that the packages of the chosen sinks are installed.

    Raises:
        SinkMissingError: a package is missing; the error has the pip command.
    """
    if missing := [name for name in logging.sinks if missing_of(name) is not None]:
        raise SinkMissingError(
            f"logging.sinks has {', '.join(missing)}, and what that needs is not installed",
            f"pip install 'elasticflow[{','.join(missing)}]'",
        )


def serving_command(job: Job) -> tuple[str, ...]:
    """Return the command that serves the job's sinks and [notify] while a supervisor runs; empty if the job has neither.

    Raises:
        SinkMissingError: a package of a sink is not installed.
    """
    check_installed(job.logging)
    if not job.logging.chosen_sinks() and job.notify is None:
        return ()
    return tuple(module_command("elasticflow.sinks.main"))


def make_sink(logging: LoggingTable, name: str, options: Options) -> Sink:
    """Return a sink of the job that is not open yet.

    Raises:
        TypeError: the job's own entry is not a sink.
        Exception: importing or making the sink raised it.
    """
    entry = KINDS[name].entry if name in logging.sinks else logging.custom[name].entry
    module, _, attribute = entry.partition(":")
    made: Any = import_module(module)
    for part in attribute.split("."):
        made = getattr(made, part)
    sink = made(options)
    if not isinstance(sink, Sink):
        raise TypeError(f"{entry} makes a {type(sink).__name__}, which is no elasticflow.sinks.sink.Sink")
    return sink
