"""The command: `elasticflow` and `python -m elasticflow`."""

from __future__ import annotations

import os
import sys

from elasticflow.launcher.agent.waiting_agent import start_ahead


def main() -> None:
    """Run the command line and leave with its exit code."""
    # Before anything else is imported: the first step waits for the agent's imports, not for the command's.
    start_ahead(sys.argv[1:], os.environ)
    from elasticflow.cli.main import run

    run()


if __name__ == "__main__":
    main()
