"""Memory that processes share."""

from __future__ import annotations

import os
import sys


def memory_file(name: str) -> int:
    """Return the descriptor of a new empty file in memory, or of a nameless temporary file where there is no memfd."""
    if sys.platform == "linux":
        return os.memfd_create(f"elasticflow-{name}", os.MFD_CLOEXEC)
    # Not imported where an agent is started, for which training waits.
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
