"""One run of the tiny job into which a failure is injected, and what people are told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end import tiny_job
from tests.end_to_end.disturbed import Outcome, Series

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.end_to_end.harness import Project, Running

_FEW = 8
UNDISTURBED = "the undisturbed weights"
# What a person is told, and the field that says it.
SAID = {
    events.WORKER_FAILED: "error",
    events.HANG_DETECTED: "phase",
    events.SNAPSHOT_REJECTED: "reason",
    events.SNAPSHOT_FAILED: "reason",
    events.STORE_TROUBLE: "error",
    events.NODE_LOST: "reason",
    events.NODE_EXCLUDED: "reason",
    events.AGENT_RESTARTED: "exit_code",
    events.RUN_FAILED: "error",
    events.RUN_INTERRUPTED: "reason",
}


class Trial:
    """One run of the tiny job into which a failure is injected.

    Args:
        project: With the job.
        name: Of the run.
        expected: What the undisturbed run came to, from `Series.finish`.
    """

    def __init__(self, project: Project, name: str, expected: dict[str, Any]) -> None:
        self.project, self.run_id, self.expected = project, name, expected
        self.series: Series
        self.ended: list[str] = []
        self.is_good = True

    def start(self, *sets: str, options: Sequence[str] = (), **variables: str) -> Series:
        """Start the run, and return once it has finished a few steps."""
        tiny_job.reset(self.project)
        variables = {"TINY_PAUSE_S": "0.02", **variables}
        self.series = Series(self.project, self.run_id, *sets, job="tiny", options=options, **variables)
        self.series.trains(0)
        self.series.reach(_FEW)
        return self.series

    @property
    def running(self) -> Running:
        """The command that runs."""
        return self.series.running

    def cue(self, act: str, rank: int = 1) -> None:
        """Have the job's own code on *rank* do *act* in its next step, once."""
        tiny_job.cue(self.project, act, rank)

    def survives(self, act: str, *sets: str) -> None:
        """Start, have rank 1's own code do *act*, and see the run continue and come to its end."""
        self.start(*sets)
        self.cue(act)
        self.goes_on()
        self.finish()

    def look_in(self, uri: str, options: dict[str, Any] | None = None) -> None:
        """Have the snapshots looked for in another place than the run folder."""
        self.series.catalog = Catalog(Storage(uri, options or {}), f"{self.run_id}/")

    def goes_on(self, after: int = 1) -> int:
        """Return the generation that trains after the one numbered *after*."""
        return self.series.trains(after)

    def finish(self, *, is_whole: bool = True) -> None:
        """Let it come to its end and compare every loss and every bit of the last snapshot."""
        tiny_job.hurry(self.project)
        outcome, expected = Outcome("", ""), self.expected
        found = self.series.finish(None, outcome)
        rejected = [event["name"] for event in self.series.named(events.SNAPSHOT_REJECTED)]
        problems = [text for text in outcome.problems if not any(name in text for name in rejected)]
        if found["bits"] != expected["bits"]:
            problems.append("other weights than undisturbed")
        losses = {step: expected["losses"].get(step) for step in found["losses"]}
        if found["losses"] != losses or (is_whole and losses != expected["losses"]):
            problems.append("other losses than undisturbed")
        self.ended.append("; ".join(problems) or UNDISTURBED)
        self.is_good &= not problems

    def is_refused(self, code: int, *words: str, by: Running | None = None) -> None:
        """See that the command ends with *code* and says all *words*."""
        command = by or self.running
        found, text = command.end(60), command.output.read_text(encoding="utf-8")
        missing = [word for word in words if word not in text]
        said = next((line for line in text.splitlines() if words and words[0] in line), "").strip()
        self.ended.append(
            f"refused with code {found}: {_brief(said)}" if not missing else f"says no {missing}: {text}"
        )
        self.is_good &= found == code and not missing

    def resume(self) -> None:
        """Continue with the run in a new launch."""
        self.series.resume()
        self.ended.append("resumed")

    def said(self) -> str:
        """Return what people were told, each once."""
        told = []
        for event in self.series.look():
            if (key := SAID.get(event["event"])) is not None:
                kind = f" {event['class']}" if event.get("class") else ""
                told.append(f"`{event['event']}`{kind}: {_brief(str(event.get(key)))}")
        return "; ".join(dict.fromkeys(told)) or "nothing, all continued"


def _brief(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= 180 else line[:177] + "..."
