"""Finds out if a job's script has a loop that trials can run: a loop on `elasticflow.join`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from elasticflow.errors import TrialRefusedError
from elasticflow.python_source.modules import Finder, UnresolvedError
from elasticflow.python_source.script import Script

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

_OURS = "elasticflow"


def require_own_loop(job: Job, root: Path) -> None:
    """Check that a job's script, if it has one, may use elasticflow: modules that it imports count, too.

    Raises:
        TrialRefusedError: neither the script nor a module of the project that it imports can call `elasticflow.join`.
    """
    if job.script is None:
        return
    finder = Finder.of_job(root, (job.script.folder, *job.job.path))
    file = None if job.script.entry is None else root / job.script.entry
    if job.script.module is not None:
        try:
            file = finder.find(job.script.module).file
        except UnresolvedError:
            return
    if file is None:
        return
    # Imports anywhere in the script count; a relative import has no first name and may be of any module.
    names = Script(importlib.util.decode_source(file.read_bytes())).names.modules
    if not any(name in {_OURS, ""} or finder.has_own(name) for name in names):
        raise nothing_to_try(job.script.entry or job.script.module or "")


def nothing_to_try(script: str) -> TrialRefusedError:
    """Return the refusal of a script that reports no steps."""
    return TrialRefusedError(
        f"{script} does not train by elasticflow.join: when a step of it ends, and what it makes of the weights, is not known",
        "its loop needs run.keep, run.batches and run.step: elasticflow guide own-loop",
    )
