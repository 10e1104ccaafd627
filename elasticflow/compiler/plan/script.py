"""[script] -> the program of a launch, in the forms for torchrun and for an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.compiler.plan.batch_split import Fact
from elasticflow.protocol.child_processes import Program
from elasticflow.system.units import parse_duration, parse_interval

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job


class ScriptPlan(Fact):
    """A user's script that a launch runs; paths are relative to the project root, where the script is started.

    Attributes:
        entry: File of the script; None: the script is a module.
        module: The module that is run as by `python -m`.
        path: Folders at the end of `sys.path`.
        silence_s: Seconds without a line that count as a hang; None: silence is never a hang.
        log_every: Steps between two lines of the log, for a script that calls `elasticflow.join`.
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
        """Return the program that the agents of a machine start; *project_root*: on that machine."""
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


def script_plan(job: Job) -> ScriptPlan | None:
    """Return the script that a job runs; None for a job without [script]."""
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
    """Return the end of torchrun's command, after its options: the program and its arguments."""
    # torchrun's parser looks at the script's arguments, too, and refuses `--logs` as short for two options of its own.
    end = ("--",) if any(text.startswith("--") for text in plan.args) else ()
    program = ("--module", *end, plan.module) if plan.module is not None else (*end, plan.entry or "")
    return (*program, *plan.args)
