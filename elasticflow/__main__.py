"""The command: `elasticflow` and `python -m elasticflow`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the command line and exit with its code."""
    # This comes first: Ctrl-C during the imports below would end in a traceback through them.
    signal.signal(signal.SIGINT, _leave)
    _take_signals()
    _open_closed_streams()
    _name_working_folder()
    # This comes before the import of the command: the first step waits for the agent's imports, not for the command's.
    from elasticflow.launcher.agent.waiting_agent import start_ahead

    start_ahead(sys.argv[1:], os.environ)
    from elasticflow.cli.main import run

    run()


def _take_signals() -> None:
    """Undo what a parent process may leave behind: blocked signals, and an ignored SIGCHLD.

    A blocked signal would never ask the run to exit; without SIGCHLD the end of a child would not be seen, or its exit code be lost.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _open_closed_streams() -> None:
    """Open standard streams that are closed (`elasticflow run job.toml >&-`) on /dev/null, for all processes of a run.

    The next file that is opened would get the number of a closed stream, and what a process prints would be in that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: PTH123, SIM115  # it gets the lowest number that is free: the stream's
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _name_working_folder() -> None:
    """Have this process' children find elasticflow where `python -m elasticflow` did, if that is the working folder.

    They do not look there (`-P`), and would run another elasticflow that is installed, or find none.
    """
    if sys.path[0] == str(Path(__file__).parents[1]):
        folders = filter(None, (sys.path[0], os.environ.get("PYTHONPATH")))
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)


def _leave(number: int, frame: object) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    main()
