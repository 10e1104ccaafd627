"""A worker started from nothing instead of from the warm server: `[torchrun] start_method = "spawn"`."""

from __future__ import annotations

import faulthandler
import runpy
import signal
import sys

from elasticflow.system.processes import die_with_parent
from elasticflow.telemetry.masking import mask_streams


def main() -> None:
    """Run the entry point that the command line names, after the process id of the fork server."""
    die_with_parent(int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # exec has removed the fork server's handler
    mask_streams()
    entry_point = sys.argv[2]
    sys.argv = [entry_point]
    runpy.run_path(entry_point, run_name="__main__")


if __name__ == "__main__":
    main()
