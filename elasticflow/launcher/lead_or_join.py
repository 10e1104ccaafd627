"""One command for all machines of a run: `run JOB --run-id ID --join HOST:PORT` leads the run or takes part in it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elasticflow.errors import (
    INTERRUPTED,
    LaunchNotFoundError,
    LeaderMissingError,
    LedElsewhereError,
    NodeRefusedError,
    RendezvousError,
    RunLockedError,
)
from elasticflow.launcher.join import (
    MOST_LOCKED,
    Node,
    await_launch,
    lead_unless_led,
    plan_to_join,
    why_not_served,
)
from elasticflow.launcher.rendezvous.leadership import connect
from elasticflow.protocol.store_address import StoreLostError, is_here
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.launcher.supervisor.launch_record import Request
    from elasticflow.protocol.store_address import StoreAddress

# A scheduler may start the machine that leads long after the others: its image has to be fetched first.
_PATIENCE_S = 600.0
_AGAIN_S = 1.0
# Tries without a leader after which a scheduler is asked for the leading machine, and tries between two such questions.
_ASKED_AFTER, _ASKED_EVERY = 5, 15


def lead_or_join(
    request: Request,
    address: StoreAddress,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    lead: Callable[[Request], int],
    why_leader_is_lost: Callable[[], str | None] = lambda: None,
) -> int:
    """Lead the run of *request*, or take part in it where another machine leads it; return the exit code.

    Where a store of its own stands at *address*, any machine may lead: the first one does, and when it is gone another
    one. Else the machine that *address* names serves the store and leads, and the others wait until it is back.

    Args:
        request: The job as this machine has it, and the run.
        warn: Called with each sentence that a person should read before this machine takes part.
        lead: Makes the launch that it is given, and returns its exit code.
        why_leader_is_lost: Asks the scheduler: returns the reason if the machine that leads will not come back, else None.

    Raises:
        LeaderMissingError: no one leads the run for ten minutes, or the scheduler has lost the machine that leads.
        RunLockedError: another process has the run's lock for ten minutes, and does not lead it at *address*.
        NodeRefusedError: this machine would train something else, or does not see the run's snapshots.
        TokenError: this machine's token cannot be had.
        ElasticflowError: it leads, and the launch cannot begin (`launch.prepare`).
    """
    plan, store_address = plan_to_join(request, address, warn)
    last = locked = 0
    patience = _Patience(address, say)
    while True:
        if _may_lead(plan, request.node_rank, address, say, why_leader_is_lost):
            try:
                return (
                    lead_unless_led(request, lead, store_address, last)
                    if plan.is_store_outside
                    else lead(request)
                )
            except LedElsewhereError:
                pass
            except RunLockedError:
                # If machines that share the run folder start at once, the first has the lock before it leads.
                locked += 1
                if not plan.is_store_outside or locked > MOST_LOCKED:
                    raise
            except RendezvousError as error:
                # The store answered a moment ago: it may be on its way to come back.
                if not plan.is_store_outside or isinstance(error.__cause__, ImportError):
                    raise
                patience.spend(error)
                continue
        try:
            is_patient = not plan.is_store_outside or locked > 0
            code, last = _take_part(request, plan, store_address, last, say, is_patient=is_patient)
        except (StoreLostError, LaunchNotFoundError, RendezvousError) as error:
            patience.spend(error)
            continue
        if code is not None:
            return code
        locked, patience = 0, _Patience(address, say)


class _Patience:
    """The time for which one error after the other is waited out: what answers may be a proxy, or another program."""

    def __init__(self, address: StoreAddress, say: Callable[[str], None]) -> None:
        self._address, self._say = address, say
        self._since: float | None = None
        self._said = ""

    def spend(self, error: Exception) -> None:
        """Say that *error* is waited out, unless that was said last, and wait a moment.

        Raises:
            LeaderMissingError: the first error came ten minutes ago.
        """
        now, reason = time.monotonic(), str(error).splitlines()[0]
        self._since = self._since or now
        if now > self._since + _PATIENCE_S:
            message = f"nobody leads the run at {self._address.endpoint}: {reason}"
            raise LeaderMissingError(
                message, "see what answers there; the same command waits again"
            ) from error
        if reason != self._said:
            self._said = reason
            self._say(f"{reason}: looking again")
        time.sleep(_AGAIN_S)


def _may_lead(
    plan: LaunchPlan,
    node_rank: int | None,
    address: StoreAddress,
    say: Callable[[str], None],
    why_leader_is_lost: Callable[[], str | None],
) -> bool:
    """Return whether this machine may lead, once it may, or someone else serves a store at *address*."""
    for attempt, _ in enumerate(attempts(_PATIENCE_S, _AGAIN_S)):
        # A name may be known only a while after the machine has begun: asked for each time.
        is_head = is_here(address.host) if node_rank is None else node_rank == 0
        if not plan.is_store_outside and is_head:
            return True
        if (refusal := why_not_served(address)) is None:
            return plan.is_store_outside
        if attempt == 0:
            say(f"waiting for {address.endpoint}: {refusal}")
        if attempt % _ASKED_EVERY == _ASKED_AFTER and (reason := why_leader_is_lost()) is not None:
            raise LeaderMissingError(
                f"nobody leads the run at {address.endpoint}: {reason}", "start the job again"
            )
    what = "serves the rendezvous" if plan.is_store_outside else "leads the run"
    raise LeaderMissingError(
        f"nobody {what} at {address.endpoint}",
        "the same command waits again; see why that machine is not there",
    )


def _take_part(
    request: Request,
    plan: LaunchPlan,
    store_address: StoreAddress,
    last: int,
    say: Callable[[str], None],
    *,
    is_patient: bool,
) -> tuple[int | None, int]:
    """Take part in the newest launch; return the exit code, None if the run needs another one, and the launch's number.

    Raises:
        NodeRefusedError: the launch is another run's, or this machine may not take part.
        LaunchNotFoundError: no one leads the run.
        RendezvousError: the store is gone.
        StoreLostError: the store was lost meanwhile.
        TokenRefusedError: this machine's token is not the launch's.
    """
    # A store that a supervisor serves goes with its launch: numbers begin anew.
    last = last if plan.is_store_outside else 0
    number = await_launch(connect(store_address), store_address, last, say, is_patient=is_patient)
    node = Node(request, plan, store_address.under(str(number)), say)
    if node.folder.run_id != request.folder.run_id:
        raise NodeRefusedError(
            f"run {node.folder.run_id} is led at {store_address.endpoint}, not {request.folder.run_id}",
            "end that run first, or give this one another address",
        )
    code = node.take_part()
    if code is None:
        say("the process that led the run is gone")
    elif code == INTERRUPTED and not node.was_asked:
        say("the launch is over, and the run is not: it continues as soon as a machine leads it")
        return None, number
    return code, number
