"""The actor that Ray runs on a node: its process is one node of the run, with the same order as by ssh."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from elasticflow.launcher.machines.order import LEAVE, Order


class Heard(NamedTuple):
    """News of a node since it was last asked: lines that it printed; its exit code, None while it runs."""

    lines: list[str]
    exit_code: int | None


class Begun(NamedTuple):
    """Place where a node has begun: the host's name, and Ray's id of its node."""

    host: str
    ray_node: str


class NodeActor:
    """One node of a run; its methods are called through Ray, one at a time.

    The node lives as long as this actor does: it exits when the actor's end of its standard input is closed, which the
    kernel does when the actor is killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def begin(self, order_line: str) -> Begun:
        """Start the node that `Order.to_line` describes; return where it is.

        Where the project's folder is not there, the node runs in the working directory that the Ray job has brought along.
        """
        import ray

        order = Order.from_line(order_line)
        if not Path(order.folder).is_dir():
            order = replace(order, folder=str(Path.cwd()))
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elasticflow.launcher.machines.remote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(order.to_line())
        process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return Begun(socket.gethostname(), ray.get_runtime_context().get_node_id())

    def hear(self) -> Heard:
        """Return the news of the node."""
        assert self._process is not None
        assert self._reader is not None
        code = self._process.poll()
        if code is not None:
            self._reader.join(5.0)
        with self._lock:
            lines, self._lines = self._lines, []
        return Heard(lines, None if code is None else 128 - code if code < 0 else code)

    def leave(self) -> None:
        """Ask the node to exit after its step; a second call: at once."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(f"{LEAVE}\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._lock:
                self._lines.append(line.rstrip("\n"))
