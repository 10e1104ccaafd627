"""The text of a job file that runs a training script as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics.toml_literals import to_toml
from elasticflow.scaffold.job_text import head, laid_out, nodes, restarts, snapshots

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class ScriptDraft:
    """What is to be written into a job file.

    Attributes:
        name: The job's.
        entry: The script, from the project's root.
        args: Its arguments.
        required: Arguments that its parser asks for and nobody has given.
        workers: Per machine.
        why_alone: Why it is one worker, where the script says so.
        preload: Modules that it imports and that take long.
        is_joined: It calls `elasticflow.join`: the job file says its seed and its snapshots.
    """

    name: str
    entry: str
    args: tuple[str, ...]
    required: tuple[str, ...]
    workers: int | str
    why_alone: str | None
    preload: tuple[str, ...]
    is_joined: bool


def text_of(draft: ScriptDraft) -> str:
    """Return the job file's text."""
    return laid_out(_lines(draft))


def _lines(draft: ScriptDraft) -> Iterator[str]:
    yield from head(draft.name)
    if draft.is_joined:
        yield "seed = 1234 | of the samples' order; what elasticflow.join(seed=...) says without a job file"
    yield ""
    yield "[script]"
    yield f'entry = {to_toml(draft.entry)} | as torchrun starts it; or module = "pkg.train"'
    comment = f" | it asks for {', '.join(draft.required)}" if draft.required else ""
    yield f"args = {to_toml(list(draft.args))}{comment or ' | as on its command line, each word by itself'}"
    modules = list(draft.preload) or ["torchvision"]
    yield f"# preload = {to_toml(modules)} | imported once for all workers and restarts, as torch is"
    yield '# silence = "20 min" | workers that print nothing for so long hang: a failure'
    yield ""
    yield from nodes(draft.workers, draft.why_alone)
    yield ""
    yield from restarts()
    if draft.is_joined:
        yield from snapshots()
    else:
        yield "# [snapshots]"
        yield '# grace = "30 s" | from SIGTERM to the end of a worker: time for a checkpoint of its own'
