"""Runs one node on a host by an order on standard input, started by ssh; exits when the connection is gone, or when another process takes its place.

Only what Python itself has is imported, so that it answers at once: `python -m elasticflow.launcher.machines.remote`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from elasticflow.errors import INTERRUPTED, NOT_STARTED
from elasticflow.run_folder import RUNS, RunFolder
from elasticflow.system.file_lock import FileLock, LockHeldError
from elasticflow.system.installation import module_command
from elasticflow.system.polling import readable
from elasticflow.system.process_record import ProcessRecord
from elasticflow.system.processes import boot_id

if TYPE_CHECKING:
    from collections.abc import Callable

LEAVE = "leave"
"""A line that asks the node to exit: once, as SIGTERM does; twice: at once."""
CANCELLED = 76
"""Exit code of a node whose run `elasticflow cancel` has ended; one that was asked to leave its host alone exits with `INTERRUPTED`."""


@dataclass(frozen=True)
class Order:
    """A node to run.

    Attributes:
        environment: Variables that the command has besides those of the host.
        run: Path of the run's folder below that of all runs: one node of the run lives on a host at a time.
        grace_s: Seconds that a node has to exit.
        host: The host, as the file of hosts names it; empty: it is not in such a file.
        launch: Id of the command that starts the nodes, another one at each start.
    """

    folder: str
    words: tuple[str, ...]
    environment: dict[str, str]
    run: str
    grace_s: float
    host: str = ""
    launch: str = ""

    def to_line(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Order:
        """Return the order that `to_line` wrote."""
        values = json.loads(line)
        return cls(**{**values, "words": tuple(values["words"])})


_LOOK_S = 0.1
# Seconds beyond the node's own time to exit, for its last snapshot.
_ENDING_S = 30.0
# Seconds in which the lines that a node printed last have to be passed on.
_LAST_WORDS_S = 5.0


def main() -> int:
    """Run what the first line of standard input orders; return its exit code, 128 and more if a signal killed it."""
    order = Order.from_line(sys.stdin.readline())
    lock = _take_lock(order)
    if isinstance(lock, int):
        return lock
    node = _start(order, lock.descriptor)
    lock.write(ProcessRecord.of(node.pid), node=order.host, launch=order.launch)
    # The node has the lock now, for as long as it lives.
    lock.close()
    _say(f"a node on {socket.gethostname()}, process {node.pid}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _ask(node))
    assert node.stdout is not None
    copying = threading.Thread(target=_copy, args=(node.stdout,), daemon=True, name="copy")
    copying.start()
    threading.Thread(target=_obey, args=(node, order.grace_s), daemon=True, name="obey").start()
    code = node.wait()
    # A process that the node left behind may keep its output open.
    copying.join(_LAST_WORDS_S)
    if code == INTERRUPTED and RunFolder(Path(order.folder) / RUNS / order.run).cancel.exists():
        return CANCELLED
    return 128 - code if code < 0 else code


def _start(order: Order, lock: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        module_command("elasticflow", *order.words),
        cwd=order.folder,
        env={**os.environ, **order.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(lock,),
    )


def lock_path(order: Order) -> Path:
    """Return the file that the run's node on this machine locks.

    Hosts may share their folder for temporary files, as machines and containers do: each has a file of its own.
    """
    folder = Path(tempfile.gettempdir()) / f"elasticflow-nodes-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    place = f"{socket.gethostname()}\0{boot_id()}\0{order.folder}\0{order.run}"
    return folder / f"{hashlib.sha256(place.encode()).hexdigest()[:16]}.lock"


def _is_cut_off() -> bool:
    """Return whether standard input has ended, or asks to leave: what follows the order comes once a node runs."""
    return bool(readable((0,), 0))


def _take_lock(order: Order, is_cut_off: Callable[[], bool] = _is_cut_off) -> FileLock | int:
    """Return the run's lock on this machine, or this process' exit code.

    `NOT_STARTED`, with the reason said, if this launch has a node here by another name. `INTERRUPTED` once *is_cut_off*: a later
    connection may have its node here by now, which is not to be asked to leave.

    A node that has lost its connection is asked to leave, and killed if it does not.
    """
    path = lock_path(order)
    asked: tuple[ProcessRecord | None, float] | None = None
    while True:
        try:
            return FileLock.take(path, 0, 0o600)
        except LockHeldError as held:
            # The process that took the lock a moment ago has not recorded its node yet.
            if "launch" in held.note:
                if order.launch and held.note["launch"] == order.launch and held.note["node"] != order.host:
                    _refuse(order, held)
                    return NOT_STARTED
                if asked is None or asked[0] != held.holder:
                    asked = held.holder, time.monotonic()
                    _ask_to_leave(held)
                elif time.monotonic() > asked[1] + order.grace_s + _ENDING_S and held.holder is not None:
                    held.holder.send(signal.SIGKILL)
        if is_cut_off():
            return INTERRUPTED
        time.sleep(_LOOK_S)


def _refuse(order: Order, held: LockHeldError) -> None:
    _say(
        f"error: {order.host} and {held.note['node']} are the same machine, {socket.gethostname()}, and the same folder, "
        f"{order.folder}: a node of this run is there already ({held.who})\n"
        f"  help: take {order.host} out of the file of hosts"
    )


def _ask_to_leave(held: LockHeldError) -> None:
    if held.holder is not None and held.holder.send(signal.SIGTERM):
        _say(f"{held.who} is a node of this run that lost its connection: it is asked to leave")
    else:
        _say(f"{held.who} has a node of this run and is none of this machine's processes: it is waited for")


def _obey(node: subprocess.Popen[bytes], grace_s: float) -> None:
    """Carry out the orders on standard input until it ends: the connection is gone then, and the node is to exit."""
    for line in sys.stdin:
        if line.strip() == LEAVE:
            _ask(node)
    _ask(node)
    with contextlib.suppress(subprocess.TimeoutExpired):
        node.wait(grace_s + _ENDING_S)
        return
    node.kill()


def _ask(node: subprocess.Popen[bytes]) -> None:
    node.send_signal(signal.SIGTERM)


def _copy(stream: IO[bytes]) -> None:
    """Pass on what the node prints; a connection that is gone does not keep it from printing."""
    for line in stream:
        with contextlib.suppress(OSError):
            os.write(1, line)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    # The threads may be inside a read that never returns.
    code = main()
    os._exit(code)
