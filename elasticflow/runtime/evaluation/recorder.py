"""A model that remembers its last outputs: metrics need no second forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from elasticflow.errors import MetricError

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn


class Recorder:
    """Called like the model; remembers the last outputs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.outputs: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; return its outputs."""
        self.outputs = self._model(*args, **kwargs)
        return self.outputs


class Listener:
    """Context manager that remembers the outputs of the last call of the model within one of the job's own steps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._has_called = False
        self._outputs: Any = None

    def __enter__(self) -> Self:
        self._handle = self._model.register_forward_hook(self._listen)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle.remove()

    def outputs(self) -> Any:
        """Return the model's last outputs, and forget them.

        Raises:
            MetricError: the model was not called since the last look.
        """
        if not self._has_called:
            raise MetricError(
                "a metric is called with the model's outputs, and the training step does not call the model itself",
                "let the step call model(...), or name a function of (model, batch)",
            )
        outputs, self._outputs, self._has_called = self._outputs, None, False
        return outputs

    def _listen(self, _model: nn.Module, _args: Any, outputs: Any) -> None:
        self._outputs, self._has_called = outputs, True
