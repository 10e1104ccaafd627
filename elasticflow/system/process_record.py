"""A record of a process that another process may read later, perhaps on another machine.

A process id alone is not enough: other machines have the same ids, and a machine gives an id again.
"""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

from elasticflow.system.processes import boot_id, is_ending, started_at


@dataclass(frozen=True)
class ProcessRecord:
    """A process, named by facts that no other process shares.

    Attributes:
        boot_id: Differs after each start of the machine; None where the kernel does not tell.
        started: The process's start, in clock ticks after the machine's start; None where the kernel does not tell.
    """

    pid: int
    host: str
    boot_id: str | None = None
    started: int | None = None

    @classmethod
    def of(cls, pid: int | None = None) -> Self:
        """Return the record of a process of this machine; of this process without *pid*."""
        pid = os.getpid() if pid is None else pid
        return cls(pid, socket.gethostname(), boot_id(), started_at(pid))

    @classmethod
    def from_json(cls, record: object) -> Self | None:
        """Return the record that `to_json` wrote, further keys ignored; None for anything else, such as a bare process id."""
        if not isinstance(record, dict):
            return None
        pid, host = record.get("pid"), record.get("host")
        if not isinstance(pid, int) or isinstance(pid, bool) or not isinstance(host, str):
            return None
        boot, started = record.get("boot_id"), record.get("started")
        return cls(
            pid, host, boot if isinstance(boot, str) else None, started if isinstance(started, int) else None
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record's form in a file or message."""
        return asdict(self)

    @property
    def is_on_this_machine(self) -> bool:
        """True if the process runs, or ran, on this machine since its last start."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()

    @property
    def is_alive(self) -> bool:
        """True if this very process runs on this machine, and is not ending."""
        return self._is_here() and not is_ending(self.pid)

    def send(self, number: signal.Signals) -> bool:
        """Send *number* to this very process; return False, with nothing sent, unless it runs on this machine."""
        with suppress(ProcessLookupError):
            # The descriptor stands for one process, so the id cannot pass to another one behind the check.
            process = _descriptor_of(self.pid)
            try:
                if not self._is_here():
                    return False
                if process is None:
                    os.kill(self.pid, number)
                else:
                    signal.pidfd_send_signal(process, number)
                return True
            finally:
                if process is not None:
                    os.close(process)
        return False

    def _is_here(self) -> bool:
        fits = self.started is not None and self.started == started_at(self.pid)
        return fits and self.is_on_this_machine

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _descriptor_of(pid: int) -> int | None:
    """Return a descriptor of the process; None on macOS, on a Linux before 5.3, and in a container that forbids the call."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):
        return None
