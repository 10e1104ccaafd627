"""The command: `elasticflow` and `python -m elasticflow`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    # First of all: Ctrl-C during the imports that follow would end in a traceback through them.
    signal.signal(signal.SIGINT, _leave)
    # Before the command is imported: the first step waits for the agent's imports, not for the command's.
    from elasticflow.launcher.agent.waiting_agent import start_ahead

    start_ahead(sys.argv[1:], os.environ)
    from elasticflow.cli.main import run

    run()


def _leave(number: int, frame: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
