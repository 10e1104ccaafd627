"""Kubeflow Trainer: progress, time left and newest measures in the TrainJob's status.

The controller gives each pod the URL, a certificate and a token that it renews (KEP-2779, feature gate TrainJobStatus).

Guarantee: the status is the newest state; it is sent at most every five seconds, and once more at the end.
"""

from __future__ import annotations

import json
import math
import os
import ssl
import time
import urllib.error
import urllib.request
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.sinks.sink import Sink, SinkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.events import EventRecord
    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts

URL, TOKEN, CA = (f"KUBEFLOW_TRAINER_SERVER_{part}" for part in ("URL", "TOKEN", "CA_CERT"))
EVERY_S = 5.0
_TIMEOUT_S = 10.0
_MOST_METRICS = 256
_RECENT = 100  # points from which the time left is estimated


class Kubeflow(Sink):
    """Posts the status of the TrainJob that this process is part of."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._sent_at = -math.inf
        self._is_new = False

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Go on with the newest values.

        Raises:
            SinkError: no TrainJob's controller has started this.
        """
        if not os.environ.get(URL) or not os.environ.get(TOKEN):
            raise SinkError(
                f"{URL} and {TOKEN} are not set: this is no pod of a TrainJob with TrainJobStatus"
            )
        self._steps: int | None = remembered.get("steps")
        self._step: int = remembered.get("step", 0)
        self._metrics: dict[str, float] = dict(remembered.get("metrics", {}))
        self._pace: deque[tuple[int, float]] = deque(maxlen=_RECENT)

    def remember(self) -> Remembered:
        """Return the newest values."""
        return {"steps": self._steps, "step": self._step, "metrics": self._metrics}

    def points(self, batch: Sequence[Point]) -> None:
        """Take over the newest values, and send them unless that was done just now."""
        for point in batch:
            self._step = max(self._step, point.step)
            finite = {name: value for name, value in point.values.items() if math.isfinite(value)}
            self._metrics |= finite
            if "loss" in point.values:
                self._pace.append((point.step, point.time))
        self._is_new = True
        if time.monotonic() - self._sent_at >= EVERY_S:
            self._send()

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Take over how long training is, and that it is over."""
        for record in batch:
            match record.get("event"):
                case events.TRAINING_STARTED:
                    self._steps = record.get("steps") or self._steps
                    self._pace.clear()
                case events.RUN_FINISHED:
                    self._steps = self._step = record.get("step") or self._step
                    self._is_new = True
                case _:
                    pass

    def close(self) -> None:
        """Send what is newer than the last status."""
        if self._is_new:
            self._send()

    def _status(self) -> dict[str, Any]:
        metrics = [{"name": name, "value": f"{value:.6g}"} for name, value in self._metrics.items()]
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        status: dict[str, Any] = {"metrics": metrics[:_MOST_METRICS], "lastUpdatedTime": now}
        if self._steps:
            status["progressPercentage"] = min(100, 100 * self._step // self._steps)
            if (left_s := self._left_s()) is not None:
                status["estimatedRemainingSeconds"] = left_s
        return status

    def _left_s(self) -> int | None:
        assert self._steps is not None
        if self._step >= self._steps:
            return 0
        if len(self._pace) < 2 or self._pace[-1][0] <= self._pace[0][0]:
            return None
        (first, began), (last, ended) = self._pace[0], self._pace[-1]
        return max(0, round((ended - began) / (last - first) * (self._steps - self._step)))

    def _send(self) -> None:
        """Post the status.

        Raises:
            SinkError: it was refused.
            OSError: nobody answers, or the token cannot be read.
        """
        token = Path(os.environ[TOKEN]).read_text(encoding="utf-8").strip()  # it is renewed
        request = urllib.request.Request(  # noqa: S310  # what the controller names
            os.environ[URL],
            json.dumps({"trainerStatus": self._status()}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
        )
        context = ssl.create_default_context(cafile=os.environ.get(CA))
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context):  # noqa: S310
                pass
        except urllib.error.HTTPError as error:
            raise SinkError(f"the controller answers {error.code} {error.reason}") from error
        self._sent_at, self._is_new = time.monotonic(), False
