"""`--deep`: options, the look itself, and what it tells in a line (floor 5)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.launcher.deep import Look
    from elasticflow.spec.diagnostics import Diagnostic
    from elasticflow.spec.load import LoadedJob


class DeepRequest(NamedTuple):
    """How the job's own code is tried out: with a step, and for how many seconds at most."""

    takes_step: bool
    limit_s: int


def deep_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--deep`, `--deep-step` and `--deep-timeout`."""
    for option in (
        click.option(
            "--deep-timeout",
            metavar="SECONDS",
            type=click.IntRange(1, 86_400),
            default=60,
            show_default=True,
            help="Most time that --deep takes for each job.",
        ),
        click.option(
            "--deep-step", is_flag=True, help="Like --deep, and train one step of two samples on the CPU."
        ),
        click.option(
            "--deep",
            is_flag=True,
            help="Import and call the job's own code, in a child process: build model and optimizer, read two samples.",
        ),
    ):
        command = option(command)
    return command


def look_at(
    loaded: LoadedJob, overrides: Sequence[str], request: DeepRequest
) -> tuple[Look, list[Diagnostic]]:
    """Return what trying out a job without errors tells, and its findings at their places."""
    from elasticflow.launcher.deep import look
    from elasticflow.launcher.deep_findings import diagnostics_of
    from elasticflow.spec import known_facts
    from elasticflow.spec.source import load

    assert loaded.job is not None
    found = look(loaded.job, loaded.project_root, limit_s=request.limit_s, takes_step=request.takes_step)
    source, facts = load(loaded.path, overrides), found.facts
    known = known_facts.check(
        source,
        loaded.job,
        samples=facts.get("samples"),
        snapshot_bytes=facts.get("snapshot_bytes"),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    return found, [*diagnostics_of(found, source), *known]


def look_at_all(
    jobs: Sequence[LoadedJob], overrides: Sequence[str], request: DeepRequest
) -> tuple[list[Diagnostic], str]:
    """Return the findings about several jobs, and lines that tell what was learnt of each."""
    found: list[Diagnostic] = []
    lines = []
    for loaded in jobs:
        text = "not tried out: it has errors"
        if loaded.job is not None:
            look, findings = look_at(loaded, overrides, request)
            found += findings
            text = words_of(look)
        lines += [f"{loaded.path}: {text}\n"] * bool(text)
    return found, "".join(lines)


def words_of(look: Look) -> str:
    """Return in words what was learnt; empty if nothing was."""
    from elasticflow.observe.formats import plural, size

    facts, parts = look.facts, []
    if "samples" in facts:
        of = f" of {facts['sample']}" if "sample" in facts else ""
        parts.append(f"{plural(facts['samples'], 'sample')}{of}")
    if "parameters" in facts:
        frozen = facts["parameters"] - facts["trainable"]
        parts.append(
            plural(facts["parameters"], "parameter") + (f", {frozen:,} of them frozen" if frozen else "")
        )
    if "snapshot_bytes" in facts:
        parts.append(f"a snapshot is {size(facts['snapshot_bytes'])}")
    if "loss" in facts:
        parts.append(f"loss of the first step {float(facts['loss']):.4g}")
    return "; ".join([*parts, *look.notes])
