"""Programs started as forks of one process that has imported torch, for tests that start many of them.

A fresh interpreter spends 3.5 s of CPU on importing torch and our runtime; a fork of the product's fork server, which
has done it, some hundredths. The server sees nothing of what the fork is to run: its entry point is this file, which
becomes the program named in the environment. Tests about a fresh interpreter start one.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.launcher.fork_server.client import ForkServer

ROOT = Path(__file__).parents[1]
_REQUEST = "ELASTICFLOW_TEST_PROGRAM"
# For the writers of programs, which they fork.
_WRITERS = tuple(
    f"elasticflow.snapshots.writer.{name}" for name in ("load_service", "memory_tier", "shard_writer")
)


class Program:
    """A program that runs as a fork; what it writes lies in two files.

    Attributes:
        pid: Its process id.
        stdout: What it writes to standard output.
        stderr: What it writes to standard error.
    """

    def __init__(self, server: ForkServer, pid: int, stdout: Path, stderr: Path) -> None:
        self._server = server
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        if self._code is None:
            if not self._server.pump():
                raise self._server.lost()
            if self.pid in self._server.exits:
                self._code, _ = self._server.exits.pop(self.pid)
        return self._code

    def wait(self, timeout_s: float) -> int:
        """Return its exit code once it has ended.

        Raises:
            TimeoutError: it still runs after *timeout_s*.
        """
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s} s")
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        """End it, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # its exit code is under way
                os.kill(self.pid, signal.SIGKILL)


class ForkedPrograms:
    """Forks programs from one server, started with the first of them.

    Args:
        folder: Where the output of programs goes.
        modules: What the server imports besides; for programs that would each spend seconds on it.
    """

    def __init__(self, folder: Path, modules: tuple[str, ...] = ()) -> None:
        self._folder, self._modules = folder, modules
        self._server: ForkServer | None = None
        self._number = 0

    def start(
        self, program: Path, *arguments: str, environment: Mapping[str, str], cwd: Path = ROOT
    ) -> Program:
        """Start *program* as `python program arguments...` would, with *environment* and no other variables."""
        from elasticflow.launcher.fork_server.client import ForkServer
        from elasticflow.launcher.fork_server.protocol import Setup

        if self._server is None:
            modules = ("tests.command_line", *_WRITERS, *self._modules)
            self._server = ForkServer.start(Setup(__file__, (str(ROOT),), modules))
            self._server.wait_ready()
        self._number += 1
        request = {"argv": [str(program), *arguments], "environment": dict(environment), "cwd": str(cwd)}
        stdout, stderr = (self._folder / f"{self._number}.{name}" for name in ("stdout", "stderr"))
        for output in (stdout, stderr):  # there, also of a program that is killed before it could open them
            output.touch()
        variables = {_REQUEST: json.dumps(request)}
        pid = self._server.spawn(self._number, variables, str(stdout), str(stderr))
        return Program(self._server, pid, stdout, stderr)

    def close(self) -> None:
        """End the server, and with it all programs."""
        if self._server is not None:
            self._server.process.kill()
            self._server.process.wait()
            self._server._channel.connection.close()
            self._server = None


def _become_program() -> None:
    """Run the program that is asked for, as far as can be in the state of a fresh interpreter."""
    import numpy as np

    from tests import command_line

    request = json.loads(os.environ[_REQUEST])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    # The fork server blocks SIGTERM for workers and ignores SIGHUP.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # All forks have the server's random state, which would hide that ranks draw different numbers unless they are seeded.
    random.seed()
    np.random.seed()  # noqa: NPY002  # the generator that programs draw from
    # The server has the job's modules imported in a random state of their own; a worker that joins sees to that itself.
    sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("elasticflow.")]
    command_line.fork_helpers((), (command_line.WRITER,))
    sys.argv = request["argv"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
    atexit._run_exitfuncs()  # as at an interpreter's end; the server's fork ends by os._exit


_SERVE = """
import json, os, sys, traceback
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exec(json.loads(line))
            print(json.dumps(said), flush=True)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        print("null", flush=True)
"""


class Interpreter:
    """A fresh interpreter that runs *beginning* once, and then each program in a fork of its own.

    Args:
        beginning: Lines of Python, among them `said = []`.
        options: Of the interpreter.
    """

    def __init__(self, beginning: str, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", beginning + _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def said(self, program: str) -> list[Any]:
        """Return the list `said` of *program*; fail if it has raised an error, which standard error shows."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(textwrap.dedent(program)) + "\n")
        self._process.stdin.flush()
        said: list[Any] | None = json.loads(self._process.stdout.readline() or "null")
        assert said is not None, "the program has failed"
        return said

    def close(self) -> None:
        """End it."""
        self._process.communicate()


if __name__ == "__main__":
    _become_program()
