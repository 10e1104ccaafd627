"""Agents, writers and fork servers killed while a launch begins, or while a group restarts."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import psutil

from elasticflow import events

if TYPE_CHECKING:
    from tests.end_to_end.disturbed import Series

VICTIMS = {
    "agent": "elasticflow.launcher.agent.main",
    "writer": "elasticflow.snapshots.writer.main",
    "fork server": "elasticflow.launcher.fork_server.server",
}
# A restart takes this long where nothing else runs; how long a start takes, `tiny_reference` says.
RESTART_S = 0.3


def strike(series: Series, *victims: str, within_s: float) -> None:
    """Kill *victims* one after the other, each at a random moment of the next *within_s*; return once training continues.

    A victim that is not there at its moment is killed as soon as it is. Each kill ends an agent with all its helpers, so
    the next victim is a helper of the agent that follows.
    """
    ended: set[int] = set()
    for victim in victims:
        at_s = random.uniform(0, within_s)
        print(f"{victim} is killed after {at_s:.3f} s", flush=True)
        time.sleep(at_s)
        ended.add(series.wait(victim, partial(_kill, series, victim, ended)))
    killed_at = time.time()
    series.wait("a step after the kill", lambda: _has_gone_on(series, killed_at))


def _kill(series: Series, victim: str, ended: set[int]) -> int | None:
    """Kill *victim* and return the process id of its agent, which is none of *ended*; None while it is not there."""
    for process in series.running.tree():
        with suppress(psutil.Error):
            family = [process, *process.parents()]
            # Workers bear the command line of the fork server that they came from.
            is_worker = VICTIMS["fork server"] in family[1].cmdline()
            if VICTIMS[victim] in process.cmdline() and not is_worker:
                agent = next((each.pid for each in family if VICTIMS["agent"] in each.cmdline()), None)
                if agent is not None and agent not in ended:
                    process.kill()
                    return agent
    return None


def _has_gone_on(series: Series, after: float) -> bool:
    """Return whether a generation has finished its first step after that unix time."""
    steps = series.named(events.TRAINING_FIRST_STEP)
    return any(datetime.fromisoformat(step["timestamp"]).timestamp() > after for step in steps)
