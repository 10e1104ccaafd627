"""How train.py makes the job's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.factories import argument, partial_of
from elasticflow.compiler.entry_point.imports import Imports
from elasticflow.compiler.entry_point.source_code import Call, Code, Name, call, keywords, quoted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.jobfile.tables.hooks import HookTable
    from elasticflow.jobfile.tables.job import Job


def hooks(job: Job, imports: Imports, *, moves_optimizers: bool) -> dict[str, Code]:
    """Return the call that makes the hooks, by its key in the template; nothing for a job without.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    if job.hooks is None or not job.hooks.named():
        return {}
    options: dict[str, Any] = {} if moves_optimizers else {"precision": Name("PRECISION")}
    if job.train.consistency == "exact":
        options["is_exact"] = True
    if job.train.ema is not None:
        options["average"] = Name("average")
    made = {name: hook(table, imports, name) for name, table in job.hooks.named().items()}
    return {"hooks": call("Hooks", "worker", "model", **options, **made)}


def hook_rows(job: Job, taken: Iterable[str]) -> list[dict[str, Code | None]]:
    """Return, for each hook, the lines of the function that makes its record; *taken* mean something else there.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    rows: list[dict[str, Code | None]] = []
    for name, table in (job.hooks.named() if job.hooks else {}).items():
        imports = Imports(taken)
        made = hook(table, imports, name)
        rows.append({"hook.def": f"def make_{name}() -> Hook:", "hook": made, "hook.import": imports.lines()})
    return rows


def hook(table: HookTable, imports: Imports, name: str) -> Call:
    """Return the record of one hook.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    where = f"hooks.{name}.args"
    args = {key: argument(value, imports, f"{where}.{key}") for key, value in table.args.items()}
    function = imports.name_of(table.entry)
    called: Code = partial_of(imports, Call(function, keywords(args, where))) if args else function
    options: dict[str, Any] = {}
    if table.every is not None and (steps := int(table.every.split()[0])) != 1:
        options["every"] = steps
    if table.all_ranks:
        options["all_ranks"] = True
    return Call("Hook", (("", called), ("", quoted(table.entry)), *keywords(options, f"hooks.{name}")))
