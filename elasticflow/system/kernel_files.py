"""Files in which the kernel tells something: small ones, of control groups for instance, and its log."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    """Return the time of a line of the log, its third field, in microseconds after the machine's start."""
    try:
        return float(line.split(b";", 1)[0].split(b",")[2])
    except (IndexError, ValueError):
        return float("inf")


_ESCAPED = re.compile(r"\\([0-7]{3})")


def file_system_of(folder: Path) -> str:
    """Return the type of the file system that *folder* lies on, such as `ext4`; empty where the kernel does not tell.

    psutil would believe /etc/mtab, which may be a file that no one keeps up to date.
    """
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
    real, depth, kind = Path(os.path.realpath(folder)), -1, ""
    for line in text.splitlines():
        mount, _, about = line.partition(" - ")
        point = Path(_ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), mount.split()[4]))
        # The last file system mounted at a point hides the others.
        if real.is_relative_to(point) and len(point.parts) >= depth:
            depth, kind = len(point.parts), about.split()[0]
    return kind
