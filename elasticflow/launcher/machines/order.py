"""The order to a host, on the standard input of the process that ssh starts there: none of it is on a command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

LEAVE = "leave"
"""A line that asks the node to exit: once, as SIGTERM does; twice: at once."""
CANCELLED = 76
"""Exit code of a node whose run `elasticflow cancel` has ended; one that was asked to leave its host alone exits with `INTERRUPTED`."""


@dataclass(frozen=True)
class Order:
    """A node to run.

    Attributes:
        environment: Variables that the command has besides those of the host.
        run: Path of the run's folder below that of all runs: one node of the run lives on a host at a time.
        grace_s: Seconds that a node has to exit.
        host: The host, as the file of hosts names it; empty: it is not in such a file.
        launch: Id of the command that starts the nodes, another one at each start.
    """

    folder: str
    words: tuple[str, ...]
    environment: dict[str, str]
    run: str
    grace_s: float
    host: str = ""
    launch: str = ""

    def to_line(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Order:
        """Return the order that `to_line` wrote."""
        values = json.loads(line)
        return cls(**{**values, "words": tuple(values["words"])})
