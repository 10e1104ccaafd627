"""What `scale.py` reports: what each part of a launch has cost, a table, growth, and a picture; pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEPT = Path(__file__).with_name("scale.json")


@dataclass
class Phase:
    """One part of a launch of *nodes* nodes, and what it has cost.

    Attributes:
        title: What happens.
        nodes: How many nodes the launch has.
        seconds: How long it took on a machine that also ran the nodes.
        supervisor_s: CPU seconds of the supervisor's main thread.
        keys_s: CPU seconds of the key server's thread.
        nodes_s: CPU seconds of the simulated nodes.
        requests: At the key server.
        received: Bytes of their keys and values.
        sent: Bytes that the key server sent.
        operations: Of the snapshots' store.
        connections: Most at a time at the key server, until then.
        descriptors: Open ones of the process of the key server, at its end.
        peak_bytes: Most memory that the supervisor's process has had until then.
        journal_bytes: Of events.jsonl, at the end of the launch.
    """

    title: str
    nodes: int
    seconds: float = 0.0
    supervisor_s: float = 0.0
    keys_s: float = 0.0
    nodes_s: float = 0.0
    requests: int = 0
    received: int = 0
    sent: int = 0
    operations: int = 0
    connections: int = 0
    descriptors: int = 0
    peak_bytes: int = 0
    journal_bytes: int = 0

    def take(self, before: Mapping[str, Any], after: Mapping[str, Any], nodes_s: float) -> None:
        """Take in what was used until it began, and until it ended."""
        self.nodes_s = nodes_s
        self.seconds = after["seconds"] - before["seconds"]
        self.supervisor_s = after["supervisor"] - before["supervisor"]
        self.keys_s = after["keys"] - before["keys"]
        self.requests = after["requests"] - before["requests"]
        self.received = after["received"] - before["received"]
        self.sent = after["sent"] - before["sent"]
        self.connections, self.descriptors = after["connections"], after["descriptors"]
        self.peak_bytes = after["peak_bytes"]

    @property
    def cpu_s(self) -> float:
        """CPU seconds of supervisor and key server."""
        return self.supervisor_s + self.keys_s

    def __str__(self) -> str:
        """Return a line."""
        return (
            f"{self.title:45} {self.seconds:7.2f} s, supervisor {self.supervisor_s:7.2f} s, keys {self.keys_s:7.2f} s, "
            f"nodes {self.nodes_s:7.2f} s, {self.requests:7d} requests, in {self.received / 1e6:7.2f} MB, "
            f"out {self.sent / 1e6:8.2f} MB, {self.connections} connections, {self.peak_bytes / 1e6:.0f} MB"
            + (f", {self.operations} operations" if self.operations else "")
        )


def exponents(phases: Sequence[Phase]) -> list[str]:
    """Return, for each part, how CPU seconds, requests, bytes and operations grow: the exponent of the number of nodes."""
    lines = []
    for title in dict.fromkeys(phase.title for phase in phases):
        own = [phase for phase in phases if phase.title == title]
        facts: dict[str, list[tuple[float, float]]] = {
            "CPU": [(phase.nodes, phase.cpu_s) for phase in own],
            "requests": [(phase.nodes, phase.requests) for phase in own],
            "bytes": [(phase.nodes, phase.sent + phase.received) for phase in own],
            "operations": [(phase.nodes, phase.operations) for phase in own],
        }
        grown = {name: growth(points) for name, points in facts.items()}
        told = ", ".join(f"{name} {value:.2f}" for name, value in grown.items() if value is not None)
        if told:
            lines.append(f"{title}: {told}")
    return lines


def growth(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the exponent with which the values grow, by least squares on logarithms; None if that is not to be told."""
    logs = [(math.log(x), math.log(y)) for x, y in points if x > 0 and y > 0]
    if len(logs) < 2 or len(logs) < len(points):
        return None
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread if spread else None


def table(phases: Sequence[Phase]) -> str:
    """Return a table in Markdown: a row for each part and number of nodes."""
    lines = [
        "| | nodes | seconds | CPU s, supervisor | CPU s, keys | requests | MB in | MB out |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for title in dict.fromkeys(phase.title for phase in phases):
        lines += [
            f"| {title} | {phase.nodes:,} | {phase.seconds:.1f} | {phase.supervisor_s:.2f} | {phase.keys_s:.2f} "
            f"| {phase.requests:,} | {phase.received / 1e6:.2f} | {phase.sent / 1e6:.2f} |"
            for phase in phases
            if phase.title == title
        ]
    return "\n".join(lines)


def keep(name: str, phases: Sequence[Phase], path: Path = KEPT) -> None:
    """Put the figures into the file under *name*; those of other numbers of nodes stay."""
    all_kept = kept(path)
    sizes = {phase.nodes for phase in phases}
    others = [phase for phase in all_kept.get(name, []) if phase.nodes not in sizes]
    all_kept[name] = sorted([*others, *phases], key=lambda phase: phase.nodes)
    content = {key: [_rounded(phase) for phase in own] for key, own in all_kept.items()}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def kept(path: Path = KEPT) -> dict[str, list[Phase]]:
    """Return the figures that were kept, by name."""
    if not path.exists():
        return {}
    return {name: [Phase(**each) for each in own] for name, own in json.loads(path.read_text()).items()}


def _rounded(phase: Phase) -> dict[str, Any]:
    return {
        key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(phase).items()
    }
