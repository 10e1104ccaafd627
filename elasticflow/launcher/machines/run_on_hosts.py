"""A run on several hosts, from a machine that reaches them by ssh."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from elasticflow.errors import FINISHED, INTERRUPTED, KILLED_BY_USER
from elasticflow.launcher.machines.ssh import HostProcess, check_resolves
from elasticflow.launcher.supervisor.leave_requests import LeaveRequests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.launcher.machines.hosts_file import Host
    from elasticflow.launcher.machines.order import Order

_POLL_S = 0.05
# Once one node knows the run's end all others do, if they can be reached.
_ENDING_S = 30.0


def run_on_hosts(
    orders: Sequence[tuple[Host, Order]],
    show: Callable[[Host, str], None],
    say: Callable[[str], None],
    *,
    first_decides: bool,
) -> int:
    """Run a node on each host until the run is over, or a signal asks to exit; return the exit code. Main thread only.

    A host that cannot be reached, or whose node was killed or asked to leave there, gets another node after a pause.

    Args:
        orders: Each host with its order, the first host first.
        show: Called with each line that a host prints; from several threads.
        say: Called with what a person should know.
        first_decides: The first host serves the store and leads: its end is the run's.

    Raises:
        HostsError: a host's name leads nowhere.
    """
    for host, _ in orders:
        check_resolves(host)
    processes = [HostProcess(host, order, show, say) for host, order in orders]
    asked = LeaveRequests()
    previous = asked.listen()
    try:
        for process in processes:
            process.start()
        _watch(processes, asked, say, first_decides=first_decides)
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    codes = [process.exit_code for process in processes if process.exit_code is not None]
    if FINISHED in codes:
        return FINISHED
    if asked.numbers:
        return KILLED_BY_USER if len(asked.numbers) > 1 else INTERRUPTED
    return codes[0] if first_decides else max(codes)


def _watch(
    processes: list[HostProcess], asked: LeaveRequests, say: Callable[[str], None], *, first_decides: bool
) -> None:
    """Return once no node is left, or none that can be waited for."""
    heard, deadline = 0, float("inf")
    while any(process.is_alive() for process in processes):
        time.sleep(_POLL_S)
        while heard < len(asked.numbers):
            heard += 1
            say(
                "asked to leave: the nodes leave after their step"
                if heard == 1
                else "asked again: the nodes leave now"
            )
            for process in processes:
                process.leave()
        ended = {process.exit_code for process in processes if process.exit_code is not None}
        is_over = FINISHED in ended or (first_decides and processes[0].exit_code is not None)
        if is_over and deadline == float("inf"):
            deadline = time.monotonic() + _ENDING_S
            for process in processes:
                process.finish()
                if FINISHED not in ended:  # else it waits for another machine to lead
                    process.leave()
        if time.monotonic() > deadline:
            for process in processes:
                process.leave()
                process.kill()
            return
