"""elasticflow: a job file, one command, and a training run that survives failures.

User code may import the names in this module, `schedules`, `metrics`, `hugging_face`, `lightning`, `sinks.sink` and
`protocol.points.read_points`; all other modules are private to the command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.errors import StopTraining
from elasticflow.system.installation import VERSION

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from elasticflow.runtime.loop.batch import Batch as Batch
    from elasticflow.runtime.loop.gradients import Gradients as Gradients
    from elasticflow.runtime.loop.join import join as join
    from elasticflow.runtime.loop.run import Run as Run
    from elasticflow.runtime.process.shard_layout import Sharding as Sharding

__version__ = VERSION

__all__ = ["Batch", "Gradients", "Run", "Sharding", "StopTraining", "__version__", "get_logger", "join"]

# The module of `runtime.loop` that has the name.
_MODULES = {"Batch": "batch", "Gradients": "gradients", "Run": "run", "Sharding": "join", "join": "join"}


def get_logger(name: str = "user") -> FilteringBoundLogger:
    """Return a structured logger (structlog); its lines go to this worker's log, with run, generation and rank.

    Args:
        name: Value of the field `origin` in each line.
    """
    from elasticflow.system import logs

    return logs.get_logger(name)


def __getattr__(name: str) -> Any:
    # A script that trains imports torch anyway; the command and other importers of this package must not.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"elasticflow.runtime.loop.{_MODULES[name]}"), name)
