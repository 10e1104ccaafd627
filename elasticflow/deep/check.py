"""Imports and calls a job's own code in a child process for `--deep`; its problems become diagnostics at the keys of the job file."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from importlib import util
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never, cast

from elasticflow.compiler.entry_point.factories import call_forms
from elasticflow.compiler.entry_point.functions import functions_of
from elasticflow.compiler.entry_point.render import render_for_child
from elasticflow.compiler.plan.launch_plan import entries
from elasticflow.compiler.plan.torchrun import variables
from elasticflow.deep import child_process
from elasticflow.deep.messages import MESSAGES, DeepRequest, Doing, Done, Facts, Note, Problem
from elasticflow.jobfile.checks.all import check_lengths
from elasticflow.jobfile.checks.evaluation import is_to_be_apart
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import in_order
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import path_of_set
from elasticflow.launcher.agent.stack_dumps import parse
from elasticflow.protocol.json_codec import to_json
from elasticflow.system.installation import module_command
from elasticflow.system.processes import signal_or_code
from elasticflow.system.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from elasticflow.deep.child_process import ChildEnd
    from elasticflow.deep.messages import DeepMessage
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Job, ValidTables
    from elasticflow.jobfile.text.source import Source

LIMIT_S = 60.0
# torchrun sets these for a worker; the job's modules may read them when they are imported.
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
_WARNINGS = frozenset({"device", "memory", "unknown", "left"})
_MOST_FRAMES = 4
_CODES = {
    "import": codes.DEEP_IMPORT,
    "factory": codes.DEEP_FACTORY,
    "result": codes.DEEP_RESULT,
    "sample": codes.DEEP_SAMPLE,
    "collate": codes.DEEP_COLLATE,
    "length": codes.DEEP_LENGTH,
    "state": codes.DEEP_STATE,
    "step": codes.DEEP_STEP,
    "weights": codes.DEEP_WEIGHTS,
    "loss": codes.DEEP_LOSS,
    "hang": codes.DEEP_HANG,
    "died": codes.DEEP_DIED,
    "device": codes.DEEP_UNKNOWN,
    "memory": codes.DEEP_UNKNOWN,
    "unknown": codes.DEEP_UNKNOWN,
    "left": codes.DEEP_LEFT,
    "overlap": codes.DEEP_OVERLAP,
    "other_data": codes.DEEP_OTHER_DATA,
    "restart": codes.DEEP_RESTART,
}
_REMEDIES = {
    "device": "the job needs a GPU, and there is none here: check it on a machine that has one",
    "memory": "the job needs more memory than this machine has: check it on a larger one",
}
_LIMIT = ("snapshots", "staging_limit")


class DeepReport(NamedTuple):
    """Findings of `--deep`.

    Attributes:
        facts: Facts of the job, as far as the child came.
        notes: How the facts were found, and what was not tried.
    """

    problems: tuple[Problem, ...]
    facts: Facts
    notes: tuple[str, ...]


_NO_TORCH = Problem(
    "unknown",
    "model.entry",
    "--deep cannot tell anything here: torch is not installed",
    remedy="pip install 'elasticflow[torch]'",
    is_warning=True,
)


def try_out(
    job: Job,
    project_root: Path,
    *,
    limit_s: float = LIMIT_S,
    takes_step: bool = False,
    watch: Callable[[str], None] = lambda _: None,
) -> DeepReport:
    """Try out the job's own code in a child process, which ends together with every process it started.

    Args:
        limit_s: Limit of the whole check, in seconds.
        takes_step: Also train one step on the CPU.
        watch: Called several times a second with the current activity, in words.

    Raises:
        JobRefusedError: an argument of the job has no Python literal.
    """
    if util.find_spec("torch") is None:
        return DeepReport((_NO_TORCH,), Facts(), ())
    request = request_of(job, project_root, takes_step=takes_step)
    env = {} if job.env is None else job.env.values()
    environment = {**os.environ, **env, **{each.name: each.value for each in variables(job)}, **_ALONE}
    argv = module_command("elasticflow.deep.child.main", str(os.getpid()), options=("-X", "faulthandler"))
    doing = ["importing torch"]

    def look(told: dict[str, Any] | None) -> None:
        if told is not None and isinstance(message := _message(told), Doing):
            doing[0] = message.what
        watch(doing[0])

    look(None)  # the child may be at its next work before it is first looked at
    ended = child_process.run(argv, to_json(request), environment, limit_s, look)
    return report_of(ended, request.own, limit_s)


def request_of(job: Job, project_root: Path, *, takes_step: bool = False) -> DeepRequest:
    """Return the request to the child (`deep/child/main.py`).

    Raises:
        JobRefusedError: an argument of the job has no Python literal.
    """
    forms = call_forms(job, project_root)
    sets = {dotted(path_of_set(name)): table for name, table in job.evaluations.items()}
    data = job.dataset
    # Samples of one forward.
    most = {key: table.batch_size or data.micro_batch_size for key, table in sets.items()}
    most["dataset"] = min(
        data.micro_batch_size or data.global_batch_size,
        data.global_batch_size // (job.train.virtual_shards or 1),
    )
    return DeepRequest(
        entry_point=render_for_child(job, project_root, forms),
        keys={each.name: each.key for each in functions_of(job, forms, ()).values()},
        entries=entries(job),
        own=[str((project_root / part).resolve()) for part in job.job.path],
        apart=tuple(key for key, table in sets.items() if is_to_be_apart(job.dataset, table)),
        alone=tuple(key for key, number in most.items() if number == 1),
        takes_step=takes_step,
    )


def report_of(ended: ChildEnd, own: Sequence[str], limit_s: float) -> DeepReport:
    """Return the child's report; a child that did not finish is itself a problem."""
    problems: list[Problem] = []
    facts = Facts()
    notes: list[str] = []
    doing, key, is_whole = "starting Python and torch", "model.entry", False
    for sent in map(_message, ended.messages):
        match sent:
            case Doing():
                doing, key = sent.what, sent.key
            case Problem():
                problems.append(replace(sent, is_warning=sent.is_warning or sent.kind in _WARNINGS))
            case Facts():
                facts = replace(facts, **sent.known())
            case Note():
                notes.append(sent.text)
            case Done():
                is_whole = True
            case None:
                pass
            case _:
                assert_never(sent)
    if not is_whole:
        problems.append(_cut_short(ended, doing, key, own, limit_s))
    if ended.left:
        message = f"the job's code leaves processes behind: {', '.join(ended.left)}"
        remedy = "they were ended; in a run they would outlive their worker"
        problems.append(Problem("left", "model.entry", message, remedy=remedy, is_warning=True))
    return DeepReport(tuple(dict.fromkeys(problems)), facts, tuple(dict.fromkeys(notes)))


def _message(content: dict[str, Any]) -> DeepMessage | None:
    """Return the message in *content*; None if the job's own code wrote something else to the pipe."""
    try:
        return MESSAGES.from_json(content)
    except ValueError:
        return None


def _cut_short(ended: ChildEnd, doing: str, key: str, own: Sequence[str], limit_s: float) -> Problem:
    frames = tuple(
        f"{_short(frame.file)}:{frame.line}, in {frame.function}"
        for frame in reversed(parse(ended.output))
        if frame.file.startswith(tuple(f"{folder}{os.sep}" for folder in own))
    )[-_MOST_FRAMES:]
    if ended.code is None:
        message = f"trying the job out was not done after {limit_s:g} s in all; the last of it was {doing}"
        remedy = "if all of it takes that long here, give it more with --deep-timeout"
        return Problem("hang", key, message, remedy, frames)
    if ended.code < 0:
        how = signal_or_code(ended.code).removeprefix("killed by ")
        message, remedy = f"{doing} ended the process with {how}", ""
        if -ended.code == signal.SIGKILL:
            remedy = "perhaps the machine has too little memory for it"
    else:
        message = f"{doing} ended the process with exit code {ended.code}"
        remedy = "a worker would be gone without a word"
    last = next((line for line in reversed(ended.output.splitlines()) if line.strip()), "")
    if not frames and last and ended.code > 0:
        remedy = f"{remedy}; the last it printed: {last[:160]}"
    return Problem("died", key, message, remedy, frames)


def _short(file: str) -> str:
    return os.path.relpath(file) if file.startswith(f"{os.getcwd()}{os.sep}") else file  # noqa: PTH109


def diagnostics_of(report: DeepReport, source: Source) -> list[Diagnostic]:
    """Return the problems in the order of their places in the job's files."""
    return in_order(_diagnostic(problem, source) for problem in report.problems)


def _diagnostic(problem: Problem, source: Source) -> Diagnostic:
    remedy = problem.remedy or _REMEDIES.get(problem.kind, "")
    lines = [f"at {frame}" for frame in problem.frames] + [remedy] * bool(remedy)
    return source.problem(
        _CODES[problem.kind],
        problem.message,
        tuple(int(part) if part.isdigit() else part for part in problem.key.split(".")),
        severity="warning" if problem.is_warning else "error",
        remedy="\n".join(lines) or None,
    )


def check_deep_facts(
    source: Source, job: Job, *, samples: int | None, snapshot_bytes: int | None, memory_bytes: int | None
) -> Iterator[Diagnostic]:
    """Yield the problems of a job, given the size of its data and of its snapshots.

    Args:
        job: The job, which has no errors.
        memory_bytes: Main memory of this machine; each node is assumed to have as much.
    """
    tables = cast("ValidTables", {name: getattr(job, name) for name in type(job).model_fields})
    if samples is not None and job.dataset.samples is None:
        tables["dataset"] = job.dataset.model_copy(update={"samples": samples})
        yield from check_lengths(source, tables)
    if snapshot_bytes is not None:
        yield from _staging(source, job, snapshot_bytes, memory_bytes)


def _staging(source: Source, job: Job, snapshot_bytes: int, memory_bytes: int | None) -> Iterator[Diagnostic]:
    """Yield a warning if staged snapshots need more memory than a node has: with the fewest nodes, each stages the most."""
    nodes, snapshots = job.nodes.min, job.snapshots
    part = -(-snapshot_bytes // nodes)
    settings = snapshots.settings()
    held = settings.held_states * snapshot_bytes if settings.is_held_at_interval and nodes == 1 else 0
    needed = max(part, held)
    if snapshots.staging_limit is not None and needed > parse_size(snapshots.staging_limit):
        message = f"snapshots.staging_limit is too small: each node takes {gib(needed)} for snapshots"
        remedy = f"raise it to {gib(needed)} or more, or train on more nodes: each stages a smaller part"
        yield source.problem(codes.STAGING_MEMORY, message, _LIMIT, severity="warning", remedy=remedy)
    elif memory_bytes is not None and part + held > memory_bytes:
        what = "staging a snapshot and holding it in memory" if held else "staging a snapshot"
        message = f"{what} takes {gib(part + held)} on each node, and this machine has {gib(memory_bytes)}"
        remedy = "train on more nodes: each stages a smaller part"
        if held:
            remedy = f"leave snapshots.memory out (it holds {settings.held_states} copies), or train on nodes with more memory"
        path: KeyPath = ("snapshots", "memory") if held else ("snapshots",)
        yield source.problem(codes.STAGING_MEMORY, message, path, severity="warning", remedy=remedy)


def gib(size: int) -> str:
    """Return a size for people: `1.5 GiB`, or in MiB below one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{max(1, round(size / 2**20))} MiB"
