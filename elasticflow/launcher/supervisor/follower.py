"""The process that follows a run's files for others, such as its sinks: kept alive, never waited for, ended with the launch.

The supervisor is given its command from above and knows nothing else of it.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.system.processes import signal_or_code
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.run_folder import RunFolder

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LOOK_S = 0.25
_POLL_S = 0.02
# The process gives itself less.
_PATIENCE_S = 25.0
_CHUNK = 1 << 16


class Follower:
    """Keeps one process alive that is given the run folder; starts nothing if there is no command.

    What it writes on its standard output are events that the journal takes: JSON objects, one on a line. The end of its
    standard input asks it to finish. It dies with the thread that made this object.

    Args:
        command: Command line, to which this process' id and the run folder are added; may be empty.
    """

    def __init__(self, command: tuple[str, ...], folder: RunFolder, journal: Journal) -> None:
        self._command, self._folder, self._journal = command, folder, journal
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._pause_s = _FIRST_PAUSE_S
        # On the monotonic clock: before it there is nothing to do.
        self._not_before = 0.0

    def turn(self, now: float) -> None:
        """Start the process if it is not there and its time has come, and take in what it says; waits for nothing.

        It looks a few times a second at most, by the monotonic time *now*.
        """
        if not self._command or now < self._not_before:
            return
        self._not_before = now + _LOOK_S
        if self._process is None:
            try:
                self._start()
            except OSError as error:  # no process or no memory is left for it: training continues
                self._lose(f"could not be started: {error.strerror}", now)
            return
        self._hear(self._process)
        if (code := self._process.poll()) is not None:
            self._hear(self._process)
            self._let_go(self._process)
            self._lose(signal_or_code(code), now)

    def finish(self, is_cut_short: Callable[[], bool]) -> None:
        """Have the process finish what it has to do, for a bounded time, and end it.

        Args:
            is_cut_short: Called again and again; returns True once the user does not want to wait any longer.
        """
        if not self._command:
            return
        if self._process is None:
            self._not_before = 0.0
            self.turn(time.monotonic())  # what is written meanwhile is passed on, too
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        deadline = time.monotonic() + _PATIENCE_S
        while process.poll() is None and time.monotonic() < deadline and not is_cut_short():
            self._hear(process)
            time.sleep(_POLL_S)
        if process.poll() is None:
            self._journal.event(
                events.FOLLOWER_LOST, reason="did not finish in time", log=self._log, pause_s=None
            )
        self.end()

    def end(self) -> None:
        """Kill the process, if it lives, and take in what it has said."""
        if self._process is not None:
            process = self._process
            process.kill()
            process.wait()
            self._hear(process)
            self._let_go(process)

    @property
    def _log(self) -> str:
        return str(self._folder.path / "logs" / "sinks.log")

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [*self._command, str(os.getpid()), str(self._folder.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor only
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _lose(self, reason: str, now: float) -> None:
        """Tell that the process has ended, or was not started; the next one follows after a pause."""
        self._not_before = now + self._pause_s
        self._journal.event(events.FOLLOWER_LOST, reason=reason, log=self._log, pause_s=self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _let_go(self, process: subprocess.Popen[bytes]) -> None:
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._process, self._rest = None, b""

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        """Take in the events that the process has written whole."""
        assert process.stdout is not None
        with suppress(BlockingIOError):
            while chunk := os.read(process.stdout.fileno(), _CHUNK):
                self._rest += chunk
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            fields: dict[str, Any] = parse(line)
            event = events.EVENTS[fields.pop("event")]
        except (BadJsonError, KeyError):
            return  # something printed before the process had its log
        self._journal.event(event, **fields)
