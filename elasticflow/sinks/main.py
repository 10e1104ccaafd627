"""The process that serves a run's sinks: `python -m elasticflow.sinks.main PARENT_PID RUN_FOLDER`.

The process exits once its standard input has ended and everything is delivered, or a bounded time after that. It
reports to the supervisor, which alone writes events, on standard output: one JSON object per line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.run_folder import RunFolder
from elasticflow.system.processes import append_output_to, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.sinks.delivery import Delivery, Report

FLUSH_S = 20.0
"""Seconds that sinks have to finish their deliveries when a launch ends."""
UNTOLD_S = 2.0
"""Seconds of these after which a report names the sinks that are waited for."""
STUCK_S = 60.0
"""A call of a sink that lasts longer than these seconds is reported."""
_LOWEST_PRIORITY = 19
_LOOK_S = 0.2


def main() -> None:
    """Serve until the supervisor closes our standard input or dies."""
    die_with_parent(int(sys.argv[1]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor is asked to exit, and asks us
    os.nice(_LOWEST_PRIORITY)
    folder = RunFolder(Path(sys.argv[2]))
    told = os.dup(1)
    log = folder.path / "logs" / "sinks.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    append_output_to(str(log))
    report = partial(_tell, told)
    asked = threading.Event()
    threading.Thread(target=_await_end_of_input, args=(asked,), daemon=True).start()
    deliveries = deliveries_of(folder, report)
    for delivery in deliveries:
        delivery.start()
    watch = _Watch(deliveries, report)
    while not asked.wait(_LOOK_S):
        watch.look()
    flush(deliveries, time.monotonic() + FLUSH_S, report)
    tell_unsent(deliveries, report)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread may wait for a server for ever


def deliveries_of(folder: RunFolder, report: Report) -> list[Delivery]:
    """Return the deliveries of all sinks of the run's newest launch, and of its [notify].

    Raises:
        RecordError: no record tells the job of the newest launch.
    """
    from elasticflow.sinks.delivery import Delivery
    from elasticflow.sinks.facts import read_facts
    from elasticflow.sinks.notify.moments import Moments
    from elasticflow.sinks.notify.notifier import Notifier, wanted_of
    from elasticflow.sinks.registry import make_sink

    job, run = read_facts(folder)
    # A sink may be of the project.
    sys.path[:0] = [str((run.project_root / part).resolve()) for part in job.job.path]
    sinks = [
        Delivery(name, partial(make_sink, job.logging, name, options), options, run, folder, report)
        for name, options in job.logging.chosen_sinks().items()
    ]
    ways = {} if job.notify is None else job.notify.ways()
    moments = Moments(folder, job.restarts.budget)
    # The position of [notify] does not depend on its options: after a change of them no message is sent again.
    return sinks + [
        Delivery(
            name,
            partial(Notifier, options, moments),
            {},
            run,
            folder,
            report,
            partial(wanted_of, options=options, moments=moments),
        )
        for name, options in ways.items()
    ]


def flush(deliveries: Sequence[Delivery], deadline: float, report: Report) -> None:
    """Return once everything is delivered, or at *deadline* on the monotonic clock; report sinks that take longer."""
    for delivery in deliveries:
        delivery.finish()
    _await_all(deliveries, min(deadline, time.monotonic() + UNTOLD_S))
    for delivery in deliveries:
        if not delivery.is_done.is_set():
            left_s = round(max(0.0, deadline - time.monotonic()))
            report("sink.sending", sink=delivery.name, points=delivery.unsent(), seconds=left_s)
    _await_all(deliveries, deadline)


def _await_all(deliveries: Sequence[Delivery], deadline: float) -> None:
    for delivery in deliveries:
        delivery.is_done.wait(max(0.0, deadline - time.monotonic()))


def send(deliveries: Sequence[Delivery], patience_s: float) -> None:
    """Deliver in the foreground; return once everything is delivered, or nothing has got through for *patience_s*."""
    for delivery in deliveries:
        delivery.finish()
        delivery.start()
    reached, since = [delivery.position for delivery in deliveries], time.monotonic()
    while not all(delivery.is_done.wait(_LOOK_S) for delivery in deliveries):
        now = [delivery.position for delivery in deliveries]
        if now != reached:
            reached, since = now, time.monotonic()
        elif time.monotonic() - since > patience_s:
            return


def tell_unsent(deliveries: Sequence[Delivery], report: Report) -> None:
    """Report, for each sink, the points and events that were not delivered."""
    for delivery in deliveries:
        if not delivery.is_done.is_set():
            count = delivery.unsent()
            if count or delivery.unit == "point":
                report("sink.unsent", sink=delivery.name, points=count, error=delivery.why())


class _Watch:
    """Reports calls that do not return, once for each sink."""

    def __init__(self, deliveries: Sequence[Delivery], report: Report) -> None:
        self._deliveries, self._report = deliveries, report
        self._stuck: set[str] = set()

    def look(self) -> None:
        """Report calls that have lasted too long by now."""
        for delivery in self._deliveries:
            since = delivery.busy_since
            is_stuck = since is not None and time.monotonic() - since > STUCK_S
            if is_stuck and delivery.name not in self._stuck:
                error = f"it has not answered for {STUCK_S:.0f} s"
                self._report("sink.failed", sink=delivery.name, error=error)
                self._stuck.add(delivery.name)
            elif not is_stuck:
                self._stuck.discard(delivery.name)


def _await_end_of_input(asked: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    asked.set()


def _tell(descriptor: int, event: str, /, **fields: Any) -> None:
    """Write a report in a single write, so that reports of several threads do not mix."""
    os.write(descriptor, json.dumps({"event": event, **fields}).encode() + b"\n")


if __name__ == "__main__":
    main()
