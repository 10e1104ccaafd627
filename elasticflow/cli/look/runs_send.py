"""`elasticflow runs send [RUN]`: the reader of a running launch, in the foreground."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.output import warn
from elasticflow.cli.parameters import DURATION, RUN
from elasticflow.observe.terminal.formats import plural

if TYPE_CHECKING:
    from elasticflow.sinks.delivery import Delivery


@click.command("send")
@click.argument("run", type=RUN, required=False)
@click.option(
    "--timeout",
    type=DURATION,
    metavar="DURATION",
    default="1 min",
    show_default=True,
    help="Give up after this long without success.",
)
def command(*, run: str | None, timeout: str) -> int:
    """Send what the sinks and [notify] of RUN (a run folder, run id or job name; default: the newest) have missed.

    Each sink continues in the same remote run; nothing is sent twice. A run that is running sends by itself.

    \b
    elasticflow runs send
    elasticflow runs send mnist --timeout "10 min"
    """
    from elasticflow.errors import ANSWER_IS_NO, FINISHED
    from elasticflow.jobfile.project import current_project_root
    from elasticflow.launcher.journal.run_lock import locked
    from elasticflow.observe.runs import find_run
    from elasticflow.sinks.facts import read_facts
    from elasticflow.sinks.main import deliveries_of, send
    from elasticflow.sinks.registry import check_installed
    from elasticflow.system.units import parse_duration

    folder = find_run(current_project_root(), run)
    check_installed(read_facts(folder)[0].logging)
    with locked(folder):
        deliveries = deliveries_of(folder, _report)
        if not deliveries:
            warn(f"run {folder.run_id} has no sinks: logging.sinks and [notify] choose them")
            return FINISHED
        before = [delivery.unsent() for delivery in deliveries]
        send(deliveries, parse_duration(timeout))
        for delivery, count in zip(deliveries, before, strict=True):
            click.echo(_outcome(delivery, count))
    return FINISHED if all(delivery.is_done.is_set() for delivery in deliveries) else ANSWER_IS_NO


def _outcome(delivery: Delivery, before: int) -> str:
    if delivery.is_done.is_set():
        return f"{delivery.name}: {plural(before, delivery.unit)} sent"
    return f"{delivery.name}: {plural(delivery.unsent(), delivery.unit)} left: {delivery.why()}"


def _report(event: str, /, **fields: Any) -> None:
    if "error" in fields:
        warn(f"{fields['sink']}: {fields['error']}")
