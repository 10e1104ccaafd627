"""What ssh starts on a host: one node of a run, which leaves when the connection is gone, or when another one is to take its place.

Only what Python itself has is imported, so that it answers at once: `python -m elasticflow.launcher.hosts.remote`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

from elasticflow.launcher.hosts.order import LEAVE, Order

_LOOK_S = 0.1
# Beyond the node's own time to leave: for its last snapshot.
_ENDING_S = 30.0


def main() -> int:
    """Run what the first line of standard input orders; return its exit code, 128 and more if a signal killed it."""
    order = Order.from_line(sys.stdin.readline())
    lock = _take_lock(order)
    node = _start(order, lock)
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(node.pid).encode(), 0)
    # The node has the lock now, for as long as it lives.
    os.close(lock)
    _say(f"a node on {socket.gethostname()}, process {node.pid}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _ask(node))
    assert node.stdout is not None
    threading.Thread(target=_copy, args=(node.stdout,), daemon=True, name="copy").start()
    threading.Thread(target=_obey, args=(node, order.grace_s), daemon=True, name="obey").start()
    code = node.wait()
    return 128 - code if code < 0 else code


def _start(order: Order, lock: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "elasticflow", *order.words],
        cwd=order.folder,
        env={**os.environ, **order.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(lock,),
    )


def _take_lock(order: Order) -> int:
    """Return the descriptor of the run's lock on this host; a node that has it is asked to leave, and killed if it does not."""
    folder = Path(tempfile.gettempdir()) / f"elasticflow-nodes-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = hashlib.sha256(f"{order.folder}\0{order.run}".encode()).hexdigest()[:16]
    descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    asked_at: float | None = None
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        if word := os.pread(descriptor, 32, 0).decode():
            if asked_at is None:
                _say(f"process {word} is a node of this run that lost its connection: it is asked to leave")
                asked_at = time.monotonic()
                _signal(int(word), signal.SIGTERM)
            elif time.monotonic() > asked_at + order.grace_s + _ENDING_S:
                _signal(int(word), signal.SIGKILL)
        time.sleep(_LOOK_S)


def _obey(node: subprocess.Popen[bytes], grace_s: float) -> None:
    """Do what standard input says until it ends; then nobody is there any more, and the node is to leave."""
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


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    # The threads may be inside a read that never returns.
    code = main()
    os._exit(code)
