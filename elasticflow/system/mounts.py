"""Finds the file system of a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

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
