"""Weights & Biases: one run, continued by its id; offline if W&B is set so.

Guarantee: this sink numbers the rows and remembers the number. W&B's server leaves out rows whose number it has passed,
so it has rows that are sent again after a crash only once. Offline, a process that is killed between a delivery and the
record of it leaves its last rows in the files of two processes, with the same numbers. `wandb sync` sends them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.observe.history import is_taken_over
from elasticflow.sinks.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.events import EventRecord
    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts

_WRONG = re.compile(r"[^A-Za-z0-9_-]")
_STEP = "step"


class WandB(Sink):
    """Logs rows to W&B, over the step of training."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        import wandb

        self._wandb: Any = wandb
        self._run: Any = None
        self._rows, self._exit_code = 0, 0

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Begin or continue the run, and its numbers of rows."""
        self._rows = remembered.get("rows", 0)
        self._id = remembered.get("id") or _WRONG.sub("-", f"{run.job}-{run.run_id}")[-128:]
        folder = run.folder / "wandb"
        folder.mkdir(exist_ok=True)
        self._run = self._wandb.init(
            project=self.options.get("project") or run.job,
            entity=self.options.get("entity"),
            mode=self.options.get("mode"),
            id=self._id,
            name=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config={**run.parameters, **{f"tags.{name}": value for name, value in run.tags.items()}},
            allow_val_change=True,
            settings=self._wandb.Settings(
                console="off", disable_git=True, disable_code=True, silent=True, x_disable_stats=True
            ),
        )
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def remember(self) -> Remembered:
        """Return W&B's id of the run and its number of rows."""
        return {"id": self._id, "rows": self._rows}

    def points(self, batch: Sequence[Point]) -> None:
        """Log a row for each point."""
        for point in batch:
            row: dict[str, Any] = {**point.values, **point.texts, _STEP: point.step}
            row |= {name: self._wandb.Image(str(path)) for name, path in point.images.items()}
            self._run.log(row, step=self._rows, commit=True)
            self._rows += 1

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Remember the end of the launch."""
        for record in batch:
            if record.get("event") in (events.RUN_FAILED, events.RUN_STARTED):
                self._exit_code = int(record["event"] == events.RUN_FAILED and not is_taken_over(record))

    def close(self) -> None:
        """Have W&B write and send its rows, and mark the run as failed if the launch failed."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)
