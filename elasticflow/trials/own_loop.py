"""Finds out if a job's script has a loop that trials can run: a loop on `elasticflow.join`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.compiler.provenance.origins import own_sources
from elasticflow.errors import TrialRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

# A module that is imported by a name made at run time or from a configuration, or from a folder put on the path, may join.
_MAY_JOIN = re.compile(
    rb"\b(?:elasticflow|importlib|import_module|__import__|runpy|run_module|run_path|exec|hydra|sys\.path)\b"
)


def require_own_loop(job: Job, root: Path) -> None:
    """Check that a job's script, if it has one, may use elasticflow: modules of the project that it imports count, too.

    Raises:
        TrialRefusedError: neither the script nor a module of the project that it imports can call `elasticflow.join`.
    """
    if job.script is None:
        return
    files = [root / name for name in own_sources(job, root, ())]
    if files and not any(_MAY_JOIN.search(file.read_bytes()) for file in files):
        raise nothing_to_try(job.script.entry or job.script.module or "")


def nothing_to_try(script: str) -> TrialRefusedError:
    """Return the refusal of a script that reports no steps."""
    return TrialRefusedError(
        f"{script} does not train by elasticflow.join: when a step of it ends, and what it makes of the weights, is not known",
        "its loop needs run.keep, run.batches and run.step: elasticflow guide own-loop",
    )
