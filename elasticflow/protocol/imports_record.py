"""What the workers of a run have imported, for those that come after them: `imports.json` in the run folder."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from elasticflow.system import atomic_files
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from pathlib import Path


def write_imports(path: Path) -> None:
    """Write the names of the modules that this process has imported, in that order; the file is replaced whole.

    On a full disk nothing is written: standbys import less then.
    """
    names = [
        name
        for name, module in tuple(sys.modules.items())
        if name != "__main__" and getattr(module, "__spec__", None) is not None
    ]
    with suppress(OSError):
        atomic_files.replace(path, (json.dumps({"modules": names}).encode(),), sync=False)


def read_imports(path: Path) -> list[str]:
    """Return the names that `write_imports` wrote; none if the file is absent or damaged: standbys import less then."""
    with suppress(OSError, BadJsonError):
        names = parse(path.read_bytes()).get("modules")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    return []
