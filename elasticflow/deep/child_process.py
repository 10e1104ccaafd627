"""A child process for the job's own code, which may do anything: watched, limited, and ended with all it started."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import psutil

from elasticflow.system.polling import readable
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# This variable is in the environment of every process that the child starts, whatever session it moves to.
MARK = "ELASTICFLOW_PROBE"
# The last bytes of the child's output that are kept.
_KEPT_BYTES = 1 << 16
_LOOK_S = 0.02
# Time for faulthandler to write the stacks.
_STACKS_S = 1.0
# Time for the child's own processes, which may still be ending with it.
_LEAVE_S = 0.3


class ChildEnd(NamedTuple):
    """The end of a child.

    Attributes:
        code: Exit code, negative for a signal; None: the child ran past the limit.
        output: The end of its output; after the limit or a fatal signal, the stacks too.
        left: Names of the processes that it had started and left running; they have been ended.
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
    """Run a child to its end or to the limit; no process that it started lives afterwards.

    Args:
        argv: Command; the descriptor of the pipe for messages is appended.
        watch: Called several times a second with the child's last message; None: no message yet.
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
            start_new_session=True,  # so that all its processes can be found
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
    """A child's two pipes, read while it runs; other processes may hold them open, so EOF is not awaited."""

    def __init__(self, process: subprocess.Popen[bytes], told: IO[bytes], printed: IO[bytes]) -> None:
        self._process = process
        self._told, self.printed = bytearray(), bytearray()
        # By descriptor, until its end.
        self._open = {told.fileno(): self._told, printed.fileno(): self.printed}

    def until_end(
        self, limit_s: float, watch: Callable[[dict[str, Any] | None], None] = lambda _: None
    ) -> bool:
        """Read until the child has ended; return True if it ended within the limit. *watch*: see `run`."""
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
        """Read all data that is there, or wait for data at most *wait_s* seconds."""
        for descriptor in readable(self._open, wait_s):
            if piece := os.read(descriptor, 1 << 20):
                self._open[descriptor].extend(piece)
            else:
                del self._open[descriptor]
        del self.printed[:-_KEPT_BYTES]

    def messages(self) -> list[dict[str, Any]]:
        """Return the child's messages; a torn line is left out."""
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
    # A program may fork faster than its processes can be listed: repeat until no process is left.
    for _ in range(100):
        pids = _others(session, mark)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _others(session: int, mark: str) -> dict[int, str]:
    """Return pid and name of live processes that are in the session, or left it and have our mark."""
    names: dict[int, str] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_ours = os.getsid(process.pid) == session or process.environ().get(MARK) == mark
            if is_ours and process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
                names[process.pid] = process.name()
    return names
