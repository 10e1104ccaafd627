"""A worker started from nothing instead of from the warm server: `[torchrun] start_method = "spawn"`."""

from __future__ import annotations

import faulthandler
import json
import runpy
import signal
import sys
from pathlib import Path

from elasticflow.launcher.fork_server.script import run_script
from elasticflow.protocol.child_processes import Program
from elasticflow.protocol.json_codec import from_json
from elasticflow.system import forked_children
from elasticflow.system.masking import mask_streams
from elasticflow.system.processes import die_with_parent


def main() -> None:
    """Run the program that the command line names after the process id of the fork server: a file, or a script as JSON."""
    die_with_parent(int(sys.argv[1]))
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # exec has removed the fork server's handler
    mask_streams()
    forked_children.name_children()
    entry_point = sys.argv[2]
    if entry_point.startswith("{"):
        program = from_json(Program, json.loads(entry_point))
        folder = program.folder if program.module else str(Path(program.entry).parent)
        sys.path.insert(0, folder)
        run_script(program)
    sys.argv = [entry_point]
    runpy.run_path(entry_point, run_name="__main__")


if __name__ == "__main__":
    main()
