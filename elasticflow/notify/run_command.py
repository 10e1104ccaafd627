"""`python -m elasticflow.notify.run_command PARENT_PID COMMAND...`: becomes the command, which ends with its parent."""

from __future__ import annotations

import os
import signal
import sys

from elasticflow.system.processes import die_with_parent

_NOT_FOUND = 127  # as a shell has it


def main() -> None:
    """Become the command."""
    die_with_parent(int(sys.argv[1]))
    command = sys.argv[2:]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)  # the follower ignores them
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"it cannot be run: {error.strerror}\n")
        sys.exit(_NOT_FOUND)


if __name__ == "__main__":
    main()
