"""The command: `elasticflow` and `python -m elasticflow`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    # This comes first: Ctrl-C during the imports below would end in a traceback through them.
    signal.signal(signal.SIGINT, _leave)
    # This comes before the import of the command: the first step waits for the agent's imports, not for the command's.
    from elasticflow.launcher.agent.waiting_agent import start_ahead

    start_ahead(sys.argv[1:], os.environ)
    from elasticflow.cli.main import run

    run()


def _leave(number: int, frame: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
