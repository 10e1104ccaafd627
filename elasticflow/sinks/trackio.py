"""trackio: one run of a project, in trackio's local database or on a Hugging Face Space.

Guarantee: a batch counts as delivered once trackio has finished writing it. If the process is killed before it can
record the delivery, the batch is written again, and trackio has its rows twice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.sinks.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts


class Trackio(Sink):
    """Logs rows to trackio."""

    look_every_s = 5.0  # each batch opens and ends the run

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        import trackio

        self._trackio: Any = trackio

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Remember the run; trackio's run begins with the first batch."""
        self._facts = run

    def points(self, batch: Sequence[Point]) -> None:
        """Continue the run, log a row for each point, and wait until they are written."""
        project, run_id = self.options.get("project"), self._facts.run_id
        run = self._trackio.init(
            project=project or self._facts.job,
            # Jobs that share a project may have runs of one id, and trackio knows runs by name.
            name=f"{self._facts.job}-{run_id}" if project else run_id,
            space_id=self.options.get("space"),
            config={**self._facts.parameters, **self._facts.tags},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        for point in batch:
            row: dict[str, Any] = dict(point.values)
            row |= {name: self._trackio.Markdown(text) for name, text in point.texts.items()}
            row |= {name: self._trackio.Image(str(path)) for name, path in point.images.items()}
            run.log(row, step=point.step)
        run.finish()
