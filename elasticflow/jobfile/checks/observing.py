"""Logging and notices: a command that does not exist, options of a sink that is not chosen, MFU without its keys."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.jobfile.tables.logging import SINKS
from elasticflow.jobfile.text.layers import table_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.source import Source


def check_program(source: Source, tables: ValidTables, root: Path) -> Iterator[Diagnostic]:
    """Yield a warning if notify.command names a program that this machine does not have; *root*: folder of the project."""
    notify = tables.get("notify")
    if notify is None or notify.command is None:
        return
    program, path = notify.command[0], ("notify", "command", 0)
    if "/" in program:
        is_there = shutil.which(root / program) is not None
        remedy = "a relative path starts at the project root; the file must be executable (chmod +x)"
    else:
        is_there = shutil.which(program) is not None
        remedy = "install it where the job runs"
        if (root / program).is_file():
            remedy = f"a file of the project is named with its folder: {show(f'./{program}')}"
    if not is_there:
        message = f"notify.command: there is no program {show(program)} here"
        yield source.problem(codes.NO_PROGRAM, message, path, severity="warning", remedy=remedy)


def check_sink_options(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield a warning for each table of options whose sink is not chosen."""
    logging = tables.get("logging")
    if logging is None or len(source.layers) > 1:
        return  # a base may hold options for jobs that choose the sink; a case or a flag may choose other sinks for once
    given = table_at(source.raw, "logging")
    for name in SINKS:
        if name in given and name not in logging.sinks:
            message = f"[logging.{name}] has no effect: logging.sinks does not have {show(name)}"
            sinks = ", ".join(show(each) for each in [*logging.sinks, name])
            remedy = f"add to [logging]: sinks = [{sinks}]; or leave the table out"
            path = ("logging", name)
            yield source.problem(
                codes.UNUSED_OPTIONS, message, path, at_key=True, severity="warning", remedy=remedy
            )


def check_measures(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of the keys that model FLOPs utilization (MFU) needs."""
    model, logging = tables.get("model"), tables.get("logging")
    if model is None or logging is None:
        return
    if logging.peak_flops is not None and model.flops_per_sample is None:
        message = "logging.peak_flops is a part of MFU, which needs model.flops_per_sample"
        remedy = (
            "say how many floating-point operations training on one sample takes, forward and backward: "
            "of a transformer, some 6 x parameters x tokens"
        )
        yield source.problem(codes.MISSING, message, ("logging", "peak_flops"), remedy=remedy)
