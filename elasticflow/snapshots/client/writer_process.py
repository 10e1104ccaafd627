"""Starting the writer and reading its reports: for the agent, or a worker without an agent of ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from elasticflow.errors import SnapshotError
from elasticflow.protocol.json_codec import to_json
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.storage.storage import Storage
from elasticflow.system.installation import start_module
from elasticflow.system.polling import readable
from elasticflow.system.processes import is_ending

_START_LIMIT_S = 60.0
_END_LIMIT_S = 5.0


@dataclass(frozen=True)
class Limits:
    """The writer's time limits, in seconds.

    Attributes:
        fence_grace_s: For the workers of the generation that fenced a whole snapshot off.
        settle_s: Before new workers are answered although older snapshots are open.
        shares_s: For other nodes' shares, and for their commit.
    """

    fence_grace_s: float = 10.0
    settle_s: float = 30.0
    shares_s: float = 600.0


@dataclass(frozen=True)
class WriterStart:
    """Configuration that a writer process reads from its standard input, as one line of JSON.

    Attributes:
        uri: Place of the snapshots, found from `settings.uri`.
        prefix: The run's folder under the URI.
        parent: Process with which the writer ends.
    """

    uri: str
    run_id: str
    settings: SnapshotSettings = field(default_factory=SnapshotSettings)
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)
    parent: int | None = None


class WriterNotStartedError(SnapshotError):
    """The writer ended before it was ready, or was not ready in time.

    Attributes:
        ended_with: The writer's exit code (negative: a signal); None if it was not ready in time.
    """

    def __init__(self, exit_code: int | None) -> None:
        how = f"not ready within {_START_LIMIT_S:g} s" if exit_code is None else f"exit code {exit_code}"
        super().__init__(f"the snapshot writer did not start ({how}); its standard error says why")
        self.ended_with = exit_code


class WriterProcess:
    """A running writer, seen by the process that started it.

    Attributes:
        address: Address that workers pass to `StagingClient.connect`.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self.process = process
        self._stdout = process.stdout.fileno()
        os.set_blocking(self._stdout, False)
        self._data = b""
        self._waiting: list[dict[str, Any]] = []
        self.address = ""

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports since the last call, as `messages.as_event` gives them; does not wait."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._stdout, 1 << 16):
                self._data += chunk
        *lines, self._data = self._data.split(b"\n")
        reports = self._waiting + [json.loads(line) for line in lines]
        self._waiting = []
        return reports

    def exit_code(self) -> int | None:
        """Return the writer's exit code (negative: a signal), or None while it lives.

        Waits for a writer that is ending: it has closed its connections, so workers may have reported its end already.
        """
        code = self.process.poll()
        if code is None and is_ending(self.process.pid):
            self._end()
            code = self.process.poll()
        return code

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are reports, or once the writer has ended."""
        return self._stdout

    def descriptors(self) -> tuple[int, ...]:
        """Return this process' ends of the writer's pipes: the writer ends once no process has its standard input open."""
        assert self.process.stdin is not None
        return self.process.stdin.fileno(), self._stdout

    def load_ahead(self) -> None:
        """Have the writer read the newest snapshot, for workers that are about to start; the workers before are gone."""
        self._tell(b"load\n")

    def _tell(self, line: bytes) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `exit_code` tells
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def finish(self, patience_s: float) -> None:
        """Have the writer end once all it was handed has an outcome; call `reports` and `close` after it.

        Returns when the writer has ended, at the latest after *patience_s*. No worker may be staging any more.
        """
        self._tell(b"finish\n")
        deadline = time.monotonic() + patience_s
        while self.process.poll() is None and (left := deadline - time.monotonic()) > 0:
            readable([self._stdout], min(left, 0.05))
            # A full pipe would hold the writer up.
            self._waiting = self.reports()

    def close(self) -> None:
        """End the writer at once; snapshots that are not committed are lost."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self._end()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _end(self) -> None:
        try:
            self.process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_LIMIT_S
        while not self.address and (left := deadline - time.monotonic()) > 0:
            has_ended = self.process.poll() is not None
            readable([self._stdout], min(left, 0.2))
            reports = self.reports()
            if reports:
                self.address = reports[0].get("address", "")
                self._waiting = reports[1:]
            elif has_ended:
                break
        if not self.address:
            code = self.process.poll()
            self.close()
            raise WriterNotStartedError(code)


def start_writer(start: WriterStart, python: str = sys.executable) -> WriterProcess:
    """Start the node's writer and return it once it is ready. To be called from the main thread.

    The writer ends with this process: its standard input ends then, and on Linux the kernel also kills it when the
    *thread* that started it ends.

    Args:
        start: Configuration of the writer; `parent` is set here.

    Raises:
        WriterNotStartedError: the writer ended, or was not ready in time.
    """
    start = replace(start, parent=os.getpid(), uri=Storage(start.uri).absolute_uri)
    # The child inherits the mask: a signal to the whole group cannot end it before it ignores these signals itself.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    try:
        process = start_module("elasticflow.snapshots.writer.main", python)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert process.stdin is not None
    writer = WriterProcess(process)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(to_json(start).encode() + b"\n")
        process.stdin.flush()
    writer._wait_ready()  # noqa: SLF001  # not for others
    return writer
