"""[script] -> what a launch runs: the program, as torchrun takes it and as an agent does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.compiler.plan.batch_split import Fact
from elasticflow.protocol.child_processes import Program
from elasticflow.system.units import parse_duration, parse_interval

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.job import Job


class ScriptPlan(Fact):
    """A script of its own that a launch runs; paths are relative to the project root, where it is started.

    Attributes:
        entry: Its file; None: it is a module.
        module: The module that is run as `python -m` does.
        args: Its arguments.
        path: Folders that end `sys.path`.
        silence_s: Seconds without a line that count as a hang; None: nothing does.
        log_every: Steps between two lines of the log, of a script that calls `elasticflow.join`.
    """

    entry: str | None
    module: str | None
    args: tuple[str, ...]
    path: tuple[str, ...]
    silence_s: float | None
    log_every: int

    @property
    def shown(self) -> str:
        """The file, or the module with `-m`, as a person would type it."""
        return self.entry if self.entry is not None else f"-m {self.module}"

    def program(self, project_root: Path) -> Program:
        """Return what the agents of a machine start, on which the project lies at *project_root*."""
        root = project_root.absolute()
        return Program(
            entry="" if self.entry is None else str(root / self.entry),
            name=self.entry or "",
            module=self.module or "",
            args=self.args,
            folder=str(root),
            path=tuple(str(root / part) for part in self.path),
            silence_s=self.silence_s,
        )

    @property
    def import_folder(self) -> str:
        """The folder in which the script finds its modules first: its own, or for a module the project root."""
        return "." if self.entry is None else Path(self.entry).parent.as_posix()


def script_plan(job: Job) -> ScriptPlan | None:
    """Return what a job with [script] runs; None: the job has none."""
    script = job.script
    if script is None:
        return None
    return ScriptPlan(
        entry=script.entry,
        module=script.module,
        args=tuple(script.args),
        path=tuple(job.job.path),
        silence_s=None if script.silence is None else parse_duration(script.silence),
        log_every=int(parse_interval(job.logging.every).amount),
    )


def torchrun_command(plan: ScriptPlan) -> tuple[str, ...]:
    """Return how torchrun is told what to run: behind its options."""
    program = ("--module", plan.module) if plan.module is not None else (plan.entry or "",)
    return (*program, *plan.args)
