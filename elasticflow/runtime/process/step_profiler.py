"""Traces the next steps of this rank on request, which it reads at the end of a step; other ranks take no part."""

from __future__ import annotations

import gzip
import json
import shutil
import time
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.protocol.json_codec import from_json
from elasticflow.protocol.messages import ProfileRequest
from elasticflow.runtime.measuring import marks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.run_folder import RunFolder
    from elasticflow.runtime.process.step_log import Heartbeat


# The others wait for this rank meanwhile: a fifth of the time of the default, and little larger.
_COMPRESSION = 3


class StepProfiler:
    """Answers the requests that the agent writes into this rank's heartbeat slot.

    What goes wrong with a trace is told, and never ends training. Nothing that is traced has other values than without.

    Args:
        device_type: Type of the device of the model, whose kernels are traced, too.
        go_on: Called after time was spent that belongs to no step.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        folder: RunFolder,
        rank: int,
        device_type: str,
        event: Callable[..., None],
        go_on: Callable[[], None],
    ) -> None:
        self._heartbeat, self._folder, self._rank = heartbeat, folder, rank
        self._device_type, self._event, self._go_on = device_type, event, go_on
        self._answered = 0
        self._trace: _Trace | None = None

    def after_step(self, step: int) -> None:
        """Begin, continue with or end a trace; called by every rank after each step, *step* is the number of finished ones."""
        number = self._heartbeat.requested_profile()
        if self._trace is None and number != self._answered:
            self._answered = number
            self._try(lambda: self._begin(step))
        elif self._trace is not None:
            trace = self._trace
            self._try(lambda: self._end(trace) if trace.step(step) else None)

    def finish(self) -> None:
        """End a trace early with the steps that it has: no further one is made by this process."""
        if (trace := self._trace) is not None:
            self._try(lambda: self._end(trace))

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  # whatever the profiler or the disk raises
            self._fail(f"{type(error).__name__}: {error}")

    def _begin(self, step: int) -> None:
        text = self._folder.profile_request(self._answered).read_bytes()
        request = from_json(ProfileRequest, json.loads(text))
        place = self._folder.trace(self._answered, self._rank)
        self._trace = _Trace(request, place, step, device_type=self._device_type)
        # The first step of a trace only warms up.
        self._event(events.PROFILE_STARTED, profile=self._answered, step=step + 1, steps=request.steps)

    def _end(self, trace: _Trace) -> None:
        """Write the trace; it is there as a whole, or not at all."""
        before = self._heartbeat.phase("profile")
        self._trace = None
        began = time.monotonic()
        if not trace.end():
            self._fail("the run ended before a step was recorded")
        else:
            self._event(
                events.PROFILE_FINISHED,
                profile=self._answered,
                path=str(trace.path),
                first_step=trace.first,
                last_step=trace.last,
                bytes=trace.path.stat().st_size,
                seconds=round(time.monotonic() - began, 3),
            )
        self._heartbeat.phase(before)
        self._go_on()

    def _fail(self, reason: str) -> None:
        self._trace = None
        marks.record(is_on=False)
        self._event(events.PROFILE_FAILED, profile=self._answered, reason=reason)


class _Trace:
    """One trace of torch's profiler, which begins after *step*: a step that warms up, then those that are recorded."""

    def __init__(self, request: ProfileRequest, path: Path, step: int, *, device_type: str) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        self.path, self._request, self._is_written = path, request, False
        self.first = self.last = step + 1
        kernels = getattr(ProfilerActivity, device_type.upper(), ProfilerActivity.CPU)
        self._profiler: Any = profile(
            activities={ProfilerActivity.CPU, kernels},
            schedule=schedule(wait=0, warmup=1, active=request.steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=request.shapes,
            profile_memory=request.memory,
            with_stack=request.stacks,
        )
        marks.record(is_on=True)
        self._profiler.start()

    def step(self, step: int) -> bool:
        """Take note that *step* is finished; return whether it was the last one to be recorded."""
        self.last = step
        if step < self.first + self._request.steps:
            self._profiler.step()
            return False
        return True

    def end(self) -> bool:
        """Write what was recorded; return whether that was anything."""
        marks.record(is_on=False)
        self.first += 1  # after the one that warmed up
        self._profiler.stop()
        self._profiler = None
        return self._is_written

    def _write(self, profiler: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        plain, packed = (self.path.with_name(f".{self.path.name}.{name}") for name in ("json", "tmp"))
        try:
            # torch packs a file, too, but by way of the folder for temporary files, which may be small.
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=_COMPRESSION) as target:
                shutil.copyfileobj(source, target)
            packed.replace(self.path)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)
        self._is_written = True
