"""Ends the agent when its fork server or writer has ended, so that another agent is started."""

from __future__ import annotations

import signal

from elasticflow.system.processes import is_killed_from_outside, signal_or_code

# Exit codes of an agent. Any other than 0 is an error of its own.
STORE_LOST = 4
HELPER_KILLED = 5
_KILLED = -signal.SIGKILL


class HelperLostError(RuntimeError):
    """A helper ended while the agent needed it."""

    def __init__(self, name: str, exit_code: int | None) -> None:
        code = _KILLED if exit_code is None else exit_code
        how = signal_or_code(code)
        super().__init__(f"its {name} was {how}" if code < 0 else f"its {name} ended with {how}")
        self.agent_exit_code = HELPER_KILLED if is_killed_from_outside(code) else 1
