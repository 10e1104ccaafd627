"""The needs of [slurm] in other tables: one head, and a place for snapshots that all nodes see."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import show
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.slurm import SlurmTable
    from elasticflow.jobfile.text.source import Source

# Folders that are local to each machine.
_OF_ONE_MACHINE = re.compile(r"((file|local)://)?/(tmp|var/tmp|dev/shm|run|proc)(/|$)", re.IGNORECASE)
_LONGEST_NOTICE_S = 65_535


def check_slurm(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the keys that keep the job from running as [slurm] says."""
    slurm = tables.get("slurm")
    if slurm is None:
        return
    yield from _head(source, tables, slurm)
    yield from _place(source, tables)
    yield from _notice(source, tables, slurm)


def _head(source: Source, tables: ValidTables, slurm: SlurmTable) -> Iterator[Diagnostic]:
    nodes, torchrun = tables.get("nodes"), tables.get("torchrun")
    if nodes is None or torchrun is None:
        return
    store = torchrun.is_store_outside
    if slurm.form == "array":
        if torchrun.rdzv_backend == "static":
            message = 'slurm.form = "array" has nodes that come and go, and rdzv_backend = "static" has not'
            remedy = 'use form = "gang", or rdzv_backend = "c10d"'
            yield source.problem(codes.SLURM, message, ("slurm", "form"), remedy=remedy)
        elif not store and nodes.max > 1:
            message = (
                'slurm.form = "array" needs a store that stands elsewhere: any of its jobs may be taken away,\n'
                "and without one each would lead a run of its own"
            )
            remedy = (
                "serve one on a machine that stays (elasticflow rendezvous serve --port 29400), and name it:\n"
                '[nodes] endpoint = "HOST:29400"  [torchrun] rdzv_conf = { is_host = false }'
            )
            yield source.problem(codes.SLURM, message, ("slurm", "form"), remedy=remedy)
    elif nodes.endpoint is not None and not store and nodes.max > 1:
        message = (
            f"two heads: nodes.endpoint says {show(nodes.endpoint)}, and Slurm says which node is the first"
        )
        remedy = (
            "leave nodes.endpoint out (by hand: --set nodes.endpoint=HOST:PORT); or, if a store is served there,\n"
            "say so: [torchrun] rdzv_conf = { is_host = false }"
        )
        problem = source.problem(codes.SLURM, message, ("nodes", "endpoint"), remedy=remedy)
        if (
            not problem.is_flag
        ):  # a flag comes from the rendered script, or from a person who starts the job by hand
            yield problem


def _place(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    snapshots = tables.get("snapshots")
    if snapshots is None or snapshots.uri is None or not _OF_ONE_MACHINE.match(snapshots.uri):
        return
    message = (
        f"snapshots.uri: each machine has a {show(snapshots.uri)} of its own, and the job continues on others"
    )
    remedy = (
        "leave it out (the project's folder, shared by all nodes), or name a shared folder or an object store"
    )
    yield source.problem(codes.NOT_SHARED, message, ("snapshots", "uri"), remedy=remedy)


def _notice(source: Source, tables: ValidTables, slurm: SlurmTable) -> Iterator[Diagnostic]:
    snapshots = tables.get("snapshots")
    if snapshots is None:
        return
    path = ("slurm", "notice")
    grace_s = parse_duration(snapshots.grace)
    notice_s = grace_s + 60 if slurm.notice is None else parse_duration(slurm.notice)
    if notice_s > _LONGEST_NOTICE_S:
        message = f"slurm.notice: Slurm gives notice at most {_LONGEST_NOTICE_S} s before the limit"
        yield source.problem(codes.OUT_OF_RANGE, message, path, remedy="make it shorter, or snapshots.grace")
    elif slurm.notice is not None and notice_s < grace_s:
        message = f"slurm.notice ({slurm.notice}) is shorter than snapshots.grace ({snapshots.grace})"
        remedy = "give more notice: Slurm kills what has not left by the time limit"
        yield source.problem(codes.SLURM, message, path, remedy=remedy)
    elif slurm.time is not None and parse_duration(slurm.time) <= notice_s:
        message = f"slurm.time ({slurm.time}) is over before notice of it ({notice_s:g} s) could be given"
        remedy = "ask for more time, or set slurm.notice to less"
        yield source.problem(codes.SLURM, message, ("slurm", "time"), remedy=remedy)
