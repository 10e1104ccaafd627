"""Hears the outputs of a model within one of the job's own steps: metrics need no second forward."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from elasticflow.errors import MetricError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


@contextmanager
def hearing(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """Context with a function that returns the outputs of the last call of *model*, and forgets them.

    Raises:
        MetricError: by that function: the model was not called since the last look.
    """
    heard: list[Any] = []

    def hear(_model: nn.Module, _args: Any, outputs: Any) -> None:
        heard[:] = [outputs]

    def outputs() -> Any:
        if not heard:
            raise MetricError(
                "a metric is called with the model's outputs, and the training step does not call the model itself",
                "let the step call model(...), or name a function of (model, batch)",
            )
        return heard.pop()

    handle = model.register_forward_hook(hear)
    try:
        yield outputs
    finally:
        handle.remove()
