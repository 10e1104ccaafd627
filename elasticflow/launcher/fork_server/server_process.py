"""Starting the fork server's process, and the ends of it and of the writer, which end the agent; only what a bare interpreter has is imported here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import NamedTuple

from elasticflow.system.installation import module_command
from elasticflow.system.processes import is_killed_from_outside, signal_or_code


class ServerProcess(NamedTuple):
    """A fork server that waits for its setup; if it is warm, it imports what every job needs meanwhile."""

    process: subprocess.Popen[bytes]
    connection: socket.socket

    def end(self) -> None:
        """Kill it; it is gone afterwards."""
        self.process.kill()
        self.process.wait()
        self.connection.close()


def start_server(keep_fds: tuple[int, ...] = (), *, is_warm: bool = True) -> ServerProcess:
    """Start a fork server by exec; to be called from the main thread: the kernel kills a process when the *thread* that started it ends.

    Args:
        keep_fds: Descriptors that workers inherit.
        is_warm: Workers are forked, so it is to import what they need.
    """
    ours, theirs = socket.socketpair()
    environment = dict(os.environ)
    # libgomp hangs in a forked child if the parent ever ran a parallel kernel with more than one thread.
    environment.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
    environment.update({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"})
    program = "elasticflow.launcher.fork_server.server"
    arguments = [str(theirs.fileno()), str(os.getpid()), "warm" if is_warm else "cold"]
    process = subprocess.Popen(
        module_command(program, *arguments),
        pass_fds=(theirs.fileno(), *keep_fds),
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    theirs.close()
    return ServerProcess(process, ours)


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
