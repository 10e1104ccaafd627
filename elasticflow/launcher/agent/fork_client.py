"""The agent's end of the fork server; free of torch, so that the server starts before it is imported (floor 3)."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from elasticflow.launcher.agent.fork_server import Lines
from elasticflow.launcher.agent.helpers import HelperLostError

if TYPE_CHECKING:
    from pathlib import Path


class ForkServer:
    """The agent's end of the fork server.

    Started by exec from the agent's main thread: the death signal fires when the *thread* that started
    a process ends.
    """

    def __init__(
        self,
        entry_point: Path,
        path: list[str],
        modules: list[str],
        start_method: str,
        keep_fds: tuple[int, ...],
        seed: int = 0,
    ) -> None:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        # libgomp hangs in a forked child if the parent ever ran a parallel kernel with more than one thread.
        environment.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        environment.update({"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"})
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "elasticflow.launcher.agent.fork_server",
                str(theirs.fileno()),
                str(os.getpid()),
            ],
            pass_fds=(theirs.fileno(), *keep_fds),
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._lines = Lines(ours)
        setup = {
            "entry_point": str(entry_point),
            "path": path,
            "modules": modules,
            "start_method": start_method,
            "seed": seed,
        }
        # A server that is gone already is noticed by `wait_ready`.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._lines.send({"setup": setup})
        self.refused: list[dict[str, str]] | None = None
        self.exits: dict[int, tuple[int, float]] = {}
        self._started: dict[int, int] = {}

    def fileno(self) -> int:
        """The descriptor that becomes readable when a worker exits."""
        return self._lines.channel.fileno()

    def pump(self, timeout: float = 0.0) -> bool:
        """Take in what the server reports, waiting at most *timeout* seconds for the first of it.

        Returns:
            False when the server is gone.
        """
        while select.select([self._lines.channel], [], [], timeout)[0]:
            try:
                messages = self._lines.read()
            except ConnectionResetError:  # it was killed with a request unread
                return False
            if messages is None:
                return False
            for message in messages:
                if "exited" in message:
                    self.exits[message["exited"]] = (message["code"], message["at"])
                elif "started" in message:
                    self._started[message["started"]] = message["pid"]
                    self.exits.pop(message["pid"], None)  # of a worker long gone that had the same id
                else:
                    self.refused = message["refused"]
            timeout = 0.0
        return True

    def wait_ready(self) -> list[dict[str, str]]:
        """Return the modules that were refused, once the server has imported all others.

        Raises:
            HelperLostError: the server ended instead; its own message is in the agent's log.
        """
        while self.refused is None:
            if not self.pump(1.0):
                raise self.lost()
        return self.refused

    def spawn(self, local_rank: int, environment: dict[str, str], stdout: str, stderr: str) -> int:
        """Fork one worker and return its process id.

        Raises:
            HelperLostError: the server is gone.
        """
        self._started.pop(local_rank, None)
        request = {"local_rank": local_rank, "environment": environment, "stdout": stdout, "stderr": stderr}
        try:
            self._lines.send({"spawn": request})
        except (BrokenPipeError, ConnectionResetError):
            raise self.lost() from None
        while local_rank not in self._started:
            if not self.pump(1.0):
                raise self.lost()
        return self._started[local_rank]

    def lost(self) -> HelperLostError:
        """Return the error that says how the server ended, whose socket was found closed."""
        return HelperLostError("fork server", self.process.wait())
