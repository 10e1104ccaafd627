"""Turns messages of workers and writers into events, metrics and state."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.compiler.provenance.origins import ENVIRONMENT_JSON, versions_of_modules
from elasticflow.launcher.supervisor.slow_ranks import SlowRanks
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.events import EventRecord
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.journal.metrics import Metrics
    from elasticflow.protocol.messages import NodeFigures


class Ingest:
    """Takes in lines, reports and figures, from which nothing follows for the launch."""

    def __init__(self, journal: Journal, metrics: Metrics, environment: EnvironmentRecord) -> None:
        self._journal = journal
        self._metrics = metrics
        self._environment = environment
        self._slow_ranks = SlowRanks()

    def lines(self, lines: Sequence[EventRecord]) -> None:
        """Take in followed lines of the rank logs, in the order they were written.

        Of a generation that is over only what was measured counts: a node that was cut off, and counts as lost, tells late.
        """
        measured: list[EventRecord] = []
        late = [
            line
            for line in lines
            if line.get("generation", self._journal.generation) < self._journal.generation
        ]
        self._metrics.add(late)
        for line in lines if not late else [line for line in lines if line not in late]:
            if line["event"] in (events.STEP, events.EVALUATION):
                measured.append(line)
                continue
            self._measured(measured)
            measured = []
            self._said(line)
        self._measured(measured)

    def _measured(self, lines: list[EventRecord]) -> None:
        self._metrics.add(lines)
        for line in lines:
            self._journal.show(line)
            if line["event"] == events.STEP:
                self._journal.update(step=line["step"], epoch=line["epoch"], loss=line["loss"])

    def _said(self, line: EventRecord) -> None:
        name = line["event"]
        if name == events.ENVIRONMENT_FOUND:
            self._environment.found(line)
        if not events.EVENTS[name].is_kept:  # `worker.raised`, too: told as the failure that it leads to
            return
        if name == events.DATASET_OPENED:
            self._environment.data(line)
        elif name == events.TRAINING_STARTED:
            self._journal.durations.redone(self._metrics.settle(line["step"], line["generation"]))
            device = str(line["device"]).partition(":")[0]
            facts = {"step": line["step"], "steps": line["steps"], "epoch": line["epoch"], "device": device}
            # Newer snapshots, if there were any, have been set aside. A state in memory is no snapshot: it goes with the launch.
            if line["restored_from"] is not None and not line["from_memory"]:
                facts["snapshot"] = line["restored_from"]
            self._journal.update(at_once=True, **facts)
        elif name == events.STAGE_STARTED:
            self._journal.update(at_once=True, steps=line["steps"])
        elif name == events.TRAINING_FINISHED:  # logging.every may leave the last step out
            self._journal.update(step=line["step"], epoch=line["epoch"])
        self._journal.copy(line)

    def reports(self, reports: Sequence[EventRecord]) -> None:
        """Take in the reports of a node's agent or snapshot writer."""
        for report in reports:
            if report["event"] == events.SNAPSHOT_COMMITTED:
                self._journal.update(at_once=True, snapshot=report["name"])
            self._journal.report(report)

    def figures(self, figures: NodeFigures) -> None:
        """Take in the figures of a node's workers; name the ranks that make the others wait."""
        self._journal.figures(figures)
        for slow in self._slow_ranks.hear(figures):
            self._journal.event(events.RANK_SLOW, **slow._asdict())


class EnvironmentRecord:
    """Writes the imports, the device and the data of rank 0 of the first group that trains."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ENVIRONMENT_JSON
        self._facts: dict[str, Any] = {"format": 1, "datasets": {}}
        self._writing: threading.Thread | None = None

    def data(self, line: Mapping[str, Any]) -> None:
        """Take in a `dataset.opened`."""
        keys = ("samples", "shards", "values", "fingerprint", "source")
        facts = {key: line[key] for key in keys if key in line}
        self._facts["datasets"][line["name"]] = facts

    def found(self, line: Mapping[str, Any]) -> None:
        """Take in an `environment.found`; a thread writes the file, once in a launch.

        Looking up the modules' packages takes a tenth of a second, which a run that restarts does not have.
        """
        if self._writing is None:
            self._facts |= {key: line[key] for key in ("node", "generation", "device", "files")}
            self._writing = threading.Thread(target=self._write, args=(line["modules"],), daemon=True)
            self._writing.start()

    def close(self) -> None:
        """Wait until the file is written, if anything is."""
        if self._writing is not None:
            self._writing.join(timeout=10)

    def _write(self, modules: list[str]) -> None:
        facts = {**self._facts, "versions": versions_of_modules(modules)}
        with suppress(OSError):  # a run folder that cannot be written ends the launch, which says so
            atomic_files.write(self._path, [json.dumps(facts, indent=2).encode(), b"\n"])
