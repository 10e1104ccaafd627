"""A child process that runs the job's own code, which may do anything: watched, limited, ended with all it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# In the environment of everything that the child starts, wherever it goes.
MARK = "ELASTICFLOW_PROBE"
# Of what the child prints, this much is kept: the end.
_KEPT_BYTES = 1 << 16
_LOOK_S = 0.02
# faulthandler writes the stacks at once.
_STACKS_S = 1.0
# What the child started may still be ending with it.
_LEAVE_S = 0.3


class ChildEnd(NamedTuple):
    """How a child ended.

    Attributes:
        code: Its exit code, negative for a signal; None: it ran past the limit.
        messages: What it told, in order.
        output: The end of what it printed; after the limit, or a fatal signal, the stacks too.
        left: What it had started and left running, by name; ended now.
    """

    code: int | None
    messages: list[dict[str, Any]]
    output: str
    left: list[str]


def run(
    argv: Sequence[str],
    request: str,
    environment: Mapping[str, str],
    limit_s: float,
    watch: Callable[[dict[str, Any] | None], None] = lambda _: None,
) -> ChildEnd:
    """Run a child to its end, or to the limit; nothing it started lives afterwards.

    Args:
        argv: Command; the number of the pipe for messages is added at the end.
        request: Given on standard input.
        environment: Of the child.
        limit_s: Seconds.
        watch: Called several times a second with what it told last; None: nothing yet.
    """
    mark = secrets.token_hex(8)
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as stdin, os.fdopen(reading, "rb", buffering=0) as told:
        stdin.write(request.encode())
        stdin.seek(0)
        process = subprocess.Popen(
            [*argv, str(writing)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env={**environment, MARK: mark},
            pass_fds=(writing,),
            start_new_session=True,  # so that all it starts can be found
        )
        os.close(writing)
        assert process.stdout is not None
        with process.stdout as printed:
            try:
                pipes = _ChildPipes(process, told, printed)
                is_over = pipes.until_end(limit_s, watch)
                if not is_over:
                    process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
                    pipes.until_end(_STACKS_S)
                left = _left(process.pid, mark) if is_over else []
            finally:
                _end_all(process.pid, mark)
                process.kill()
                process.wait()
            pipes.read(0)
    code = process.returncode if is_over else None
    return ChildEnd(code, pipes.messages(), pipes.printed.decode("utf-8", "replace"), left)


class _ChildPipes:
    """A child's two pipes, read while it runs; other processes may hold them open, so nobody waits for their end."""

    def __init__(self, process: subprocess.Popen[bytes], told: IO[bytes], printed: IO[bytes]) -> None:
        self._process, self._told = process, bytearray()
        self.printed = bytearray()
        self._selector = selectors.DefaultSelector()
        for pipe, kept in ((told, self._told), (printed, self.printed)):
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, kept)

    def until_end(
        self, limit_s: float, watch: Callable[[dict[str, Any] | None], None] = lambda _: None
    ) -> bool:
        """Read until the child has ended; return whether that was within the limit. *watch*: see `run`."""
        deadline, size = time.monotonic() + limit_s, 0
        last: dict[str, Any] | None = None
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            self.read(_LOOK_S)
            if len(self._told) != size:
                size = len(self._told)
                last = next(reversed(self.messages()), None)
            watch(last)
        self.read(0)
        return True

    def read(self, wait_s: float) -> None:
        """Take in what is there."""
        for key, _ in self._selector.select(wait_s):
            piece = os.read(key.fd, 1 << 20)
            if not piece:
                self._selector.unregister(key.fileobj)
            key.data.extend(piece)
        del self.printed[:-_KEPT_BYTES]

    def messages(self) -> list[dict[str, Any]]:
        """Return what the child told; a torn line is left out."""
        messages = []
        for line in self._told.split(b"\n"):
            with contextlib.suppress(BadJsonError):
                messages.append(parse(bytes(line)))
        return messages


def _left(session: int, mark: str) -> list[str]:
    if not _others(session, mark):
        return []
    time.sleep(_LEAVE_S)
    return sorted(_others(session, mark).values())


def _end_all(session: int, mark: str) -> None:
    # A program that forks faster than its processes are seen ends with the last of them.
    for _ in range(100):
        pids = _others(session, mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _others(session: int, mark: str) -> dict[int, str]:
    """Return pid and name of what lives of the session, or left it with our mark."""
    names: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = os.getsid(process.pid) == session or process.environ().get(MARK) == mark
            if is_ours and process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
                names[process.pid] = process.name()
    return names
