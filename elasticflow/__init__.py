"""elasticflow: a job file, one command, and a training run that survives what happens to it.

What user code may import stands here; everything else is private to the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__version__ = "0.1.0"

__all__ = ["StopTraining", "__version__", "get_logger"]


class StopTraining(Exception):  # noqa: N818  # no error: the run counts as finished
    """Raised by the job's own code on any rank, ends training on all ranks after the same step.

    The training step, the dataset, the evaluation, a metric and the learning-rate schedule may raise it. A step in which
    some rank raises it changes no weight on any rank. Its text is the reason that logs and `status` give.
    """


def get_logger(name: str = "user") -> FilteringBoundLogger:
    """Return the structured logger whose lines land in this worker's log and bear run, generation and rank."""
    from elasticflow import logs

    return logs.get_logger(name)
