"""Turns a process that the fork server has started into a worker."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elasticflow.launcher.fork_server import rank_at_import
from elasticflow.launcher.fork_server.script import run_script
from elasticflow.protocol.child_processes import Program
from elasticflow.protocol.json_codec import from_json
from elasticflow.system import forked_children
from elasticflow.system.masking import mask_streams
from elasticflow.system.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.fork_server.protocol import Spawn


def set_apart() -> None:
    """Give this process the usual signals and a session of its own.

    Ctrl-C reaches the supervisor only then, and one signal to the session reaches the worker's loader processes too.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()


def take_over(request: Spawn) -> None:
    """Send this process's output to the files of the worker that *request* asks for, and take its variables."""
    for descriptor, path in ((1, request.stdout), (2, request.stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # stacks of a hang, also of one in an import
    os.environ.update(request.environment)
    rank_at_import.tell_libraries()
    mask_streams()
    forked_children.name_children()


def run_entry_point(path: str) -> None:
    """Run the launch's train.py as the main program."""
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")


def end_with(action: Callable[[], None]) -> NoReturn:
    """End this process with *action*'s exit code; an exception that it raises is shown.

    The frames of the forking process are not unwound, and torch's destructors do not run.
    """
    code = 1
    try:
        action()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:  # noqa: BLE001  the last frame of a process: everything is shown, then it ends
        _show(error)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _show(error: BaseException) -> None:
    """Show *error* as Python does: by the hook that the script may have set, else its traceback."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # noqa: BLE001  the hook's own: both are shown
        traceback.print_exc()


def main() -> None:
    """Be a worker that is started from nothing, and not forked: `[torchrun] start_method = "spawn"`.

    The command line names the process id of the fork server, then a file to run, or a script as JSON.
    """
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
    run_entry_point(entry_point)


if __name__ == "__main__":
    main()
