"""The keys by which the supervisor and the agents of a launch talk.

All of it lies in one store under the launch's own prefix, in plain keys (`set`, `get`, `add`, `check` and
`delete_key` only, so that etcd fits the same interface: `protocol/etcd_store.py`):

    invitation              what another machine has to know to take part (`invitation.py`)
    exit_code               of the launch, once it is over
    noticed                 number of machines that have read it
    head                    a number that the supervisor changes (`launcher/rendezvous/leadership.py`)
    joined                  number of machines that have joined so far
    told/feeds              number of agents so far
    told/feed/<f>/<i>       messages of the f-th agent to the supervisor, in order
    told/beat/<f>           a number that the f-th agent changes several times a second
    orders/gone/<f>         the f-th agent is to leave: its node was let go, or is taken for lost
    orders/rounds           number of decisions so far
    orders/round/<i>        the i-th: a generation to form, or to stop
    orders/drain/<g>        workers of this generation are asked to leave after a step
    orders/stop/<g>         workers of this generation are to be killed now: a peer has failed

Workers find the store of their own process group by it, under `run/<generation>/` (runtime/process/process_group.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.protocol import control_store

if TYPE_CHECKING:
    from elasticflow.protocol.control_store import ControlStore, RemoteControlStore
    from elasticflow.protocol.store_address import StoreAddress

TOLD = "told"
ORDERS = "orders"
FEEDS = f"{TOLD}/feeds"
ROUNDS = f"{ORDERS}/rounds"
INVITATION = "invitation"
EXIT_CODE = "exit_code"
NOTICED = "noticed"


def join_store(
    address: StoreAddress, *, looks_at: str = ORDERS, answer_s: float = control_store.ANSWER_S
) -> RemoteControlStore:
    """Return a client of the store at *address*.

    Args:
        address: Where, and below which prefix.
        looks_at: First word of the keys that are looked at all the time; empty for none.
        answer_s: Seconds that a server other than etcd has to answer in.

    Raises:
        StoreLostError: it does not.
    """
    return control_store.connect(address, (looks_at,) if looks_at else (), answer_s)


def feed_key(feed: int, number: int) -> str:
    """Return the key of the *number*-th message of the *feed*-th agent."""
    return f"{TOLD}/feed/{feed}/{number}"


def beat_key(feed: int) -> str:
    """Return the key that the *feed*-th agent changes while it lives."""
    return f"{TOLD}/beat/{feed}"


def gone_key(feed: int) -> str:
    """Return the key that has the *feed*-th agent leave."""
    return f"{ORDERS}/gone/{feed}"


def round_key(number: int) -> str:
    """Return the key of the *number*-th round."""
    return f"{ORDERS}/round/{number}"


def request_key(what: str, generation: int) -> str:
    """Return the key that asks for `drain` or `stop` of *generation*."""
    return f"{ORDERS}/{what}/{generation}"


def is_requested(store: ControlStore, what: str, generation: int) -> bool:
    """Return whether the supervisor asked for `drain` or `stop` of *generation*."""
    return bool(store.check([request_key(what, generation)]))


def is_gone(store: ControlStore, feed: int) -> bool:
    """Return whether the agent with this feed is to leave."""
    return bool(store.check([gone_key(feed)]))
