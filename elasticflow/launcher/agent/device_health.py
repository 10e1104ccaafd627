"""The check of a node's devices, as the supervisor asks for it after a failure that a device may have caused.

A process of its own does it, with torch (`runtime/process/device_check.py`): a driver in trouble may never return from a call,
nor let the process end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from elasticflow.protocol import worker_environment
from elasticflow.protocol.child_processes import ANSWER_S, Finding
from elasticflow.protocol.messages import DevicesChecked
from elasticflow.system.installation import module_command
from elasticflow.system.processes import signal_or_code

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_BYTES = 65536
PROGRAM = tuple(module_command("elasticflow.runtime.process.device_check"))


@dataclass
class _Running:
    """A check that runs for *generation*, and the lines that it has written so far."""

    generation: int
    process: subprocess.Popen[bytes]
    began: float
    heard: float
    text: bytes = b""
    findings: list[Finding] = field(default_factory=list)


class DeviceHealth:
    """Checks the devices of *node*, and passes the result to *post*; *workers* train there, or 0: it runs a script."""

    def __init__(
        self,
        node: str,
        post: Callable[[DevicesChecked], None],
        *,
        program: tuple[str, ...] = PROGRAM,
        limit_s: float = ANSWER_S,
        workers: int = 0,
    ) -> None:
        self._node, self._post = node, post
        self._program, self._limit_s, self._workers = program, limit_s, workers
        self._running: _Running | None = None

    def begin(self, generation: int, since: float) -> None:
        """Begin a check after *generation*, which began at the monotonic time *since*, unless one runs for it."""
        if self._running is not None:
            return
        process = subprocess.Popen(
            [*self._program, str(os.getpid()), repr(since), str(self._workers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, worker_environment.NODE: self._node},
            start_new_session=True,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        now = time.monotonic()
        self._running = _Running(generation, process, began=now, heard=now)

    def pids(self) -> set[int]:
        """Return the process id of the check that runs, if one does."""
        return set() if self._running is None else {self._running.process.pid}

    def look(self, now: float) -> None:
        """Take in what the check has written, and report its result once it has ended, or has said nothing for too long."""
        running = self._running
        if running is None:
            return
        code = running.process.poll()
        assert running.process.stdout is not None
        self._read(running, running.process.stdout, now)
        if code is None and now < running.heard + self._limit_s:
            return
        self.end()
        self._post(self._result(running, code, now))

    def _read(self, running: _Running, stream: IO[bytes], now: float) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(stream.fileno(), _MOST_BYTES):
                running.text += data
                running.heard = now
        *lines, running.text = running.text.split(b"\n")
        found = (Finding.of_line(line.decode("utf-8", "replace")) for line in lines)
        running.findings += [finding for finding in found if finding is not None]

    def _result(self, running: _Running, code: int | None, now: float) -> DevicesChecked:
        findings = running.findings
        last = findings[-1] if findings else None
        told = [str(each) for each in findings if each.text and not each.is_fault]
        faults = [str(each) for each in findings if each.is_fault]
        if code != 0:
            how = f"no answer within {self._limit_s:g} s" if code is None else signal_or_code(code)
            if last is not None and last.is_begun:
                faults.append(f"{last.device}: its check got {how}")
            else:  # before any device was asked: torch, not the device
                told.append(f"the check ended without a result: {how}")
        return DevicesChecked(
            generation=running.generation,
            node=self._node,
            devices=sum(not each.is_begun and each.text == "" for each in findings),
            faults=tuple(faults),
            notes=tuple(told),
            seconds=round(now - running.began, 3),
        )

    def end(self) -> None:
        """End a check that runs; it is not waited for, as a process in a call of a driver may not end."""
        running, self._running = self._running, None
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(0.1)
            assert running.process.stdout is not None
            running.process.stdout.close()
