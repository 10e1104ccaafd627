"""What `plan` says of a job that runs a script of its own: how it is started, who counts as hung, what is left to it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from elasticflow.observe.terminal.formats import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.plan.script import ScriptPlan
    from elasticflow.jobfile.tables.job import Job, RestartsTable


def script_facts(plan: LaunchPlan, script: ScriptPlan, job: Job) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line between the job's and the restarts'."""
    yield "script", shlex.join([*shlex.split(script.shown), *script.args])
    yield (
        "",
        "started in the project root, with torchrun's variables; MASTER_PORT is another one at each start",
    )
    shared = ["torch", *plan.modules]
    yield "imports", f"{', '.join(shared)}: once for all workers and restarts; the rest by each worker"
    yield (
        "checkpoints",
        "the script's own: a restart begins the script again, which goes on from what it has saved, or from nothing",
    )
    yield (
        "",
        "with `elasticflow.join` in it: [snapshots], steps that status and report know, and by `run.batches` every sample once; which samples come after a restart is the script's own business where it reads them itself",
    )
    yield (
        "drain",
        f"SIGTERM to each worker, {job.snapshots.grace} to leave in, with any exit code (75 of the launch); then it is killed",
    )


def script_restarts(table: RestartsTable, script: ScriptPlan) -> str:
    """Return what failures of a script cost."""
    refill = f", full again after {table.refill}" if table.refill else ""
    failures = (
        "the first failure ends the run (exit code 3)"
        if table.budget == 0
        else f"{plural(table.budget, 'failure')}{refill}; the next one ends the run (exit code 3)"
    )
    hangs = (
        "Nothing counts as a hang: set script.silence"
        if script.silence_s is None
        else f"No line from any worker for {script.silence_s:g} s is a failure"
    )
    return (
        f"{failures}. {hangs}. The same error of the script twice ends the run, and so does a wrong argument. "
        "Resizes, drains and preemptions are free"
    )
