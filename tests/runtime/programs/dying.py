"""How a rank of these programs is killed, and when."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

LIMIT_S = 60.0


def committed() -> set[Path]:
    """Return the manifests of the run's snapshots; one that is still in a temporary folder is not committed."""
    return set(Path(os.environ["ELASTICFLOW_RUN_FOLDER"]).glob("snapshots/[0-9]*/MANIFEST.json"))


COMMITTED_BEFORE = committed()


def await_commit() -> None:
    """Return as soon as this worker group has committed a snapshot.

    Training does not wait for the writer, and on a busy machine it may be many steps behind.

    Raises:
        TimeoutError: no snapshot was committed: none was due two steps ago.
    """
    deadline = time.monotonic() + LIMIT_S
    while not committed() - COMMITTED_BEFORE:
        if time.monotonic() > deadline:
            raise TimeoutError("no snapshot was committed")
        time.sleep(0.005)


def die_once_committed() -> NoReturn:
    """Kill this process with SIGKILL as soon as this worker group has committed a snapshot: the writer dies with rank 0.

    Raises:
        TimeoutError: no snapshot was committed: none was due two steps ago.
    """
    await_commit()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
