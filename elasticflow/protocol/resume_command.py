"""The command that continues a run where `elasticflow resume` would not: its nodes are elsewhere."""

from __future__ import annotations

import os

RESUME_COMMAND = "ELASTICFLOW_RESUME_COMMAND"
"""Variable of the process that leads: what to tell people. A batch script sets it, or whatever else starts the nodes."""


def told_command() -> str | None:
    """Return the command that this process was given, if any."""
    return os.environ.get(RESUME_COMMAND) or None


def resume_command(run_id: str, told: object) -> str:
    """Return the command that continues a run; *told* is the command that its launch recorded."""
    return told if isinstance(told, str) and told else f"elasticflow resume {run_id}"
