"""What a worker has imported, and what it runs on: recorded with the launch."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.runtime.process import environment

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker

# Parts of the path of whatever is installed.
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_MOST_FILES = 2000


def tell(me: Worker) -> None:
    """Log the top-level modules that are loaded, and the digests of those that lie in the project; takes milliseconds.

    Rank 0 under our agent does, after its first step: what is imported late is there then.
    """
    root = me.run_folder.path.parents[2]  # runs/<job>/<run id>
    names = {name.partition(".")[0] for name in tuple(sys.modules)}
    me.event(
        events.ENVIRONMENT_FOUND,
        modules=sorted(names - set(sys.stdlib_module_names)),
        files=_files(root),
        device=environment.of(me.device),
    )


def _files(root: Path) -> dict[str, str]:
    """Return SHA-256 of every loaded module's source under the project, by its path from there."""
    start, found = f"{root}{os.sep}", {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.startswith(start) or not file.endswith(".py"):
            continue
        # What is installed inside the project has versions; so has elasticflow, wherever it lies. train.py is the
        # launch folder's own.
        if name.partition(".")[0] in {"elasticflow", "__main__"} or any(part in file for part in INSTALLED):
            continue
        try:
            found[Path(file).relative_to(root).as_posix()] = hashlib.sha256(
                Path(file).read_bytes()
            ).hexdigest()
        except OSError:  # removed since
            continue
        if len(found) == _MOST_FILES:
            break
    return found
