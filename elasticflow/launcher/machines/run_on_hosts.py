"""A run on several hosts, from a machine that reaches them by ssh: each host has an ssh process, started again while the run continues."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from elasticflow.errors import FINISHED, INTERRUPTED, KILLED_BY_USER, NOT_STARTED, HostsError
from elasticflow.launcher.machines.remote import CANCELLED, LEAVE
from elasticflow.launcher.supervisor.leave_requests import LeaveRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from elasticflow.launcher.machines.remote import Order

_KEYS = ("dir", "python")
_HOST = re.compile(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9._:-]+")


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        target: Destination for ssh: `name`, `user@name`, or an alias of ssh's configuration.
        place: Place in the file: `hosts.txt:3`.
        folder: The project's folder there; None: the same as here.
        python: The Python there that has elasticflow; None: the same path as here.
    """

    target: str
    place: str
    folder: str | None = None
    python: str | None = None

    @property
    def name(self) -> str:
        """The host's name, without the user's."""
        return self.target.rpartition("@")[2]


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Return the hosts of a file, in its order; blank lines and what follows # are left out.

    Raises:
        HostsError: the file cannot be read, a line is no host, a host stands twice, or there is no host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"{path} cannot be read: {error}", "write a host on each line") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        if (host := _host(line, f"{path}:{number}")) is None:
            continue
        if same := next((other for other in hosts if other.target == host.target), None):
            message = f"{host.place}: {host.target} stands in {same.place} already"
            raise HostsError(message, "a host has one node: write each host once")
        hosts.append(host)
    if not hosts:
        raise HostsError(f"{path} names no host", "write a host on each line, the one that leads first")
    return tuple(hosts)


def _host(line: str, place: str) -> Host | None:
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise HostsError(f"{place}: {error}", "close the quotation mark") from error
    if not words:
        return None
    target, *options = words
    if not _HOST.fullmatch(target) or target.startswith("-"):
        message = f"{place}: {target!r} is no host"
        raise HostsError(message, "write it as ssh takes it: name, user@name, or an alias of ~/.ssh/config")
    given: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in _KEYS or not equals or not value.startswith("/"):
            message = f"{place}: {option!r} is not understood"
            raise HostsError(message, "after the host: dir=/the/projects/folder and python=/bin/python there")
        given[key] = value
    return Host(target, place, given.get("dir"), given.get("python"))


SSH = "ELASTICFLOW_SSH"
"""Variable with the ssh command, for options that its configuration does not have."""
# No master of shared connections: one lives on behind its own session, whose end would not be seen.
_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    "-oControlMaster=no",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
)
_SSH_FAILED = 255
_NO_COMMAND = (126, 127)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
# Messages of ssh that no second try cures.
_FINAL = ("Permission denied", "Host key verification failed", "Bad configuration option", "no such identity")


def check_resolves(host: Host) -> None:
    """Check that the host's name leads somewhere, unless ssh reaches it through another one.

    Raises:
        HostsError: the name leads nowhere, or there is no ssh.
    """
    try:
        settings = subprocess.run(
            [*command(), "-G", host.target],
            capture_output=True,
            text=True,
            check=True,
            stdin=subprocess.DEVNULL,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise HostsError(
            f"{host.place}: ssh cannot be asked about {host.target}: {said.strip()}",
            f"install OpenSSH's client, or see to its configuration; {SSH} names another command",
        ) from error
    known = dict(line.partition(" ")[::2] for line in settings.splitlines())
    if known.get("proxyjump", "none") != "none" or known.get("proxycommand", "none") != "none":
        return
    try:
        socket.getaddrinfo(known.get("hostname", host.name), None)
    except OSError as error:
        raise HostsError(
            f"{host.place}: {host.target} does not resolve: {error}",
            "write a name or an address that this machine knows, or an alias of ~/.ssh/config",
        ) from error


def command() -> list[str]:
    """Return the ssh command."""
    return shlex.split(os.environ.get(SSH, "ssh"))


class HostProcess(threading.Thread):
    """Keeps a node of the run on one host: its ssh, and another one after a pause when the host was away.

    Attributes:
        exit_code: The node's final exit code; None while it may continue.
    """

    def __init__(
        self, host: Host, order: Order, show: Callable[[Host, str], None], say: Callable[[str], None]
    ) -> None:
        super().__init__(name=f"ssh {host.target}", daemon=True)
        self.host = host
        self.exit_code: int | None = None
        self._order, self._show, self._say = order, show, say
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._was_connected = False
        self._errors: list[str] = []

    def run(self) -> None:
        """Keep the node there."""
        pauses = _pauses()
        while True:
            began = time.monotonic()
            code = self._once()
            if self._is_final(code) or self._is_over.is_set():
                break
            if time.monotonic() > began + _LONGEST_PAUSE_S:
                pauses = _pauses()
            pause_s = next(pauses)
            self._say(f"{self.host.target}: {self._why(code)}; it is started again in {pause_s:.0f} s")
            if self._is_over.wait(pause_s):
                break
        if code == CANCELLED:
            code = INTERRUPTED
        self.exit_code = NOT_STARTED if code == _SSH_FAILED and self._is_final(code) else code

    def finish(self) -> None:
        """Do not start the node again."""
        self._is_over.set()

    def leave(self) -> None:
        """Ask the node to exit, and do not start it again; a second call: at once."""
        self.finish()
        with self._lock:
            if self._process is not None and self._process.stdin is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._process.stdin.write(f"{LEAVE}\n")
                    self._process.stdin.flush()

    def kill(self) -> None:
        """End ssh, whatever becomes of the node."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _once(self) -> int:
        """Start the node, unless it is to leave, and return its exit code; that of ssh if there was no connection any more."""
        python = self.host.python or sys.executable
        remote = f"exec {shlex.quote(python)} -P -m elasticflow.launcher.machines.remote"
        with self._lock:
            if self._is_over.is_set():  # asked to leave a moment ago: a node that begins now would not know
                return INTERRUPTED
            self._process = process = subprocess.Popen(
                [*command(), *_OPTIONS, self.host.target, remote],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C in a terminal reaches this process only
            )
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(self._order.to_line())
                process.stdin.flush()
        self._errors = []
        assert process.stdout is not None
        assert process.stderr is not None
        errors = threading.Thread(target=self._hear_ssh, args=(process.stderr,), daemon=True)
        errors.start()
        with process.stdout:
            for line in process.stdout:
                self._was_connected = True
                self._show(self.host, line.rstrip("\n"))
        errors.join()
        code = process.wait()
        with self._lock, contextlib.suppress(OSError):
            process.stdin.close()
        return code if code >= 0 else 128 - code

    def _hear_ssh(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._errors.append(line.strip())
                self._show(self.host, line.rstrip("\n"))

    def _is_final(self, code: int) -> bool:
        """Return whether the node is not to be started again: it has ended by itself, or never will begin."""
        if code == _SSH_FAILED:
            return not self._was_connected and any(word in line for line in self._errors for word in _FINAL)
        return code in _NO_COMMAND or (code < 128 and code != INTERRUPTED)

    def _why(self, code: int) -> str:
        if code == _SSH_FAILED:
            return "no connection"
        return "it was asked to leave there" if code == INTERRUPTED else f"its node ended with code {code}"


def _pauses() -> Iterator[float]:
    """Yield ever longer pauses."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


_POLL_S = 0.05
# Once one node knows the run's end all others do, if they can be reached.
_ENDING_S = 30.0


def run_on_hosts(
    orders: Sequence[tuple[Host, Order]],
    show: Callable[[Host, str], None],
    say: Callable[[str], None],
    *,
    first_decides: bool,
) -> int:
    """Run a node on each host until the run is over, or a signal asks to exit; return the exit code. Main thread only.

    A host that cannot be reached, or whose node was killed or asked to leave there, gets another node after a pause.

    Args:
        orders: Each host with its order, the first host first.
        show: Called with each line that a host prints; from several threads.
        first_decides: The first host serves the store and leads: its end is the run's.

    Raises:
        HostsError: a host's name leads nowhere.
    """
    for host, _ in orders:
        check_resolves(host)
    processes = [HostProcess(host, order, show, say) for host, order in orders]
    asked = LeaveRequests()
    previous = asked.listen()
    try:
        for process in processes:
            process.start()
        _watch(processes, asked, say, first_decides=first_decides)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    codes = [process.exit_code for process in processes if process.exit_code is not None]
    if FINISHED in codes:
        return FINISHED
    if asked.numbers:
        return KILLED_BY_USER if len(asked.numbers) > 1 else INTERRUPTED
    return codes[0] if first_decides else max(codes)


def _watch(
    processes: list[HostProcess], asked: LeaveRequests, say: Callable[[str], None], *, first_decides: bool
) -> None:
    """Return once no node is left, or none that can be waited for."""
    heard, deadline = 0, float("inf")
    while any(process.is_alive() for process in processes):
        time.sleep(_POLL_S)
        while heard < len(asked.numbers):
            heard += 1
            say(
                "asked to leave: the nodes leave after their step"
                if heard == 1
                else "asked again: the nodes leave now"
            )
            for process in processes:
                process.leave()
        ended = {process.exit_code for process in processes if process.exit_code is not None}
        is_over = FINISHED in ended or (first_decides and processes[0].exit_code is not None)
        if is_over and deadline == float("inf"):
            deadline = time.monotonic() + _ENDING_S
            for process in processes:
                process.finish()
                if FINISHED not in ended:  # else it waits for another machine to lead
                    process.leave()
        if time.monotonic() > deadline:
            for process in processes:
                process.leave()
                process.kill()
            return
