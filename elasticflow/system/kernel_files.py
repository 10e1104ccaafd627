"""Files in which the kernel tells something: small ones, of control groups for instance, and its log."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def text_in(path: Path) -> str:
    """Return the content without the blanks around it; empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def number_in(path: Path) -> int | None:
    """Return the number that the file holds; None if it holds something else, or cannot be read."""
    text = text_in(path)
    return int(text) if text.isdecimal() else None


def kernel_log(since_s: float = 0.0) -> Iterator[bytes]:
    """Yield the lines of the kernel's log that are still there, oldest first; none where it may not be read.

    Args:
        since_s: Seconds after the machine's start; earlier lines are left out.
    """
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                line = os.read(log, 8192)
            except BrokenPipeError:
                # That line was overwritten meanwhile; the next read gives the oldest there is.
                continue
            except OSError:  # the end of the log
                return
            if _microseconds(line) >= since_s * 1e6:
                yield line
    finally:
        os.close(log)


def _microseconds(line: bytes) -> float:
    """Return how long after the machine's start a line of the log was written: its third field."""
    try:
        return float(line.split(b";", 1)[0].split(b",")[2])
    except (IndexError, ValueError):
        return float("inf")
