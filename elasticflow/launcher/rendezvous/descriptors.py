"""How many files the process that serves a launch's keys may have open: each node has several connections to it."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.compiler.plan.launch_plan import LaunchPlan

PER_NODE = 7
"""Connections that a node holds: three of its command, four of its agent. Each worker has one while it begins."""
_OWN = 100
# Of a node whose job has one for each GPU or core.
_WORKERS = 8
_MOST = 1 << 16


def allow_many() -> None:
    """Let this process have as many files open as the system allows it, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def needed(nodes: int, workers_per_node: int) -> int:
    """Return how many files the process may have open at a time that serves the keys of so many *nodes*."""
    return _OWN + (PER_NODE + workers_per_node) * nodes


def exhausted() -> str:
    """Return why no more connections are accepted, and what helps."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process may have no more than {soft:,} files open; raise `ulimit -n` where the launch is started"


def warning(plan: LaunchPlan) -> str | None:
    """Return what to say where this process is to serve more nodes than it may have connections; None if it may."""
    if plan.is_store_outside or plan.nodes_max == 1:
        return None
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    workers = plan.nproc_per_node if isinstance(plan.nproc_per_node, int) else _WORKERS
    wanted = needed(plan.nodes_max, workers)
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return None
    return (
        f"{plan.nodes_max:,} nodes take {wanted:,} connections to this process, which may have {hard:,} files open: "
        f"nodes beyond that cannot join; raise `ulimit -Hn` to {wanted}"
    )
