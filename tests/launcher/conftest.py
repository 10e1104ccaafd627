"""Real fork servers for the launcher's tests."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.protocol import Setup
from tests.launcher.lifecycle_trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass
class Warm:
    """A fork server that has imported everything, and the entry point its workers run."""

    server: ForkServer
    entry_point: Path
    heartbeats_fd: int

    def write(self, code: str) -> None:
        """Have the next workers run *code*."""
        self.entry_point.write_text(code)


def close(server: ForkServer) -> None:
    """End a server; its workers die with it."""
    server.process.kill()
    server.process.wait()
    server._channel.connection.close()


@pytest.fixture
def trial() -> Trial:
    """Return a fresh lifecycle with a budget of two restarts."""
    return Trial()


@pytest.fixture(scope="session")
def warm(real_processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Yield one server for all tests: it takes seconds to import torch."""
    folder = tmp_path_factory.mktemp("warm")
    entry_point = folder / "train.py"
    # A job's module that takes signals for itself, as some libraries do.
    (folder / "takes_signals.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\nsignal.signal(signal.SIGINT, signal.SIG_DFL)"
    )
    (folder / "draws_at_import.py").write_text("import random\ndrawn = random.random()")
    # A busy machine, on which a forked worker does not run at once: while the file `slow` is there.
    (folder / "runs_late.py").write_text(
        "import os, time\n"
        f"os.register_at_fork(after_in_child=lambda: os.path.exists({str(folder / 'slow')!r}) and time.sleep(1))"
    )
    # More files than `select` takes, as of a data set in many pieces.
    (folder / "holds_files.py").write_text(
        "import os, resource\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))\n"
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]"
    )
    modules = ("takes_signals", "draws_at_import", "runs_late", "holds_files")
    heartbeats_fd = os.memfd_create("test-heartbeats", 0)
    arguments = ("--nnodes=1:1", "--nproc-per-node=2", "--shutdown-timeout=30", "--tee=0:1", "train.py")
    setup = Setup(str(entry_point), (str(folder),), modules, "fork", 7, arguments)
    server = ForkServer.start(setup, (heartbeats_fd,))
    server.wait_ready()
    yield Warm(server, entry_point, heartbeats_fd)
    close(server)
    os.close(heartbeats_fd)


def wait_until(is_so: Callable[[], object], limit_s: float = 60.0) -> float:
    """Return the seconds until *is_so* was true; fail after *limit_s*."""
    began = time.monotonic()
    while not is_so():
        if time.monotonic() - began > limit_s:
            pytest.fail(f"not within {limit_s} s")
        time.sleep(0.005)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    """Return whether the process runs; one that nobody has waited for does not."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill(*pids: int) -> None:
    """End processes that a failed test may have left."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
