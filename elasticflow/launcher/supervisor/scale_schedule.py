"""Number of nodes over time: `--simulate-nodes` and `--scale`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.errors import ScaleError

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.launching import NodesTable

_CHANGE = re.compile(r"(\d{1,4})(!?)@(\d+(?:\.\d+)?)s?")


@dataclass(frozen=True)
class ScaleChange:
    """From *at_s* seconds after the start on there are *nodes* nodes.

    Attributes:
        by_force: Nodes that go are killed, as by a power cut; else they are asked to leave and given time.
        cue: File that also has to exist; None: time alone decides.
    """

    at_s: float
    nodes: int
    by_force: bool = False
    cue: Path | None = None

    def __str__(self) -> str:
        return f"{self.nodes}{'!' if self.by_force else ''}@{self.at_s:g}s"

    def is_due(self, seconds: float) -> bool:
        """Return whether it is time, *seconds* after the start."""
        return seconds >= self.at_s and (self.cue is None or self.cue.exists())


def parse_scale(text: str) -> tuple[ScaleChange, ...]:
    """Return the changes in a text like `1@0s 3@20s 2!@40s`, in order of time; `!` kills the nodes that go.

    Raises:
        ScaleError: *text* has another form, or says nothing about the start.
    """
    changes = []
    for word in text.split():
        parsed = _CHANGE.fullmatch(word)
        if parsed is None or int(parsed[1]) < 1:
            raise ScaleError(
                f"--scale: `{word}` is not a number of nodes at a time",
                'write it like "1@0s 3@20s 2@40s"; "2!@40s" kills the nodes that go',
            )
        changes.append(ScaleChange(float(parsed[3]), int(parsed[1]), parsed[2] == "!"))
    changes.sort(key=lambda change: change.at_s)
    if not changes or changes[0].at_s > 0:
        raise ScaleError("--scale says nothing about the start", 'begin with the first nodes, like "1@0s"')
    return tuple(changes)


def check_scale(changes: tuple[ScaleChange, ...], nodes: NodesTable) -> None:
    """Check that the job may have as many nodes as *changes* need.

    Raises:
        ScaleError: the job may only have fewer.
    """
    most = max(change.nodes for change in changes)
    if most > nodes.max:
        raise ScaleError(
            f"{most} nodes are to be simulated, nodes.max is {nodes.max}",
            f"--set nodes.max={most}, and nodes.nproc_per_node to what one machine can bear",
        )


ALONE = (ScaleChange(0.0, 1),)
"""One node, from the start to the end."""

ELSEWHERE = (ScaleChange(0.0, 0),)
"""None on this machine: all join from others."""
